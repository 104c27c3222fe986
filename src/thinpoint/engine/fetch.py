"""Reads the stored bytes of runs: those of one into buffers of its own, those of many into one that a device takes whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinpoint.engine.runs import Run
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader

if TYPE_CHECKING:
    import torch

READ_BYTES = 8 << 20
"""Bytes that one thread reads at a time into a wave's buffer."""


@dataclass(frozen=True, kw_only=True)
class StoredWave:
    """The stored bytes of a wave, and for each of its runs where the planes begin in them.

    Attributes:
        data: flat uint8 tensor, host memory; page-locked if the device reads it itself.
    """

    runs: list[Run]
    data: torch.Tensor
    plane_offsets: list[tuple[int, ...]]


def fetch_run(reader: FileReader, run: Run) -> list[list[np.ndarray]]:
    """For each plane the stored blocks of a run, unchecked. May be called from several threads."""
    planes = range(run.head.num_planes)
    return [
        reader.read_blocks(run.part, run.head, plane, run.first, run.last, check=False) for plane in planes
    ]


def check_run(reader: FileReader, run: Run, planes: list[list[np.ndarray]]) -> None:
    """Raise DigestMismatchError for the first block that is not as it was written."""
    for plane, blocks in enumerate(planes):
        for block, data in enumerate(blocks, run.first):
            reader.check_block(run.part, run.head, plane, block, data)


def fetch_wave(reader: FileReader, runs: list[Run], workers: Workers, *, is_pinned: bool) -> StoredWave:
    """The stored blocks of a wave, unchecked: the device does that. On the background thread of the workers.

    Raises:
        MemoryError: there is not enough of it, or none that can be page-locked.
    """
    import torch

    plane_offsets: list[tuple[int, ...]] = []
    ranges: list[tuple[int, int]] = []
    num_bytes = 0
    for run in runs:
        begin = []
        for plane in range(run.head.num_planes):
            offset, size = reader.block_range(run.part, run.head, plane, run.first, run.last)
            begin.append(num_bytes)
            num_bytes += size
            ranges.append((offset, size))
        plane_offsets.append(tuple(begin))
    try:
        data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError from error
    memory = data.numpy()

    def read_piece(piece: tuple[int, int, int]) -> None:
        offset, begin, end = piece
        reader.read_into(offset, memory[begin:end])

    for _ in workers.copy_map(read_piece, _pieces(ranges)):
        pass
    return StoredWave(runs=runs, data=data, plane_offsets=plane_offsets)


def check_wave(reader: FileReader, stored: StoredWave, place: int) -> None:
    """Raises for the first damaged block of a run, saying which it is; the device says no more than the run."""
    run, memory = stored.runs[place], stored.data.numpy()
    for plane, position in enumerate(stored.plane_offsets[place]):
        for block in range(run.first, run.last):
            end = position + int(run.head.block_sizes[plane, block])
            reader.check_block(run.part, run.head, plane, block, memory[position:end])
            position = end


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(offset in the file, begin, end in the buffer) of reads of at most READ_BYTES that fill a buffer with the ranges.

    Ranges (offset, size) follow one another in the buffer; those that do so in the file too are read together.
    """
    merged: list[list[int]] = []
    position = 0
    for offset, size in ranges:
        if merged and merged[-1][0] + merged[-1][2] - merged[-1][1] == offset:
            merged[-1][2] += size
        elif size:
            merged.append([offset, position, position + size])
        position += size
    for offset, begin, end in merged:
        for start in range(begin, end, READ_BYTES):
            yield offset + start - begin, start, min(start + READ_BYTES, end)
