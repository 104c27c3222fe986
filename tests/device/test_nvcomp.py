"""nvCOMP behind the device contract. What needs a GPU is marked; the rest is what happens without one, and the arithmetic."""

import dataclasses
import itertools
import logging
import sys

import numpy as np
import pytest
import torch

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec, serial_map
from thinpoint.codec.nvcomp import ANS_ID, ans_mode, ans_prefix
from thinpoint.codec.raw import RAW_ID, encode_const, encode_raw
from thinpoint.codec.zstd import ZSTD_ID, encode_zstd
from thinpoint.device import nvcomp
from thinpoint.device.contract import DecodeItem, EncodeItem
from thinpoint.device.nvcomp_digest import digest_ranges
from thinpoint.device.nvcomp_encode import EncodeWave
from thinpoint.device.nvcomp_layout import ALIGN_BYTES, WAVE_BYTES, aligned_starts, clear, slices, waves
from thinpoint.device.nvcomp_library import library, why_not
from thinpoint.digest import MASK, digest
from thinpoint.errors import (
    BackendUnavailableError,
    DigestMismatchError,
    MalformedFileError,
    UsageError,
)

MISSING = why_not()
gpu = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float64": 8, "int64": 8, "uint8": 1}
LENGTHS = (1, 3, 31, 511, 4095, 4096, 65_535, 65_537, 131_073, 262_143, 262_144, 262_145, 700_001)


# ---- what holds without a GPU ----------------------------------------------------------------------------------------


def test_digests_of_ranges_are_those_of_the_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    data[8_000:9_000] = 255
    starts = np.array([0, 8, 800, 8_000, 20_000, 39_992])
    sizes = np.array([8, 16, 7_200, 1_000, 0, 8])
    firsts = np.array([0, 5, 1 << 40, 7, 3, 2])
    got = digest_ranges(torch.from_numpy(data), starts, sizes, firsts)
    assert got.dtype == np.uint64
    assert got.tolist() == [
        digest(data[a : a + n], f) for a, n, f in zip(starts, sizes, firsts.tolist(), strict=True)
    ]


def test_digests_do_not_depend_on_the_pieces_they_are_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (8_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    arguments = data, np.array([0, 1600, 4000]), np.array([1600, 2400, 4000]), np.array([0, 0, 9])
    whole = digest_ranges(*arguments)
    monkeypatch.setattr("thinpoint.device.nvcomp_digest._CHUNK_WORDS", 7)
    assert digest_ranges(*arguments).tolist() == whole.tolist()


def test_waves_keep_order_and_hold_no_more_than_their_budget() -> None:
    sizes = [5, WAVE_BYTES, 1, 2, WAVE_BYTES - 3, 1, WAVE_BYTES + 9]
    cut = list(waves(list(range(7)), sizes))
    assert list(itertools.chain(*cut)) == list(range(7))
    assert cut == [[0], [1], [2, 3, 4], [5], [6]]
    assert list(waves([], [])) == []


def test_ranges_are_aligned_and_only_their_padding_is_cleared() -> None:
    sizes = np.array([1, 16, 17, 5], np.int64)
    starts, total = aligned_starts(sizes)
    assert (starts.tolist(), total) == ([0, 16, 32, 64], 80)
    memory = torch.full((total,), 9, dtype=torch.uint8)
    clear(memory, starts + sizes, starts + -(-sizes // ALIGN_BYTES) * ALIGN_BYTES)
    assert [part.tolist() for part in slices(memory, starts, sizes)] == [[9] * n for n in sizes]
    assert int((memory == 9).sum()) == int(sizes.sum())


def test_a_backend_for_another_device_or_codec_is_refused_with_the_reason() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'nvcomp-zstd'.*not on 'cpu'"):
        nvcomp.make_backend("nvcomp-zstd", torch.device("cpu"), prove=True)
    with pytest.raises(UsageError, match="nvcomp-zstd or nvcomp-ans"):
        nvcomp.make_backend("nvcomp-lz4", torch.device("cuda"), prove=True)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "nvidia.libnvcomp", None)
    library.cache_clear()
    assert 'pip install "thinpoint[nvcomp]"' in str(why_not.__wrapped__())


def test_without_a_gpu_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not.__wrapped__() == "torch sees no NVIDIA GPU"


def items_of(
    parts: list[EncodedPart], device: str, first: int = 0, shift: int = 0
) -> tuple[torch.Tensor, list[DecodeItem]]:
    """The stored bytes of parts from block `first` on, `shift` bytes between them, and items into odd addresses."""
    stored, items, end = [], [], 0
    for part in parts:
        low = min(first, max(part.num_blocks - 1, 0))
        blocks = [block for plane in part.blocks for block in plane[low:]]
        num_bytes = (part.num_elems - low * part.block_elems) * part.word_bytes
        room = torch.full((num_bytes + 2 * part.word_bytes,), 0xA5, dtype=torch.uint8, device=device)
        items.append(
            DecodeItem(
                part=part,
                first_block=low,
                num_blocks=part.num_blocks - low if part.num_planes else 0,
                plane_offsets=(end,) * part.num_planes,
                digests=part.block_digests[:, low:],
                out=room[part.word_bytes : part.word_bytes + num_bytes],
            )
        )
        stored += [*blocks, np.zeros(shift, np.uint8)]
        end += sum(block.size for block in blocks) + shift
    data = torch.from_numpy(np.concatenate([*stored, np.zeros(8, np.uint8)]))
    return (data.pin_memory() if device == "cuda" else data), items


def host_parts() -> tuple[list[np.ndarray], list[EncodedPart]]:
    """Words and parts of every codec that the CPU knows."""
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(600_001) * 0.02).astype("<f4").view("<u4")
    few = rng.integers(0, 4, 300_001, dtype=np.uint8)
    same = np.full(5000, 7, "<u8")
    parts = [
        encode_raw(weights, serial_map),
        encode_zstd(few, serial_map),
        encode_const(same, serial_map),
    ]
    assert [part.codec_id for part in parts] == [RAW_ID, ZSTD_ID, 1]
    return [weights, few, same, weights], parts


def test_parts_of_other_codecs_are_decoded_on_the_cpu() -> None:
    words, parts = host_parts()
    data, items = items_of(parts, "cpu")
    partials = nvcomp.decode_items(data, items)
    for word, part, item, partial in zip(words, parts, items, partials, strict=False):
        assert item.out.numpy().tobytes() == word.tobytes()
        assert partial == part.raw_digest


def test_damage_in_a_stored_block_names_the_item() -> None:
    _, parts = host_parts()
    data, items = items_of(parts, "cpu")
    data[items[1].plane_offsets[0] + 40] ^= 1
    with pytest.raises(DigestMismatchError) as caught:
        nvcomp.decode_items(data, items)
    assert caught.value.item == 1


def test_an_ans_part_without_nvcomp_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpoint.device.nvcomp_decode.why_not", lambda: "torch sees no NVIDIA GPU")
    words, parts = host_parts()
    prefix = ans_prefix(ans_mode("float32"), "6.0.0.12")
    data, items = items_of([parts[2], dataclasses.replace(parts[0], codec_id=ANS_ID, prefix=prefix)], "cpu")
    # Raw blocks are multiples of 8; those of nvcomp-ans of 16.
    with pytest.raises(MalformedFileError):
        nvcomp.decode_items(data, items)
    even = dataclasses.replace(encode_raw(words[0][:600_000], serial_map), codec_id=ANS_ID, prefix=prefix)
    data, items = items_of([parts[2], even], "cpu")
    with pytest.raises(BackendUnavailableError, match="torch sees no NVIDIA GPU") as caught:
        nvcomp.decode_items(data, items)
    assert caught.value.item == 1
    assert "6.0.0.12" in str(caught.value)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def zoo(device: str = "cuda") -> list[EncodeItem]:
    """Every dtype, every length where something changes; zeros, few values, weights, any bits; at odd addresses."""
    rng = np.random.default_rng(7)
    items = []
    for (dtype, word_bytes), length in itertools.product(DTYPES.items(), LENGTHS):
        weights = (rng.standard_normal(length * word_bytes) * 0.02).astype("<f4")
        top = weights.view("<u2")[1::2].copy() if dtype == "bfloat16" else weights
        for data in (
            np.zeros(length * word_bytes, np.uint8),
            rng.integers(0, 4, length * word_bytes, dtype=np.uint8),
            top.view(np.uint8)[: length * word_bytes],
            rng.integers(0, 256, length * word_bytes, dtype=np.uint8),
        ):
            room = torch.zeros(data.size + 16, dtype=torch.uint8, device=device)
            words = room[word_bytes : word_bytes + data.size]
            words.copy_(torch.from_numpy(data.copy()))
            items.append(EncodeItem(words=words, word_bytes=word_bytes, spec=PartSpec(dtype=dtype)))
    return items


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


@pytest.fixture(params=["nvcomp-zstd", "nvcomp-ans"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("prove", [False, True])
    def test_round_trip_is_exact_and_digests_are_right(self, codec: str, prove: bool) -> None:
        items = zoo()
        parts = nvcomp.make_backend(codec, torch.device("cuda"), prove=prove).encode_batch(items)
        for item, part in zip(items, parts, strict=True):
            raw = item.words.cpu().numpy()
            assert part.raw_digest == digest(raw)
            assert part.stored_bytes <= -(-raw.size // 8) * 8
            assert [b.size for b in part.blocks[0]] == part.block_sizes[0].tolist()
            assert [digest(b) for b in part.blocks[0]] == part.block_digests[0].tolist()
        coded = {part.codec_id for part in parts}
        assert coded == {RAW_ID, ZSTD_ID if codec == "nvcomp-zstd" else ANS_ID}
        for first, shift, trust in itertools.product((0, 1), (0, 8), (False, True)):
            data, wanted = items_of(parts, "cuda", first, shift)
            partials = nvcomp.decode_items(data, wanted, trust_zstd=trust)
            for item, part, out, partial in zip(items, parts, wanted, partials, strict=True):
                skipped = out.first_block * part.block_elems * part.word_bytes
                raw = bits(item.words[skipped:])
                assert bits(out.out) == raw
                assert partial == digest(raw, skipped // 8)

    def test_frames_are_read_by_a_cpu(self) -> None:
        items = zoo()
        host = get_backend()
        for item, part in zip(
            items,
            nvcomp.make_backend("nvcomp-zstd", torch.device("cuda"), prove=True).encode_batch(items),
            strict=True,
        ):
            out = np.empty(part.num_elems, f"<u{part.word_bytes}")
            assert host.decode(part, 0, part.blocks, out) == part.raw_digest
            assert out.tobytes() == bits(item.words)

    def test_frames_of_a_cpu_are_read_by_nvcomp(self) -> None:
        items = zoo()
        parts = [
            encode_zstd(i.words.cpu().numpy().view(f"<u{i.word_bytes}"), serial_map)
            for i in items
            if i.words.numel() >= 16
        ]
        data, wanted = items_of(parts, "cuda")
        partials = nvcomp.decode_items(data, wanted, trust_zstd=True)
        assert partials == [part.raw_digest for part in parts]

    def test_what_does_not_give_back_its_bits_is_stored_raw(
        self, codec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        words = torch.zeros(2 << 20, dtype=torch.uint8, device="cuda")
        items = [
            EncodeItem(words=words[start:end], word_bytes=4, spec=PartSpec(dtype="float32"))
            for start, end in ((0, 1 << 20), (1 << 20, 2 << 20))
        ]
        code = EncodeWave._code

        def code_wrongly(wave: EncodeWave):
            made = code(wave)
            wave._copy[(1 << 20) + 4321] ^= 1
            return made

        monkeypatch.setattr(EncodeWave, "_code", code_wrongly)
        with caplog.at_level(logging.ERROR, "thinpoint"):
            parts = nvcomp.make_backend(codec, torch.device("cuda"), prove=True).encode_batch(items)
        assert [part.codec_id == RAW_ID for part in parts] == [False, True]
        assert "did not give back the bits of 1 of 2 parts" in caplog.text
        stored = np.concatenate(parts[1].blocks[0])
        assert stored.nonzero()[0].tolist() == [4321]
        assert parts[1].raw_digest == digest(stored)

    def test_many_small_parts_and_a_large_one_stay_within_the_memory_named(self, codec: str) -> None:
        state = torch.randn(160 << 20, device="cuda").mul_(0.02).view(torch.uint8)
        sizes = [64 << 20] * 4 + [4 * (1000 + 37 * i) for i in range(2000)]
        items = [
            EncodeItem(words=state[4 * i : 4 * i + n], word_bytes=4, spec=PartSpec(dtype="float32"))
            for i, n in enumerate(sizes)
        ]
        backend = nvcomp.make_backend(codec, torch.device("cuda"), prove=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        parts = backend.encode_batch(items)
        # nvCOMP's Zstandard alone takes 18 times what it compresses.
        limit = 24 if codec == "nvcomp-zstd" else 12
        assert torch.cuda.max_memory_allocated() - before < limit * WAVE_BYTES
        assert sum(part.stored_bytes for part in parts) < sum(sizes)
        data, wanted = items_of(parts, "cuda")
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        partials = nvcomp.decode_items(data, wanted, trust_zstd=True)
        assert torch.cuda.max_memory_allocated() - held < 12 * WAVE_BYTES
        assert [p & MASK for p in partials] == [part.raw_digest for part in parts]

    def test_ans_warns_once_of_what_loading_will_need(self, caplog: pytest.LogCaptureFixture) -> None:
        nvcomp._warn_of_ans.cache_clear()
        with caplog.at_level(logging.WARNING, "thinpoint"):
            for _ in range(2):
                nvcomp.make_backend("nvcomp-ans", torch.device("cuda"), prove=False)
        assert caplog.text.count("loads only on an NVIDIA GPU") == 1

    def test_a_state_saved_with_nvcomp_comes_back(self, codec: str, tmp_path) -> None:
        generator = torch.Generator("cuda").manual_seed(4)
        weight = torch.randn(1000, 700, device="cuda", generator=generator) * 0.02
        state = {
            "w": weight,
            "half": weight.bfloat16(),
            "t": weight.T,
            "ids": torch.arange(9999, device="cuda"),
        }
        thinpoint.save(state, tmp_path / "s.thin", codec=codec)
        for where in ("cuda", "cpu") if codec == "nvcomp-zstd" else ("cuda",):
            loaded = thinpoint.load(tmp_path / "s.thin", map_location=where)
            for name, tensor in state.items():
                assert loaded[name].device.type == where
                assert bits(loaded[name].contiguous().view(torch.uint8)) == bits(
                    tensor.contiguous().view(torch.uint8)
                )
