"""The Triton backend against the CPU's: the same bytes, bits that come back, damage that is found. Interpreted without a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from device_parts import decode, expect_same, item_of, with_blocks

from thinpoint.codec import plan as planning
from thinpoint.codec import zstd
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec, serial_map
from thinpoint.codec.rans import cpu, encoder
from thinpoint.codec.rans.spec import CODEC_ID
from thinpoint.codec.transforms.split import SIGN_NONE, SIGN_STORED, Split
from thinpoint.device import launch
from thinpoint.device import runs as runs_room
from thinpoint.device.backend import TritonBackend
from thinpoint.device.contract import EncodeItem
from thinpoint.device.incoming import Incoming
from thinpoint.device.kernels import coder
from thinpoint.device.outgoing import Launched, OutgoingWave
from thinpoint.device.select import device_backend, why_not
from thinpoint.device.triton_codec import DeviceWave
from thinpoint.errors import BackendUnavailableError, DigestMismatchError, MalformedFileError, ThinpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))
import codec_zoo

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")
F32 = PartSpec(dtype="float32", role="first_moment")


def normal(length: int, seed: int = 0) -> np.ndarray:
    """FP32 words of normal numbers whose scale varies from group to group."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(np.repeat(rng.standard_normal(-(-length // 256)) * 3, 256)[:length])
    return (rng.standard_normal(length) * scale).astype(np.float32).view(np.uint32)


def rank_rows(rows, ranked, numbers, BALLOT: tl.constexpr):
    lane = tl.arange(0, 32)
    at = tl.program_id(0) * 32 + lane
    rank, number = coder.ranks(tl.load(rows + at) != 0, lane, BALLOT)
    tl.store(ranked + at, rank)
    tl.store(numbers + tl.program_id(0), number)


@pytest.mark.parametrize("ballot", [False, True])
def test_ranks_by_both_ways(ballot: bool, device: torch.device) -> None:
    rng = np.random.default_rng(0)
    flags = rng.random((40, 32)) < np.linspace(0, 1, 40)[:, None]
    flags[1], flags[1, 31] = False, True
    rows = torch.from_numpy(flags.astype(np.int32)).to(device)
    ranked, numbers = torch.empty_like(rows), torch.empty(40, dtype=torch.int32, device=device)
    # Whether it is interpreted is decided here.
    triton.jit(rank_rows)[(40,)](rows, ranked, numbers, BALLOT=ballot, num_warps=1)
    assert np.array_equal(ranked.cpu().numpy(), np.cumsum(flags, 1))
    assert np.array_equal(numbers.cpu().numpy(), flags.sum(1))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_the_cpus_and_bits_come_back(
    dtype: str, device: torch.device, short_segments: None
) -> None:
    # 2,048 values make two whole segments, which the fast kernels take; the rest is the general ones'.
    cases = [(kind, 520, "first_moment") for kind in codec_zoo.KINDS]
    cases += [(kind, 2100, "first_moment") for kind in ("groups", "columns")]
    cases += [("columns", 1600, "weight"), ("groups", 511, "weight"), ("groups", 512, "weight")]
    cases += [("normal", 2305, "second_moment")]
    if dtype == "float32":
        cases += [("outliers", 2100, "first_moment"), ("idle", 8449, "first_moment")]
    words, specs = [], []
    for kind, length, role in cases:
        made, row_elems = codec_zoo.make(kind, dtype, length)
        words.append(made)
        specs.append(PartSpec(dtype=dtype, role=role, row_elems=row_elems))
    backend = TritonBackend(device, prove=False)
    parts = backend.encode_batch([item_of(w, s, device) for w, s in zip(words, specs, strict=True)])
    for part, made, spec in zip(parts, words, specs, strict=True):
        expect_same(part, made, spec)
    assert sum(part.codec_id == CODEC_ID for part in parts) >= 3
    outs, sums = decode(backend, parts, device)
    for out, total, made, part in zip(outs, sums, words, parts, strict=True):
        assert np.array_equal(out, made.view(np.uint8))
        assert total == part.raw_digest


@pytest.mark.timeout(900)
def test_segments_as_long_as_in_files(device: torch.device) -> None:
    words = normal(2 * 32768 + 300)
    backend = TritonBackend(device, prove=True)
    (part,) = backend.encode_batch([item_of(words, F32, device)])
    expect_same(part, words, F32)


def test_a_batch_may_begin_before_the_last_one_is_there(device: torch.device, short_segments: None) -> None:
    backend = TritonBackend(device, prove=True)
    batches = [[normal(1200, 0), normal(100, 1)], [normal(1500, 2)], [np.full(700, 7, np.uint32)]]
    begun = [backend.begin_batch([item_of(words, F32, device) for words in batch]) for batch in batches]
    begun[1].wait()
    with ThreadPoolExecutor(1) as thread:
        for batch, pending in zip(batches, begun, strict=True):
            for part, words in zip(thread.submit(pending.parts).result(), batch, strict=True):
                expect_same(part, words, F32)


def test_other_dtypes_are_coded_by_the_host(device: torch.device) -> None:
    words = [
        np.arange(5000, dtype=np.uint64),
        np.zeros(700, np.uint8),
        normal(100),
        np.random.default_rng(0).integers(0, 256, 999).astype(np.uint8),
    ]
    specs = [PartSpec(dtype=d) for d in ("int64", "bool", "float32", "uint8")]
    backend = TritonBackend(device)
    parts = backend.encode_batch([item_of(w, s, device) for w, s in zip(words, specs, strict=True)])
    for part, made, spec in zip(parts, words, specs, strict=True):
        expect_same(part, made, spec)
    assert {part.codec_id for part in parts} >= {zstd.ZSTD_ID, 0, 1}
    outs, sums = decode(backend, parts, device)
    assert all(np.array_equal(out, made.view(np.uint8)) for out, made in zip(outs, words, strict=True))
    assert sums == [part.raw_digest for part in parts]


def test_any_range_of_blocks(device: torch.device, short_segments: None) -> None:
    words = normal(20000)
    words[4096:12000] = 0
    backend = TritonBackend(device)
    (part,) = backend.encode_batch([item_of(words, F32, device)])
    assert part.num_blocks == 3
    assert "zero" in part.chain
    for first, last in ((0, 1), (1, 2), (1, 3), (2, 3)):
        (out,), (total,) = decode(backend, [part], device, [(first, last)])
        expected = words[first * 8192 : last * 8192]
        assert np.array_equal(out.view(np.uint32), expected)
        scratch = np.empty_like(expected)
        blocks = [plane[first:last] for plane in part.blocks]
        assert total == get_backend("cpu").decode(part, first, blocks, scratch)


def test_more_patches_than_there_was_room_for(
    device: torch.device, short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = normal(6000)
    words[::37] = np.float32(1e-38).view(np.uint32)
    words[5::41] = np.float32(3e38).view(np.uint32)
    monkeypatch.setattr(runs_room, "MIN_PATCHES", 3)
    (part,) = TritonBackend(device, prove=True).encode_batch([item_of(words, F32, device)])
    expect_same(part, words, F32)
    assert np.frombuffer(part.prefix[24:28], "<u4")[0] > 100


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of parts of each run that is launched."""
    sizes: list[int] = []
    launch_run = runs_room.Runner.launch

    def counted(self: runs_room.Runner, items: list[EncodeItem], work: runs_room.Work) -> runs_room.Run:
        sizes.append(len(items))
        return launch_run(self, items, work)

    monkeypatch.setattr(runs_room.Runner, "launch", counted)
    return sizes


def test_what_was_true_is_taken_for_granted_the_next_time(device: torch.device, runs: list[int]) -> None:
    backend = TritonBackend(device, prove=False)
    weight = PartSpec(dtype="float32", role="weight")
    scales = np.abs(normal(700).view(np.float32)).view(np.uint32)
    both = [scales, normal(600)]
    for made, expected in ((both, [2, 1]), (both, [2]), ([normal(700), normal(600)], [2, 1]), (both, [2, 1])):
        runs.clear()
        parts = backend.encode_batch([item_of(words, weight, device) for words in made])
        assert runs == expected
        for part, words in zip(parts, made, strict=True):
            expect_same(part, words, weight)


def test_zero_groups_are_taken_for_granted_until_others_are_zero(
    device: torch.device, runs: list[int]
) -> None:
    backend = TritonBackend(device, prove=True)
    idle, more, other = normal(2000), normal(2000), normal(2000)
    idle[512:1536] = 0
    more[512:] = 0
    other[256:1280] = 0
    dense = normal(2000)
    for words, expected in (
        (idle, [2, 1]),
        (idle, [2]),
        (more, [2, 1]),
        (other, [2, 1]),
        (other, [2]),
        (dense, [2, 1]),
        (dense, [2]),
    ):
        runs.clear()
        made = [words, normal(600)]
        parts = backend.encode_batch([item_of(own, F32, device) for own in made])
        assert runs == expected
        for part, own in zip(parts, made, strict=True):
            expect_same(part, own, F32)


def test_a_part_that_does_not_decode_is_stored_raw_and_logged(
    device: torch.device,
    short_segments: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [normal(5000), normal(5000, seed=1)]
    compact = launch.Launcher.compact

    def faulty(self: launch.Launcher, *args: torch.Tensor) -> torch.Tensor:
        blocks = compact(self, *args)
        # One bit of the second part's words, as a bad kernel or a bad memory cell would.
        at = int(blocks[1, 2]) + int(blocks[1, 3]) - 300
        args[-1][at] ^= 4
        return blocks

    monkeypatch.setattr(launch.Launcher, "compact", faulty)
    backend = TritonBackend(device, prove=True)
    with caplog.at_level(logging.ERROR, "thinpoint"):
        parts = backend.encode_batch([item_of(w, F32, device) for w in words])
    assert [part.chain for part in parts] == ["group+rans", "raw"]
    assert "did not decode to its own bits" in caplog.text
    outs, _ = decode(backend, parts, device)
    assert all(np.array_equal(out, made.view(np.uint8)) for out, made in zip(outs, words, strict=True))


def foreign_part(words: np.ndarray, split: Split, steps: int, block_elems: int) -> EncodedPart:
    """A part as another encoder might make it: other bit fields and segment lengths than ours."""
    scan = cpu.scan(words, serial_map)
    plan = planning.make_plan(words, F32, split, scan, cpu, serial_map)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "SEGMENT_STEPS", steps)
        patch.setattr(encoder, "BLOCK_ELEMS", block_elems)
        return encoder.encode(words, plan, scan, cpu, serial_map)


@pytest.mark.parametrize(
    ("sign_mode", "low_bits", "steps", "block_elems"),
    [
        (SIGN_STORED, 20, 8, 1024),
        (SIGN_STORED, 22, 64, 4096),
        (SIGN_NONE, 23, 16, 512),
        (SIGN_NONE, 31, 8, 1024),
        (SIGN_STORED, 19, 4096, 131072),
    ],
)
def test_streams_of_other_encoders(
    device: torch.device, sign_mode: int, low_bits: int, steps: int, block_elems: int
) -> None:
    words = normal(3000)
    split = Split(word_bits=32, sign_mode=sign_mode, trailing_zeros=0, low_bits=low_bits)
    part = foreign_part(words, split, steps, block_elems)
    (out,), (total,) = decode(TritonBackend(device), [part], device)
    assert np.array_equal(out.view(np.uint32), words)
    assert total == part.raw_digest


def test_blocks_of_very_many_segments_go_through_the_host(device: torch.device) -> None:
    words = normal(1025 * 256)
    split = Split(word_bits=32, sign_mode=SIGN_STORED, trailing_zeros=0, low_bits=21)
    part = foreign_part(words, split, 8, 1 << 20)
    (out,), (total,) = decode(TritonBackend(device), [part], device)
    assert np.array_equal(out.view(np.uint32), words)
    assert total == part.raw_digest


def test_damage_is_an_error_that_names_the_item(device: torch.device, short_segments: None) -> None:
    backend = TritonBackend(device)
    parts = backend.encode_batch([item_of(normal(9000, seed), F32, device) for seed in range(3)])
    broken = [list(plane) for plane in parts[1].blocks]
    broken[1][0] = broken[1][0].copy()
    broken[1][0][200] ^= 1
    damaged = replace(parts[1], blocks=tuple(tuple(plane) for plane in broken))
    with pytest.raises(DigestMismatchError) as caught:
        decode(backend, [parts[0], damaged, parts[2]], device)
    assert caught.value.item == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(12))
def test_streams_made_on_purpose_stay_inside_their_memory(
    device: torch.device, short_segments: None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    backend = TritonBackend(device)
    (part,) = backend.encode_batch([item_of(normal(9000, seed), F32, device)])
    blocks = [[block.copy() for block in plane] for plane in part.blocks]
    target = blocks[1][0]
    if seed % 3 == 0:
        target[:] = rng.integers(0, 256, target.size)
    elif seed % 3 == 1:
        # Counts and lane states.
        place = rng.integers(0, 32 * 33, 8)
        target[place] = rng.integers(0, 256, 8)
    else:
        target[rng.integers(32 * 33, target.size, 3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
    hostile = with_blocks(part, blocks)
    try:
        _, (total,) = decode(backend, [hostile], device)
    except MalformedFileError as error:
        assert error.item == 0  # type: ignore[attr-defined]
    else:
        assert total != part.raw_digest


@pytest.mark.parametrize("change", ["short", "long", "planes", "prefix"])
def test_sizes_that_contradict_the_prefix(device: torch.device, short_segments: None, change: str) -> None:
    backend = TritonBackend(device)
    (part,) = backend.encode_batch([item_of(normal(9000), F32, device)])
    blocks = [list(plane) for plane in part.blocks]
    changes: dict[str, object] = {}
    if change == "short":
        blocks[0][0] = blocks[0][0][:-8]
    elif change == "long":
        blocks[1][0] = np.concatenate([blocks[1][0], np.zeros(8, np.uint8)])
    elif change == "planes":
        blocks = blocks[:1]
    else:
        changes["prefix"] = part.prefix[:-4]
    with pytest.raises(MalformedFileError) as caught:
        decode(backend, [with_blocks(part, blocks, **changes)], device)
    assert caught.value.item == 0  # type: ignore[attr-defined]


def test_short_memory_means_smaller_waves_and_raw_parts(
    device: torch.device,
    short_segments: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = TritonBackend(device)
    words = [normal(3000, seed) for seed in range(3)] + [normal(30000)]
    items = [item_of(w, F32, device) for w in words]
    begin, vouch = backend.codec.begin, backend.codec.vouch

    def short_of_memory(own: list) -> object:  # type: ignore[type-arg]
        if len(own) > 3 or any(item.words.numel() > 100_000 for item in own):
            raise torch.OutOfMemoryError("no memory")
        return begin(own)

    def short_later(wave: DeviceWave, **options: bool) -> None:
        if len(wave.items) > 1:
            raise torch.OutOfMemoryError("no memory")
        vouch(wave, **options)

    monkeypatch.setattr(backend.codec, "vouch", short_later)
    monkeypatch.setattr(backend.codec, "begin", short_of_memory)
    with caplog.at_level(logging.WARNING, "thinpoint"):
        parts = backend.encode_batch(items)
    assert [part.chain for part in parts] == ["group+rans"] * 3 + ["raw"]
    assert "stored raw" in caplog.text
    for part, made in zip(parts[:3], words[:3], strict=True):
        expect_same(part, made, F32)

    inner = backend._incoming

    def short_too(data: torch.Tensor, own: list) -> Incoming:  # type: ignore[type-arg]
        if len(own) > 1 or own[0].part.num_elems == 3000:
            raise torch.OutOfMemoryError("no memory")
        return inner(data, own)

    monkeypatch.setattr(backend, "_incoming", short_too)
    outs, sums = decode(backend, parts, device)
    assert all(np.array_equal(out, made.view(np.uint8)) for out, made in zip(outs, words, strict=True))
    assert sums == [part.raw_digest for part in parts]
    bad = replace(parts[2], block_digests=parts[2].block_digests + np.uint64(1))
    with pytest.raises(ThinpointError) as caught:
        decode(backend, [parts[0], parts[1], bad, parts[3]], device)
    assert caught.value.item == 2  # type: ignore[attr-defined]


def test_waves_come_one_after_the_other_where_two_do_not_fit(
    device: torch.device, short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TritonBackend(device)
    words = [normal(1500, seed) for seed in range(3)]
    items = [item_of(made, F32, device) for made in words]
    needed = backend.codec.scratch_bytes(items[0]) + 2 * items[0].words.numel()
    monkeypatch.setattr(backend, "_available", lambda: int(1.5 * needed))
    begin, wait = backend.codec.begin, Launched.wait
    begun = 0
    waited: set[int] = set()

    def noted(own: list) -> object:  # type: ignore[type-arg]
        nonlocal begun
        assert len(own) == 1 and len(waited) == begun
        begun += 1
        return begin(own)

    def noted_wait(launched: Launched) -> None:
        wait(launched)
        waited.add(id(launched))

    monkeypatch.setattr(backend.codec, "begin", noted)
    monkeypatch.setattr(Launched, "wait", noted_wait)
    for part, made in zip(backend.encode_batch(items), words, strict=True):
        expect_same(part, made, F32)
    assert begun == 3


def test_waves_keep_to_their_budget(device: torch.device) -> None:
    backend = TritonBackend(device, max_scratch_bytes=1 << 20)
    items = [item_of(normal(60000), F32, device) for _ in range(7)]
    waves = [wave for wave, _ in backend._waves(items)]
    assert [item for wave in waves for item in wave] == items
    assert len(waves) > 1
    for wave in waves:
        assert len(wave) == 1 or sum(backend.codec.scratch_bytes(item) for item in wave) <= 1 << 20


def test_stored_bytes_are_those_of_the_parts(device: torch.device, short_segments: None) -> None:
    backend = TritonBackend(device)
    kinds = ("groups", "columns", "outliers", "idle", "zeros", "normal")
    made = [codec_zoo.make(kind, "float32", 5000) for kind in kinds]
    items = [item_of(w, F32._replace(row_elems=row), device) for w, row in made]
    wave = backend.codec.land(backend.codec.begin(items))
    parts = OutgoingWave(backend.codec, wave, backend._copies, get_backend(), prove=True).parts()
    left = sum(
        items[i].words.numel() - parts[i].stored_bytes for i in (*wave.outcome.raw, *wave.outcome.host)
    )
    assert wave.stored_bytes - left == sum(part.stored_bytes for part in parts)


def test_by_name_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET")
    reason = why_not()
    assert reason is not None
    with pytest.raises(BackendUnavailableError, match=r"GPU|triton"):
        device_backend("triton", torch.device("cuda"))
    assert device_backend("auto", torch.device("cuda")) is None
    assert device_backend("cpu", torch.device("cuda")) is None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_kernels_compile_for(target: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), target], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled 20 kernels" in done.stdout.splitlines()[-1]
