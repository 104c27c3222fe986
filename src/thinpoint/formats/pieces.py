"""Ranges of the storages of an open file, decoded a piece at a time, for writers of other formats."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from thinpoint.engine.restore import Restorer, Target
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader

PIECE_BYTES = 64 << 20
"""The most bytes decoded at a time: the most the encoder puts into a part, so that each is decoded once."""

Range = tuple[int, int, int]
"""Storage, first byte, one past the last byte."""


def cut(reader: FileReader, ranges: Iterable[Range]) -> Iterator[Range]:
    """The same bytes in the same order, cut at the borders of parts and to at most PIECE_BYTES.

    A part that is asked for whole is decoded whole, so that its raw digest is checked.
    """
    borders: dict[int, list[int]] = {}
    for part in reader.index.parts:
        borders.setdefault(part.storage, []).append(part.start)
    for storage, start, end in ranges:
        found = borders.get(storage, [])
        inner = found[bisect_right(found, start) : bisect_left(found, end)]
        for low, high in zip([start, *inner], [*inner, end], strict=True):
            for begin in range(low, high, PIECE_BYTES):
                yield storage, begin, min(begin + PIECE_BYTES, high)


def decoded(restorer: Restorer, ranges: Iterable[Range]) -> Iterator[list[Target]]:
    """The ranges, filled, in order: lists of targets that share one buffer of at most PIECE_BYTES.

    Raises:
        DigestMismatchError, MalformedFileError, UnknownCodecError: damaged, or not for this version.
        StorageError: the store refused.
    """
    for batch in _batches(cut(restorer.reader, ranges)):
        buffer = np.empty(sum(end - start for _, start, end in batch), np.uint8)
        targets, position = [], 0
        for storage, start, end in batch:
            out = buffer[position : position + end - start]
            targets.append(Target(storage=storage, start=start, out=out))
            position += end - start
        restorer.fill(targets)
        yield targets


def _batches(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    batch: list[Range] = []
    batch_bytes = 0
    for item in ranges:
        size = item[2] - item[1]
        if batch and batch_bytes + size > PIECE_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def write_ranges(restorer: Restorer, workers: Workers, ranges: Iterable[Range], sink: Any) -> None:
    """Append the bytes of the ranges to a sink; the next piece is decoded while one is written.

    Raises: as `decoded`, and StorageError if the sink refuses.
    """
    pending = None
    for targets in decoded(restorer, ranges):
        if pending is not None:
            pending.result()
        pending = workers.in_background(_write_all, sink, targets)
    if pending is not None:
        pending.result()


def _write_all(sink: Any, targets: list[Target]) -> None:
    for target in targets:
        sink.write(target.out)
