"""Every backend is exact and gives the same bytes: the promise that the stream depends on nothing but plan and version."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
from codec_zoo import KINDS, LENGTHS, LONG_LENGTHS, WORDS, make
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec
from thinpoint.digest import reference as reference_digest
from thinpoint.errors import EncodeProofError

REFERENCE, CPU = get_backend("reference"), get_backend("cpu")


def same_bytes(a: EncodedPart, b: EncodedPart) -> bool:
    return (
        (a.codec_id, a.word_bytes, a.num_elems, a.block_elems, a.prefix, a.raw_digest, a.chain)
        == (b.codec_id, b.word_bytes, b.num_elems, b.block_elems, b.prefix, b.raw_digest, b.chain)
        and np.array_equal(a.block_sizes, b.block_sizes)
        and np.array_equal(a.block_digests, b.block_digests)
        and all(
            np.array_equal(x, y)
            for p, q in zip(a.blocks, b.blocks, strict=True)
            for x, y in zip(p, q, strict=True)
        )
    )


def decode(
    backend: HostBackend, part: EncodedPart, first: int = 0, last: int | None = None
) -> tuple[np.ndarray, int]:
    """Decoded words (from a poisoned buffer) and their partial digest."""
    last = part.num_blocks if last is None else last
    start, end = first * part.block_elems, min(last * part.block_elems, part.num_elems)
    out = np.full(end - start if part.num_planes else part.num_elems, 0xA5, f"<u{part.word_bytes}")
    return out, backend.decode(part, first, [plane[first:last] for plane in part.blocks], out)


def check(words: np.ndarray, spec: PartSpec) -> EncodedPart:
    before = words.copy()
    part = REFERENCE.encode(words, spec)
    assert same_bytes(part, CPU.encode(words, spec))
    assert np.array_equal(words, before)
    assert part.raw_digest == reference_digest(words)
    assert part.stored_bytes <= -(-words.nbytes // 8) * 8
    for backend in (REFERENCE, CPU):
        out, partial = decode(backend, part)
        assert np.array_equal(out, words)
        assert partial == part.raw_digest
    for (plane, block), stored in np.ndenumerate(part.block_digests):
        data = part.blocks[plane][block]
        assert data.size == part.block_sizes[plane, block] and data.size % 8 == 0
        assert reference_digest(data) == stored
    return part


@pytest.mark.parametrize("dtype", WORDS)
def test_reference_and_cpu_give_the_same_bytes_on_the_zoo(dtype: str) -> None:
    for kind in KINDS:
        for length in LENGTHS:
            words, row_elems = make(kind, dtype, length)
            check(words, PartSpec(dtype=dtype, row_elems=row_elems))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "uint8"])
@pytest.mark.parametrize("kind", ["normal", "idle", "columns", "outliers"])
def test_parts_of_several_blocks(dtype: str, kind: str) -> None:
    for length in LONG_LENGTHS:
        words, row_elems = make(kind, dtype, length)
        part = check(words, PartSpec(dtype=dtype, row_elems=row_elems))
        for block in range(part.num_blocks):
            start, end = part.block_range(block)
            for backend in (REFERENCE, CPU):
                assert np.array_equal(decode(backend, part, block, block + 1)[0], words[start:end])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_patterns_of_a_16_bit_float(dtype: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    check(words, PartSpec(dtype=dtype))
    check(np.random.default_rng(0).permutation(words), PartSpec(dtype=dtype, row_elems=256))


def test_the_zoo_reaches_every_chain() -> None:
    chains = set()
    for dtype in WORDS:
        for kind in KINDS:
            words, row_elems = make(kind, dtype, 32769)
            chains.update(CPU.encode(words, PartSpec(dtype=dtype, row_elems=row_elems)).chain.split("+"))
    assert chains >= {"raw", "const", "rans", "zstd", "zero", "group", "column"}
    assert any(chain.startswith("tz") for chain in chains)


def test_a_single_symbol_needs_no_entropy_coding() -> None:
    low = np.random.default_rng(0).integers(0, 1 << 20, 5000, dtype=np.uint32)
    part = check(low | np.uint32(0x3F800000), PartSpec(dtype="float32"))
    assert part.chain == "single"
    assert part.block_sizes[1].sum() == 0


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, PartSpec]:
    dtype = draw(st.sampled_from(sorted(WORDS)))
    length = draw(st.integers(1, 3000))
    seed = draw(st.integers(0, 1 << 30))
    words, _ = make(draw(st.sampled_from(KINDS)), dtype, length, seed)
    rng = np.random.default_rng(seed)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start, length))
        words[start:stop] = rng.integers(0, 1 << 63, dtype=np.uint64).astype(words.dtype)
    role = draw(st.sampled_from(["weight", "first_moment", "second_moment", "gradient", "other"]))
    return words, PartSpec(dtype=dtype, role=role, row_elems=draw(st.sampled_from([0, 64, 100, 513])))


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_any_tensor_is_exact_and_the_same_everywhere(case: tuple[np.ndarray, PartSpec]) -> None:
    check(*case)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_codecs_asked_for_by_name(codec: str) -> None:
    backend = get_backend("cpu", codec=codec)
    for kind in KINDS:
        for length in (1, 7, 8, 9, 5000, 262145):
            words, _ = make(kind, "float32", length)
            part = backend.encode(words, PartSpec(dtype="float32"))
            assert part.chain in {codec, "raw"}
            assert np.array_equal(decode(REFERENCE, part)[0], words)
            assert part.stored_bytes <= -(-words.nbytes // 8) * 8


def test_proof_passes_what_is_right_and_stops_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    words, row_elems = make("columns", "float32", 300001)
    spec = PartSpec(dtype="float32", row_elems=row_elems)
    proven = HostBackend(CPU.kernels, prove=True)
    assert same_bytes(proven.encode(words, spec), CPU.encode(words, spec))
    from thinpoint.codec.rans import cpu_kernels

    encode_stream = cpu_kernels.encode_stream

    def faulty(symbols: np.ndarray, *rest: object) -> int:
        symbols[symbols.size // 2] ^= 1
        return encode_stream(symbols, *rest)

    monkeypatch.setattr(cpu_kernels, "encode_stream", faulty)
    with pytest.raises(EncodeProofError, match="does not decode to its own bits"):
        proven.encode(words, spec)


def test_two_threads_encode_and_decode_at_once() -> None:
    cases = [make(kind, "float32", 300001) for kind in ("columns", "outliers")]
    expected = [CPU.encode(words, PartSpec(dtype="float32", row_elems=row)) for words, row in cases]
    failures: list[str] = []

    def work(which: int) -> None:
        words, row = cases[which]
        for _ in range(4):
            part = CPU.encode(words, PartSpec(dtype="float32", row_elems=row))
            if not same_bytes(part, expected[which]) or not np.array_equal(decode(CPU, part)[0], words):
                failures.append(f"thread {which}")

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _encode_in_child(words: np.ndarray, spec: PartSpec, digest: int, results: object) -> None:
    part = CPU.encode(words, spec)
    results.put(part.raw_digest == digest and np.array_equal(decode(CPU, part)[0], words))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_encodes_and_decodes() -> None:
    words, row = make("columns", "float32", 300001)
    spec = PartSpec(dtype="float32", row_elems=row)
    part = CPU.encode(words, spec)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_encode_in_child, args=(words, spec, part.raw_digest, results))
    child.start()
    assert results.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
