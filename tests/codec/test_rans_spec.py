"""Tables, prefix and hostile streams of the rANS codec."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_zoo import make
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpoint import digest
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import CodedPart, EncodedPart, PartSpec
from thinpoint.codec.plan import log2_table, sample_groups
from thinpoint.codec.rans.spec import (
    RansPrefix,
    encode_tables,
    normalise,
    pack_prefix,
    pack_table,
    parse_prefix,
    table_bytes,
)
from thinpoint.codec.transforms.split import Split, choose_split, join_words, split_words
from thinpoint.errors import (
    DamagedFileError,
    MalformedFileError,
    StateChangedError,
    ThinpointError,
    UnknownCodecError,
)

REFERENCE, CPU = get_backend("reference"), get_backend("cpu")


def test_log2_table_is_the_floor_of_the_real_logarithm() -> None:
    table = log2_table()
    assert table[1] == 0 and table[4096] == 12 << 16
    for f in range(1, 4097):
        assert abs(int(table[f]) - math.floor(math.log2(f) * 65536)) <= 1
    assert digest.reference(table.astype("<i8")) == 9231302052568522553


@given(st.lists(st.integers(0, 10**9), min_size=256, max_size=256).filter(any))
def test_frequencies_sum_to_4096_and_none_is_lost(counts: list[int]) -> None:
    histogram = np.array(counts, np.int64)
    freqs = normalise(histogram, histogram > 0)
    assert freqs.sum() == 4096
    assert ((freqs > 0) == (histogram > 0)).all()


@pytest.mark.parametrize(
    ("freqs", "stored"),
    [
        ({0: 4096}, "80 20 01 00"),
        ({1: 4096}, "00 01 01 80 20"),
        ({0: 200, 5: 1, 7: 3895}, "c8 01 05 07 01 00 b7 1e"),
        ({0: 127, 1: 128, 254: 1, 255: 3840}, f"7f 01 ff 80 01 {'00 ' * 252} 01 80 1e"),
    ],
    ids=str,
)
def test_table_as_stored(freqs: dict[int, int], stored: str) -> None:
    table = np.zeros(256, np.int64)
    table[list(freqs)] = list(freqs.values())
    assert pack_table(table) == bytes.fromhex(stored)
    assert table_bytes(table) == len(pack_table(table))


@pytest.mark.parametrize("f", [1, 2, 3, 5, 7, 100, 1023, 2048, 2049, 4094, 4095])
def test_reciprocals_divide_exactly_below_the_renormalised_state(f: int) -> None:
    freqs = np.zeros(256, np.int64)
    freqs[3], freqs[9] = f, 4096 - f
    freq, bias, reciprocal, shift = (a.astype(object) for a in encode_tables(freqs))
    rng = np.random.default_rng(f)
    limit = f << 19
    states = [
        *range(1 << 15, min(limit, (1 << 15) + 300)),
        *map(int, rng.integers(1 << 15, limit, 2000)),
        limit - 1,
    ]
    for x in states:
        quotient = (x * reciprocal[3] >> 32) >> shift[3]
        assert x + bias[3] + quotient * (4096 - freq[3]) == 4096 * (x // f) + x % f


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "uint8"])
def test_split_and_join_are_inverse_for_every_mantissa_length(dtype: str) -> None:
    for kind in ("special", "powers", "random"):
        words, _ = make(kind, dtype, 4000)
        for zeros in range(0, 8 * words.itemsize, 3):
            cut = words >> words.dtype.type(zeros) << words.dtype.type(zeros)
            for part in (
                cut,
                cut
                & words.dtype.type(
                    ~(1 << (8 * words.itemsize - 1)) & (1 << 64) - 1 & int(np.iinfo(words.dtype).max)
                ),
            ):
                split = choose_split(
                    dtype, words.itemsize, int(np.bitwise_or.reduce(part)), int(np.bitwise_and.reduce(part))
                )
                assert split is not None and split.is_valid
                assert split.raw_bits % 2 == 0
                assert np.array_equal(join_words(*split_words(part, split), split), part)


def test_split_follows_the_specification() -> None:
    everything = 0xFFFFFFFF
    assert choose_split("float32", 4, everything, 0) == Split(
        word_bits=32, sign_mode=1, trailing_zeros=0, low_bits=21
    )
    assert choose_split("float32", 4, everything >> 1, 0) == Split(
        word_bits=32, sign_mode=2, trailing_zeros=0, low_bits=20
    )
    assert choose_split("float32", 4, 0xFFFF0000, 0) == Split(
        word_bits=32, sign_mode=1, trailing_zeros=16, low_bits=5
    )
    assert choose_split("bfloat16", 2, 0xFFFF, 0) == Split(
        word_bits=16, sign_mode=1, trailing_zeros=0, low_bits=5
    )
    assert choose_split("float16", 2, 0xFFFF, 0x8000) == Split(
        word_bits=16, sign_mode=3, trailing_zeros=0, low_bits=8
    )
    assert choose_split("int32", 4, everything, 0) is None


def test_sampled_groups_ascend_and_spread_over_the_part() -> None:
    for num_groups, count in ((255, 256), (256, 256), (257, 256), (300, 256), (70000, 4374)):
        groups = sample_groups(np.arange(num_groups), num_groups * 256 - 5, count)
        assert groups.size == min(num_groups, count)
        assert (np.diff(groups) >= 0).all()
        assert groups[-1] < num_groups - (num_groups > count)
        if num_groups > 4096:
            columns = np.bincount(groups % 16, minlength=16)
            assert columns.min() > 0.8 * groups.size / 16


def coded(
    kind: str = "outliers", dtype: str = "float32", length: int = 40000
) -> tuple[np.ndarray, EncodedPart]:
    words, row = make(kind, dtype, length)
    part = CPU.encode(words, PartSpec(dtype=dtype, row_elems=row))
    assert part.codec_id == 2
    return words, part


@pytest.mark.parametrize("kind", ["outliers", "idle", "columns", "powers"])
def test_prefix_round_trips(kind: str) -> None:
    _, part = coded(kind)
    prefix = parse_prefix(part.prefix, part.num_elems, part.word_bytes, part.block_elems)
    assert pack_prefix(prefix) == part.prefix


def test_outliers_become_patches() -> None:
    _, part = coded()
    prefix = parse_prefix(part.prefix, part.num_elems, part.word_bytes, part.block_elems)
    assert prefix.patch_positions.size > 10


def replace_field(part: EncodedPart, offset: int, value: bytes) -> CodedPart:
    prefix = part.prefix[:offset] + value + part.prefix[offset + len(value) :]
    return CodedPart(
        codec_id=part.codec_id,
        word_bytes=part.word_bytes,
        num_elems=part.num_elems,
        block_elems=part.block_elems,
        prefix=prefix,
        block_sizes=part.block_sizes,
    )


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"\xff"),
        (1, b"\x04"),
        (2, b"\x20"),
        (3, b"\x00"),
        (3, b"\xff"),
        (4, b"\x00\x00"),
        (4, b"\x07\x00"),
        (4, b"\xff\xff"),
        (6, b"\x01"),
        (7, b"\x01"),
        (8, b"\xff\xff\xff\x7f"),
        (12, b"\x00\x00\x00\x80"),
        (20, b"\x01\x00\x00\x00"),
        (24, b"\xff\xff\xff\xff"),
        (24, b"\x00\x00\x00\x00"),
        (28, b"\x01"),
        (32, b"\xff\xff\xff\xff"),
    ],
)
def test_a_prefix_that_lies_is_malformed(offset: int, value: bytes) -> None:
    _, part = coded()
    for backend in (REFERENCE, CPU):
        with pytest.raises(MalformedFileError):
            backend.decode(
                replace_field(part, offset, value), 0, part.blocks, np.zeros(part.num_elems, np.uint32)
            )


def test_a_prefix_cut_anywhere_is_malformed() -> None:
    _, part = coded("columns", length=3000)
    for length in range(len(part.prefix)):
        with pytest.raises(MalformedFileError):
            parse_prefix(part.prefix[:length], part.num_elems, part.word_bytes, part.block_elems)


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        ("", "cut off"),
        ("80", "cut off"),
        ("80 20", "cut off"),
        ("80 20 01", "cut off"),
        ("c8 01 05 07 01 00", "cut off"),
        ("c8 01 05 07 01 00 b7", "cut off"),
        ("80 00 01 00", "is not valid"),
        ("80 80 01 00", "is not valid"),
        ("00 00 01 80 10 80 10 00", "symbol range"),
        ("80 10 01 02 00 80 10 00", "symbol range"),
        ("80 10 01 02 80 10 00 00", "symbol range"),
        ("80 20 01 00", "sum to 4096"),
        ("c8 01 05 07 01 00 b6 1e", "sum to 4096"),
        ("c8 01 05 07 01 00 b8 1e", "sum to 4096"),
        ("c8 01 05 07 01 00 b7 1e 00", "longer"),
        ("80 10 01 01 80 10 00 01", "padding"),
    ],
)
def test_a_table_that_lies_is_malformed(stored: str, what: str) -> None:
    freqs = np.zeros(256, np.int64)
    freqs[[0, 1]] = 2048
    prefix = RansPrefix(
        split=Split(word_bits=32, sign_mode=1, trailing_zeros=0, low_bits=21),
        steps=8,
        window_base=0,
        freqs=freqs,
        kept_groups=None,
        means=np.zeros(1, np.int32),
        profile=None,
        patch_positions=np.zeros(0, np.int64),
        patch_tops=np.zeros(0, np.int32),
    )
    good = pack_prefix(prefix)
    assert (parse_prefix(good, 256, 4, 256).freqs == freqs).all()
    with pytest.raises(MalformedFileError, match=what):
        parse_prefix(good[:32] + bytes.fromhex(stored), 256, 4, 256)


def damaged(
    blocks: tuple[tuple[np.ndarray, ...], ...], plane: int, byte: int, bit: int
) -> list[list[np.ndarray]]:
    copy = [[block.copy() for block in p] for p in blocks]
    copy[plane][0][byte % copy[plane][0].size] ^= np.uint8(1 << bit)
    return copy


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1),
    st.integers(0, 1 << 20),
    st.integers(0, 7),
    st.sampled_from(["outliers", "idle", "columns"]),
)
def test_a_damaged_stream_is_refused_or_changes_the_digest(
    plane: int, byte: int, bit: int, kind: str
) -> None:
    words, part = coded(kind, length=3000)
    blocks = damaged(part.blocks, plane, byte, bit)
    verdicts = []
    for backend in (REFERENCE, CPU):
        out = np.zeros_like(words)
        try:
            partial = backend.decode(part, 0, blocks, out)
            assert (partial == part.raw_digest) == np.array_equal(out, words)
            verdicts.append(out.tobytes())
        except MalformedFileError:
            verdicts.append(b"refused")
    assert verdicts[0] == verdicts[1]


@settings(max_examples=150, deadline=None)
@given(
    st.binary(min_size=0, max_size=600),
    st.binary(min_size=0, max_size=2000),
    st.binary(min_size=0, max_size=2000),
    st.integers(0, 4),
)
def test_arbitrary_bytes_never_do_worse_than_an_error(
    prefix: bytes, first: bytes, second: bytes, codec: int
) -> None:
    planes = [first, second] if codec == 2 else [] if codec == 1 else [first]
    blocks = [[np.frombuffer(p + bytes(-len(p) % 8), np.uint8).copy()] for p in planes]
    part = CodedPart(
        codec_id=codec,
        word_bytes=4,
        num_elems=700,
        block_elems=262144,
        prefix=prefix,
        block_sizes=np.array([[b.size for b in p] for p in blocks], np.int64).reshape(
            len(planes), int(bool(planes))
        ),
    )
    for backend in (REFERENCE, CPU):
        try:
            backend.decode(part, 0, blocks, np.zeros(700, np.uint32))
        except ThinpointError as error:
            assert isinstance(error, DamagedFileError | UnknownCodecError)


def test_an_unknown_codec_is_named() -> None:
    part = CodedPart(
        codec_id=77,
        word_bytes=4,
        num_elems=1,
        block_elems=1,
        prefix=b"",
        block_sizes=np.zeros((0, 0), np.int64),
    )
    with pytest.raises(UnknownCodecError, match="77"):
        CPU.decode(part, 0, [], np.zeros(1, np.uint32))


@pytest.mark.parametrize("change", ["low_bit", "sign", "idle_group"])
def test_words_that_change_under_the_encoder_are_refused(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, row = make("idle", "float32", 40000)
    words &= np.uint32(0x7FFF0000)
    kept = np.flatnonzero(words)
    make_plan = __import__("thinpoint.codec.backend", fromlist=["make_plan"]).make_plan

    def plan_then_change(words: np.ndarray, *rest: object) -> object:
        plan = make_plan(words, *rest)
        if change == "low_bit":
            words[kept[5]] |= np.uint32(1)
        elif change == "sign":
            words[kept[5]] |= np.uint32(0x80000000)
        else:
            assert plan.kept is not None
            words[int(np.flatnonzero(~plan.kept)[0]) * 256] = 7
        return plan

    monkeypatch.setattr("thinpoint.codec.backend.make_plan", plan_then_change)
    for backend in (REFERENCE, CPU):
        with pytest.raises(StateChangedError):
            backend.encode(words.copy(), PartSpec(dtype="float32", row_elems=row))
