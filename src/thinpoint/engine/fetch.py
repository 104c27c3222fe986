"""Reads the stored bytes of runs: those of one into buffers of its own, those of many into one that a device takes whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinpoint.engine.runs import PartRange, Run
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader

if TYPE_CHECKING:
    import torch

READ_BYTES = 8 << 20
"""Bytes that one thread reads at a time into a wave's buffer."""


@dataclass(frozen=True, kw_only=True)
class StoredWave:
    """What is stored of a wave, and for each of its runs where the planes begin in it.

    Attributes:
        data: flat uint8 tensor, host memory; page-locked if the device reads it itself.
    """

    runs: list[Run]
    data: torch.Tensor
    plane_offsets: list[tuple[int, ...]]


def fetch_run(reader: FileReader, item: Run | PartRange) -> tuple[Run, list[list[np.ndarray]]]:
    """A run and for each plane its stored blocks, unchecked. May be called from several threads.

    A part of which no head is known is one read.
    """
    if isinstance(item, PartRange):
        head, planes = reader.read_part(item.part)
        return item.whole_run(head), planes
    part, head, first, last = item.part, item.head, item.first, item.last
    return item, [
        reader.read_blocks(part, head, plane, first, last, check=False) for plane in range(head.num_planes)
    ]


def check_run(reader: FileReader, run: Run, planes: list[list[np.ndarray]]) -> None:
    """Raise DigestMismatchError for the first block that is not as it was written."""
    for plane, blocks in enumerate(planes):
        for block, data in enumerate(blocks, run.first):
            reader.check_block(run.part, run.head, plane, block, data)


def fetch_wave(
    reader: FileReader, wave: Sequence[Run | PartRange], workers: Workers, *, is_pinned: bool
) -> StoredWave:
    """A wave from the file: heads checked, blocks not: the device does that. On the background thread of the workers.

    Parts of which no head is known are read with it, so that neighbours in the file are one read.

    Raises:
        DigestMismatchError, MalformedFileError, LimitExceededError, UnsupportedFeatureError: as `read_head`.
        MemoryError: there is not enough of it, or none that can be page-locked.
    """
    import torch

    ranges: list[tuple[int, int]] = []
    for item in wave:
        if isinstance(item, PartRange):
            ranges.append((item.entry.offset, item.entry.stored_bytes))
        else:
            ranges += [
                reader.block_range(item.part, item.head, plane, item.first, item.last)
                for plane in range(item.head.num_planes)
            ]
    begins = list(itertools.accumulate((size for _, size in ranges), initial=0))
    num_bytes = begins.pop()
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
    runs, plane_offsets = [], []
    places = iter(begins)
    for item in wave:
        if isinstance(item, PartRange):
            begin = next(places)
            body = begin + item.entry.head_bytes
            head = reader.unpack_head(item.part, memory[begin:body])
            runs.append(item.whole_run(head))
            plane_offsets.append(tuple(body + at for at in head.block_starts[:, :1].ravel().tolist()))
        else:
            runs.append(item)
            plane_offsets.append(tuple(itertools.islice(places, item.head.num_planes)))
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
