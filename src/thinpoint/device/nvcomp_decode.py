"""Decoding of parts into tensors on an NVIDIA GPU: what nvCOMP made with nvCOMP, all else on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import WORD_DTYPES, Mapper, serial_map
from thinpoint.codec.nvcomp import ANS_ID, ans_unavailable, read_ans_prefix
from thinpoint.codec.zstd import ZSTD_ID, frame_bytes
from thinpoint.device.contract import DecodeItem, item_named
from thinpoint.device.nvcomp_digest import digest_ranges
from thinpoint.device.nvcomp_layout import ALIGN_BYTES, aligned_starts, slices, up, waves
from thinpoint.device.nvcomp_library import ZSTD, Algorithm, ans, library, why_not
from thinpoint.digest import digest
from thinpoint.errors import DigestMismatchError, MalformedFileError, UsageError

MAX_BLOCK_BYTES = 16 << 20
"""nvCOMP encodes no larger buffers with ANS; a larger block is refused."""

TRUST_VARIABLE = "THINPOINT_TRUST_ZSTD"


class _Task(NamedTuple):
    """An item for nvCOMP, its place among all items, and what it is coded with."""

    place: int
    item: DecodeItem
    algorithm: Algorithm


def decode_items(
    data: torch.Tensor,
    items: Sequence[DecodeItem],
    *,
    trust_zstd: bool | None = None,
    map: Mapper = serial_map,
) -> list[int]:
    """Decode blocks into tensors on a CUDA device; blocks until they are there.

    Parts of `nvcomp-ans` are decoded by nvCOMP; all others on the CPU. Zstandard frames too, because nvCOMP's manual leaves
    undefined what its decoder does with a frame that is not valid, and a file may come from anyone.

    Args:
        data: flat uint8, host memory, best page-locked: the stored bytes of all items.
        items: see `DecodeItem`.
        trust_zstd: decode Zstandard frames with nvCOMP as well. None: if the environment variable THINPOINT_TRUST_ZSTD is 1.
        map: runs what is decoded on the CPU.

    Returns:
        As `DeviceBackend.begin_decode`, finished. Needs about 10 times WAVE_BYTES of device memory.

    Raises:
        DigestMismatchError, MalformedFileError, UnknownCodecError: an item is damaged; `error.item` is its index.
        BackendUnavailableError: nvCOMP is needed and cannot run here; `error.item` likewise.
    """
    trust = os.environ.get(TRUST_VARIABLE) == "1" if trust_zstd is None else trust_zstd
    partials = [0] * len(items)
    stored = data.numpy()
    on_device: list[_Task] = []
    for index, item in enumerate(items):
        with item_named(index):
            _check(stored, item)
            algorithm = _algorithm(item, trust)
            if algorithm is None:
                partials[index] = _decode_on_host(stored, item, map)
            else:
                on_device.append(_Task(index, item, algorithm))
    for wave in waves(on_device, [task.item.out.numel() for task in on_device]):
        for task, partial in zip(wave, _decode_wave(data, wave), strict=True):
            partials[task.place] = partial
    return partials


def _check(stored: np.ndarray, item: DecodeItem) -> None:
    """Refuse an item whose sizes do not agree with each other."""
    part, last = item.part, item.first_block + item.num_blocks
    if part.num_planes:
        low, high = (min(block * part.block_elems, part.num_elems) for block in (item.first_block, last))
        if item.out.numel() != (high - low) * part.word_bytes or last > part.num_blocks:
            raise UsageError("the output is not as long as its blocks", actual=item.out.numel())
    for plane, offset in enumerate(item.plane_offsets):
        if offset + int(part.block_sizes[plane, item.first_block : last].sum()) > stored.size:
            raise UsageError("the stored bytes of an item lie outside of the buffer", actual=offset)


def _algorithm(item: DecodeItem, trust_zstd: bool) -> Algorithm | None:
    """What nvCOMP decodes an item with; None for the CPU."""
    part = item.part
    if part.codec_id == ANS_ID:
        mode, _ = read_ans_prefix(part.prefix, part.word_bytes)
        block_bytes = part.block_elems * part.word_bytes
        sizes = part.block_sizes
        if (
            part.num_planes != 1
            or block_bytes % ALIGN_BYTES
            or block_bytes > MAX_BLOCK_BYTES
            or (sizes % ALIGN_BYTES).any()
            or (sizes == 0).any()
        ):
            raise MalformedFileError("a part coded with nvcomp-ans has blocks of a size that is not allowed")
        if (reason := why_not()) is not None:
            raise ans_unavailable(part.prefix, part.word_bytes, reason)
        return ans(mode)
    aligned = part.block_elems * part.word_bytes % ALIGN_BYTES == 0
    if part.codec_id != ZSTD_ID or not trust_zstd or part.num_planes != 1 or part.prefix or not aligned:
        return None
    return ZSTD if why_not() is None else None


def _stored_blocks(stored: np.ndarray, item: DecodeItem, plane: int) -> list[np.ndarray]:
    sizes = item.part.block_sizes[plane, item.first_block : item.first_block + item.num_blocks]
    ends = item.plane_offsets[plane] + np.cumsum(sizes)
    return [stored[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def _decode_on_host(stored: np.ndarray, item: DecodeItem, map: Mapper) -> int:
    """Check and decode an item on the CPU and copy it to its tensor; returns the partial raw digest."""
    planes = [_stored_blocks(stored, item, plane) for plane in range(item.part.num_planes)]
    for plane, blocks in enumerate(planes):
        _compare_digests(np.array(list(map(digest, blocks)), np.uint64), item.digests[plane])
    word = WORD_DTYPES[item.part.word_bytes]
    words = np.empty(item.out.numel() // word.itemsize, word)
    partial = get_backend().decode(item.part, item.first_block, planes, words, map=map)
    item.out.copy_(torch.from_numpy(words.view(np.uint8)))
    return partial


def _compare_digests(found: np.ndarray, expected: np.ndarray) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        raise DigestMismatchError(
            "a stored block does not match its checksum",
            expected=f"{int(expected[wrong[0]]):016x}",
            actual=f"{int(found[wrong[0]]):016x}",
        )


def _decode_wave(data: torch.Tensor, wave: Sequence[_Task]) -> list[int]:
    """Decode items with nvCOMP; returns their partial raw digests."""
    items = [task.item for task in wave]
    device = items[0].out.device
    stored_sizes = [
        i.part.block_sizes[0, i.first_block : i.first_block + i.num_blocks].astype(np.int64) for i in items
    ]
    owner = np.repeat(np.arange(len(items)), [sizes.size for sizes in stored_sizes])
    stored, starts = _upload(data, items, stored_sizes, device)
    found = digest_ranges(stored, starts, np.concatenate(stored_sizes), np.zeros_like(starts))
    lengths = []
    for i, task in enumerate(wave):
        with item_named(task.place):
            _compare_digests(found[owner == i], task.item.digests[0])
            blocks = _stored_blocks(data.numpy(), task.item, 0)
            is_zstd = task.algorithm is ZSTD
            lengths += [frame_bytes(block) if is_zstd else block.size for block in blocks]

    raw_sizes = np.array([item.out.numel() for item in items], np.int64)
    raw_starts, total = aligned_starts(raw_sizes)
    raw = torch.zeros(total, dtype=torch.uint8, device=device)
    ranges = [_raw_blocks(item) for item in items]
    targets = np.concatenate([start + first for start, (first, _) in zip(raw_starts, ranges, strict=True)])
    expected = np.concatenate([size for _, size in ranges])
    for algorithm in dict.fromkeys(task.algorithm for task in wave):
        members = np.flatnonzero([wave[i].algorithm == algorithm for i in owner.tolist()])
        result = library().decode(
            algorithm,
            stored.data_ptr() + starts[members],
            np.array(lengths, np.int64)[members],
            raw.data_ptr() + targets[members],
            expected[members],
            device,
        )
        made, status = result.cpu().numpy()
        wrong = np.flatnonzero((status != 0) | (made != expected[members]))
        if wrong.size:
            first = wrong[0]
            with item_named(wave[int(owner[members[first]])].place):
                raise MalformedFileError(
                    f"nvCOMP cannot decode a block: {library().status_text(int(status[first]))}",
                    expected=int(expected[members[first]]),
                    actual=int(made[first]),
                )
    first_words = np.array([i.first_block * i.part.block_elems * i.part.word_bytes // 8 for i in items])
    partials = digest_ranges(raw, raw_starts, up(raw_sizes, 8), first_words)
    torch._foreach_copy_([item.out for item in items], slices(raw, raw_starts, raw_sizes))
    torch.cuda.current_stream(device).synchronize()
    return [int(partial) for partial in partials]


def _upload(
    data: torch.Tensor, items: Sequence[DecodeItem], block_sizes: list[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, np.ndarray]:
    """The stored bytes of items in one buffer on the device, each item aligned, and where their blocks begin."""
    sizes = np.array([int(own.sum()) for own in block_sizes], np.int64)
    starts, total = aligned_starts(sizes)
    stored = torch.empty(total, dtype=torch.uint8, device=device)
    for item, target, size in zip(items, slices(stored, starts, sizes), sizes.tolist(), strict=True):
        target.copy_(data[item.plane_offsets[0] : item.plane_offsets[0] + size], non_blocking=True)
    block_starts = [start + np.cumsum(own) - own for start, own in zip(starts, block_sizes, strict=True)]
    return stored, np.concatenate(block_starts)


def _raw_blocks(item: DecodeItem) -> tuple[np.ndarray, np.ndarray]:
    """Start in the output, and raw bytes, of each block of an item."""
    ranges = [item.part.block_range(item.first_block + i) for i in range(item.num_blocks)]
    edges = np.array(ranges, np.int64).reshape(-1, 2) * item.part.word_bytes
    return edges[:, 0] - edges[0, 0], edges[:, 1] - edges[:, 0]
