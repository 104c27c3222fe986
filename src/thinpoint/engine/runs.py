"""What to read and decode for byte ranges of storages: runs of consecutive blocks, and where their bytes go."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.codec.contract import CodedPart
from thinpoint.file.head import PartHead
from thinpoint.file.index import PartEntry
from thinpoint.file.reader import FileReader

if TYPE_CHECKING:
    import torch

RUN_BYTES = 4 << 20
"""Raw bytes that one task decodes: long enough to keep a disk busy, short enough that all threads have work."""

DEVICE_RUN_BYTES = 64 << 20
"""Raw bytes of one part that a device decodes as one item; our own parts are no larger."""

WAVE_BYTES = 256 << 20
"""Raw bytes whose part heads are in memory at a time: heads are about a thousandth of a state, which may be terabytes.
On a device also what is read and decoded at a time."""

_MAX_HEADS = 64


@dataclass(frozen=True, kw_only=True)
class Target:
    """A byte range of a storage and where it is to go.

    Attributes:
        storage: index of the storage.
        start: first byte.
        out: flat uint8 array, host memory, as long as the range.
    """

    storage: int
    start: int
    out: np.ndarray

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.out.shape[0]


@dataclass(frozen=True, kw_only=True)
class DeviceTarget:
    """A byte range of a storage and where it is to go, on a device that has a backend.

    Attributes:
        storage: index of the storage.
        start: first byte.
        out: flat contiguous uint8 tensor, as long as the range.
    """

    storage: int
    start: int
    out: torch.Tensor

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.out.shape[0]


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """The bytes [start, end) of a part that a target wants; nothing of the part has been read.

    `whole` numbers the parts that a target wants whole, whose decoded bits can be checked; None if it wants less.
    `out` is an array, or a tensor on a device.
    """

    part: int
    entry: PartEntry
    whole: int | None
    start: int
    end: int
    out: Any

    @property
    def wave_bytes(self) -> int:
        """What the whole part takes of a wave: raw or stored bytes, whichever are more."""
        return max(self.entry.raw_bytes, self.entry.stored_bytes)

    def whole_run(self, head: PartHead) -> Run:
        """All blocks of the part as one run."""
        return Run(
            part=self.part,
            whole=self.whole,
            head=head,
            first=0,
            last=head.num_blocks,
            start=self.start,
            end=self.end,
            out=self.out,
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive blocks of one part, and the bytes of the part [start, end) that are wanted of them.

    `whole` and `out`: as in `PartRange`.
    """

    part: int
    whole: int | None
    head: PartHead
    first: int
    last: int
    start: int
    end: int
    out: Any

    @property
    def decoded(self) -> tuple[int, int]:
        """The bytes of the part that are decoded: its blocks; without planes any words (a device decodes all)."""
        word, raw_bytes = self.head.word_bytes, self.head.num_elems * self.head.word_bytes
        if self.head.num_planes:
            block_bytes = self.head.block_elems * word
            return self.first * block_bytes, min(self.last * block_bytes, raw_bytes)
        if isinstance(self.out, np.ndarray):
            return self.start // word * word, -(-self.end // word) * word
        return 0, raw_bytes

    @property
    def wave_bytes(self) -> int:
        """What it takes of a wave: raw or stored bytes, whichever are more."""
        low, high = self.decoded
        return max(high - low, int(self.head.block_sizes[:, self.first : self.last].sum()))


class RunMaker:
    """Makes the runs of targets. May be shared between threads.

    Args:
        reader: the open file.
    """

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._heads: dict[int, PartHead] = {}
        # For each storage its parts and where they end; both ascending.
        self._parts_of: dict[int, tuple[list[int], list[int]]] = {}
        for index, entry in enumerate(reader.index.parts):
            parts, ends = self._parts_of.setdefault(entry.storage, ([], []))
            parts.append(index)
            ends.append(entry.end)

    def clear_gaps(self, target: Target | DeviceTarget) -> None:
        """Set to zero what no part covers."""
        start, end = target.start, target.end
        covered = start
        for _, low, high in [*self._parts_in(target), (0, end, end)]:
            if covered < low:
                target.out[covered - start : low - start] = 0
            covered = high

    def items(
        self, target: Target | DeviceTarget, numbers: Iterator[int], run_bytes: int
    ) -> Iterator[Run | PartRange]:
        """What to read and decode for a target: parts of up to `run_bytes` if it wants them whole, else runs of about so many.

        `numbers` gives each part that it wants whole a number of its own.
        """
        for wanted in self._ranges(target, numbers):
            if wanted.whole is not None and wanted.entry.raw_bytes <= run_bytes:
                yield wanted
            else:
                yield from self._runs(wanted, run_bytes)

    def _ranges(self, target: Target | DeviceTarget, numbers: Iterator[int]) -> Iterator[PartRange]:
        """What a target wants of each part."""
        for part, low, high in self._parts_in(target):
            entry = self._reader.index.parts[part]
            yield PartRange(
                part=part,
                entry=entry,
                whole=next(numbers) if high - low == entry.raw_bytes else None,
                start=low - entry.start,
                end=high - entry.start,
                out=target.out[low - target.start : high - target.start],
            )

    def _runs(self, wanted: PartRange, run_bytes: int) -> Iterator[Run]:
        """The runs of a part, whose head is read."""
        part, whole, out, start, end = wanted.part, wanted.whole, wanted.out, wanted.start, wanted.end
        head = self.head(part)
        if head.num_planes == 0:
            yield wanted.whole_run(head)
            return
        block_bytes = head.block_elems * head.word_bytes
        step = max(run_bytes // block_bytes, 1)
        last_block = -(-end // block_bytes)
        for first in range(start // block_bytes, last_block, step):
            last = min(first + step, last_block)
            low, high = max(start, first * block_bytes), min(end, last * block_bytes)
            yield Run(
                part=part,
                whole=whole,
                head=head,
                first=first,
                last=last,
                start=low,
                end=high,
                out=out[low - start : high - start],
            )

    def head(self, part: int) -> PartHead:
        """The head of a part; a few are kept, for slices that come back to the same part."""
        head = self._heads.get(part)
        if head is None:
            head = self._reader.read_head(part)
            with self._lock:
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()
                self._heads[part] = head
        return head

    def _parts_in(self, target: Target | DeviceTarget) -> Iterator[tuple[int, int, int]]:
        """Each part that a target wants something of, and the bytes of the storage that it wants."""
        start, end = target.start, target.end
        parts, ends = self._parts_of.get(target.storage, ([], []))
        for place in range(bisect_right(ends, start), len(parts) if start < end else 0):
            entry = self._reader.index.parts[parts[place]]
            if entry.start >= end:
                return
            yield parts[place], max(start, entry.start), min(end, entry.end)


def waves(items: Iterable[Run | PartRange]) -> Iterator[list[Run | PartRange]]:
    """Runs, and parts wanted whole, in lists of about WAVE_BYTES."""
    wave: list[Run | PartRange] = []
    wave_bytes = 0
    for item in items:
        item_bytes = item.wave_bytes
        if wave and wave_bytes + item_bytes > WAVE_BYTES:
            yield wave
            wave, wave_bytes = [], 0
        wave.append(item)
        wave_bytes += item_bytes
    if wave:
        yield wave


def coded_part(head: PartHead) -> CodedPart:
    """What the codec needs of a part's head."""
    return CodedPart(
        codec_id=head.codec_id,
        word_bytes=head.word_bytes,
        num_elems=head.num_elems,
        block_elems=head.block_elems,
        prefix=head.prefix,
        block_sizes=head.block_sizes,
    )
