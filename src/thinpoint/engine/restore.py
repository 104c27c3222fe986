"""Reads byte ranges of storages out of a file: read, check and decode a few blocks at a time on several threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, CodedPart
from thinpoint.digest import MASK
from thinpoint.engine.workers import Workers
from thinpoint.errors import DigestMismatchError, LimitExceededError, ThinpointError
from thinpoint.file.head import PartHead
from thinpoint.file.layout import hex64
from thinpoint.file.reader import FileReader

RUN_BYTES = 4 << 20
"""Raw bytes that one task decodes: long enough to keep a disk busy, short enough that all threads have work."""

WAVE_BYTES = 256 << 20
"""Raw bytes whose part heads are in memory at a time: heads are about a thousandth of a state, which may be terabytes."""

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


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive blocks of one part, and the bytes of the part [start, end) that are wanted of them.

    `whole` numbers the parts that a target wants whole, whose decoded bits can be checked; None if it wants less.
    """

    part: int
    whole: int | None
    head: PartHead
    first: int
    last: int
    start: int
    end: int
    out: np.ndarray


class Restorer:
    """Fills memory from an open file. May be shared between threads.

    Args:
        reader: the open file.
        backend: decodes.
        workers: threads.
        progress: called with raw bytes done so far.
    """

    def __init__(
        self,
        reader: FileReader,
        backend: HostBackend,
        workers: Workers,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.reader = reader
        self._backend = backend
        self._workers = workers
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._heads: dict[int, PartHead] = {}
        self._parts_of: dict[int, list[int]] = {}
        for index, entry in enumerate(reader.index.parts):
            self._parts_of.setdefault(entry.storage, []).append(index)

    def fill(self, targets: Iterable[Target]) -> None:
        """Fill every target; bytes that no part covers become zero. Blocks until done.

        Raises:
            DigestMismatchError, MalformedFileError, UnknownCodecError: what was read is damaged or not for this
                version; targets may be partly written.
            StorageError: the store refused.
        """
        sums: dict[int, int] = {}
        parts: dict[int, tuple[int, str | None]] = {}
        numbers = itertools.count()
        for wave in _waves(run for target in targets for run in self._runs(target, numbers)):
            for run, partial in zip(wave, self._workers.map(self._decode, wave), strict=True):
                if run.whole is not None:
                    sums[run.whole] = (sums.get(run.whole, 0) + partial) & MASK
                    parts[run.whole] = run.part, run.head.name
        for number, (part, name) in parts.items():
            expected = self.reader.index.parts[part].raw_digest
            if sums[number] != expected:
                raise DigestMismatchError(
                    "the decoded bits do not match their checksum",
                    where=self.reader.name,
                    tensor=name,
                    offset=self.reader.index.parts[part].offset,
                    expected=hex64(expected),
                    actual=hex64(sums[number]),
                )

    def _runs(self, target: Target, numbers: Iterator[int]) -> Iterator[_Run]:
        start, end = target.start, target.start + target.out.size
        covered = start
        for part in self._parts_of.get(target.storage, []):
            entry = self.reader.index.parts[part]
            low, high = max(start, entry.start), min(end, entry.end)
            if low >= high:
                continue
            target.out[covered - start : low - start] = 0
            covered = high
            whole = next(numbers) if high - low == entry.raw_bytes else None
            yield from self._runs_of_part(
                part, whole, low - entry.start, high - entry.start, target.out[low - start : high - start]
            )
        target.out[covered - start :] = 0

    def _runs_of_part(
        self, part: int, whole: int | None, start: int, end: int, out: np.ndarray
    ) -> Iterator[_Run]:
        head = self.head(part)
        if head.num_planes == 0:
            yield _Run(part=part, whole=whole, head=head, first=0, last=0, start=start, end=end, out=out)
            return
        block_bytes = head.block_elems * head.word_bytes
        step = max(RUN_BYTES // block_bytes, 1)
        last_block = -(-end // block_bytes)
        for first in range(start // block_bytes, last_block, step):
            last = min(first + step, last_block)
            low, high = max(start, first * block_bytes), min(end, last * block_bytes)
            yield _Run(
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
            head = self.reader.read_head(part)
            with self._lock:
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()
                self._heads[part] = head
        return head

    def _decode(self, run: _Run) -> int:
        """Read and decode one run; returns the partial raw digest of all its blocks."""
        try:
            return self._decode_blocks(run)
        except MemoryError as error:
            raise self._located(
                LimitExceededError("there is not enough memory to decode a part"), run.part, run.head
            ) from error
        except ThinpointError as error:
            raise self._located(error, run.part, run.head) from error.__cause__

    def _decode_blocks(self, run: _Run) -> int:
        head = run.head
        coded = coded_part(head)
        word = WORD_DTYPES[head.word_bytes]
        raw_bytes = head.num_elems * head.word_bytes
        block_bytes = head.block_elems * head.word_bytes
        blocks = [
            self.reader.read_blocks(run.part, head, plane, run.first, run.last)
            for plane in range(head.num_planes)
        ]
        if blocks:
            low, high = run.first * block_bytes, min(run.last * block_bytes, raw_bytes)
        else:
            low, high = (
                run.start // word.itemsize * word.itemsize,
                -(-run.end // word.itemsize) * word.itemsize,
            )
        if (low, high) == (run.start, run.end) and run.out.ctypes.data % head.word_bytes == 0:
            partial = self._backend.decode(coded, run.first, blocks, run.out.view(word))
        else:
            words = np.empty((high - low) // head.word_bytes, word)
            partial = self._backend.decode(coded, run.first, blocks, words)
            run.out[...] = words.view(np.uint8)[run.start - low : run.end - low]
        if self._progress:
            with self._lock:
                self._done += run.end - run.start
                self._progress(self._done)
        return partial

    def _located(self, error: ThinpointError, part: int, head: PartHead) -> ThinpointError:
        """The error with the file, offset and tensor, where it does not name them yet."""
        entry = self.reader.index.parts[part]
        error.where = error.where or self.reader.name
        error.offset = entry.offset if error.offset is None else error.offset
        error.tensor = error.tensor or head.name
        return error


def _waves(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """The runs in lists of about WAVE_BYTES."""
    wave: list[_Run] = []
    wave_bytes = 0
    for run in runs:
        wave.append(run)
        wave_bytes += run.end - run.start
        if wave_bytes >= WAVE_BYTES:
            yield wave
            wave, wave_bytes = [], 0
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
