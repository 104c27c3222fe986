"""Reads byte ranges of storages out of a file and decodes them, on the CPU or on the device where they are wanted.

On the CPU, several threads each read, check and decode a few blocks. On a device, all blocks of a wave are read into
page-locked memory and decoded in one go, while those of the next wave are read.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, CodedPart
from thinpoint.device.contract import DecodeItem, DeviceBackend
from thinpoint.digest import MASK
from thinpoint.engine.backends import Devices, device_lock
from thinpoint.engine.workers import Workers
from thinpoint.errors import DigestMismatchError, LimitExceededError, ThinpointError
from thinpoint.file.head import PartHead
from thinpoint.file.layout import hex64
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

READ_BYTES = 8 << 20
"""Bytes that one thread reads at a time into a wave's buffer."""

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


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive blocks of one part, and the bytes of the part [start, end) that are wanted of them.

    `whole` numbers the parts that a target wants whole, whose decoded bits can be checked; None if it wants less.
    `out` is an array, or a tensor on a device.
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


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The stored bytes of a wave, and for each of its runs where the planes begin in them.

    Attributes:
        data: flat uint8 tensor, host memory; page-locked if the device reads it itself.
    """

    runs: list[_Run]
    data: torch.Tensor
    plane_offsets: list[tuple[int, ...]]


class _PartDigests:
    """Adds up the digests of what was decoded of parts that are wanted whole."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._sums: dict[int, int] = {}
        self._parts: dict[int, tuple[int, str | None]] = {}

    def add(self, run: _Run, partial: int) -> None:
        if run.whole is not None:
            self._sums[run.whole] = (self._sums.get(run.whole, 0) + partial) & MASK
            self._parts[run.whole] = run.part, run.head.name

    def check(self) -> None:
        for number, (part, name) in self._parts.items():
            expected = self._reader.index.parts[part].raw_digest
            if self._sums[number] != expected:
                raise DigestMismatchError(
                    "the decoded bits do not match their checksum",
                    where=self._reader.name,
                    tensor=name,
                    offset=self._reader.index.parts[part].offset,
                    expected=hex64(expected),
                    actual=hex64(self._sums[number]),
                )


class Restorer:
    """Fills memory from an open file. May be shared between threads.

    Args:
        reader: the open file.
        backend: decodes on the CPU.
        workers: threads.
        progress: called with raw bytes done so far.
        devices: decode where the targets are; by default none does.
    """

    def __init__(
        self,
        reader: FileReader,
        backend: HostBackend,
        workers: Workers,
        progress: Callable[[int], None] | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.reader = reader
        self.devices = Devices() if devices is None else devices
        self._backend = backend
        self._workers = workers
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._heads: dict[int, PartHead] = {}
        # For each storage its parts and where they end; both ascending.
        self._parts_of: dict[int, tuple[list[int], list[int]]] = {}
        for index, entry in enumerate(reader.index.parts):
            parts, ends = self._parts_of.setdefault(entry.storage, ([], []))
            parts.append(index)
            ends.append(entry.end)

    def fill(self, targets: Iterable[Target | DeviceTarget]) -> None:
        """Fill every target; bytes that no part covers become zero. Blocks until done, on devices too.

        To be called from any thread but the workers' background thread, which reads for devices.

        Memory: what several threads decode at a time, RUN_BYTES each. On a device, page-locked: the stored bytes of two
        waves of at most WAVE_BYTES (and a part); on the device itself, the partly wanted blocks of one.

        Raises:
            DigestMismatchError, MalformedFileError, UnknownCodecError: what was read is damaged or not for this
                version; targets may be partly written.
            LimitExceededError: there is not enough memory.
            StorageError: the store refused.
        """
        digests = _PartDigests(self.reader)
        numbers = itertools.count()
        on_device: dict[torch.device, list[DeviceTarget]] = {}

        def host_targets() -> Iterator[Target]:
            for target in targets:
                if isinstance(target, Target):
                    self._clear_gaps(target)
                    yield target
                elif len(target.out):
                    on_device.setdefault(target.out.device, []).append(target)

        for wave in _waves(run for t in host_targets() for run in self._runs(t, numbers, RUN_BYTES)):
            for run, partial in zip(wave, self._workers.map(self._decode, wave), strict=True):
                digests.add(run, partial)
        for device, of_device in on_device.items():
            backend = self.devices.get(device)
            assert backend is not None, f"no backend decodes on {device}"
            self._fill_on_device(backend, of_device, digests, numbers)
        digests.check()

    def _parts_in(self, target: Target | DeviceTarget) -> Iterator[tuple[int, int, int]]:
        """Each part that a target wants something of, and the bytes of the storage that it wants."""
        start, end = target.start, target.start + len(target.out)
        parts, ends = self._parts_of.get(target.storage, ([], []))
        for place in range(bisect_right(ends, start), len(parts) if start < end else 0):
            entry = self.reader.index.parts[parts[place]]
            if entry.start >= end:
                return
            yield parts[place], max(start, entry.start), min(end, entry.end)

    def _clear_gaps(self, target: Target | DeviceTarget) -> None:
        """Set to zero what no part covers."""
        start, end = target.start, target.start + len(target.out)
        covered = start
        for _, low, high in [*self._parts_in(target), (0, end, end)]:
            if covered < low:
                target.out[covered - start : low - start] = 0
            covered = high

    def _runs(self, target: Target | DeviceTarget, numbers: Iterator[int], run_bytes: int) -> Iterator[_Run]:
        for part, low, high in self._parts_in(target):
            entry = self.reader.index.parts[part]
            whole = next(numbers) if high - low == entry.raw_bytes else None
            out = target.out[low - target.start : high - target.start]
            yield from self._runs_of_part(part, whole, low - entry.start, high - entry.start, out, run_bytes)

    def _runs_of_part(
        self, part: int, whole: int | None, start: int, end: int, out: Any, run_bytes: int
    ) -> Iterator[_Run]:
        head = self.head(part)
        if head.num_planes == 0:
            yield _Run(part=part, whole=whole, head=head, first=0, last=0, start=start, end=end, out=out)
            return
        block_bytes = head.block_elems * head.word_bytes
        step = max(run_bytes // block_bytes, 1)
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
            raise self._no_memory(run) from error
        except ThinpointError as error:
            raise self._located(error, run) from error.__cause__

    def _decode_blocks(self, run: _Run) -> int:
        head = run.head
        coded = coded_part(head)
        word = WORD_DTYPES[head.word_bytes]
        blocks = [
            self.reader.read_blocks(run.part, head, plane, run.first, run.last)
            for plane in range(head.num_planes)
        ]
        low, high = run.decoded
        if (low, high) == (run.start, run.end) and run.out.ctypes.data % head.word_bytes == 0:
            partial = self._backend.decode(coded, run.first, blocks, run.out.view(word))
        else:
            words = np.empty((high - low) // head.word_bytes, word)
            partial = self._backend.decode(coded, run.first, blocks, words)
            run.out[...] = words.view(np.uint8)[run.start - low : run.end - low]
        self._report(run)
        return partial

    def _report(self, run: _Run) -> None:
        if self._progress:
            with self._lock:
                self._done += run.end - run.start
                self._progress(self._done)

    def _fill_on_device(
        self,
        backend: DeviceBackend,
        targets: list[DeviceTarget],
        digests: _PartDigests,
        numbers: Iterator[int],
    ) -> None:
        for target in targets:
            # Here and not where runs are made: that is another thread, with another current stream.
            self._clear_gaps(target)
        waves = _waves(run for target in targets for run in self._runs(target, numbers, DEVICE_RUN_BYTES))

        def read_next() -> _Stored | None:
            wave = next(waves, None)
            return None if wave is None else self._read(wave, is_pinned=backend.device.type == "cuda")

        reading = self._workers.in_background(read_next)
        while (stored := reading.result()) is not None:
            reading = self._workers.in_background(read_next)
            for run, partial in zip(stored.runs, self._decode_on_device(backend, stored), strict=True):
                digests.add(run, partial)
                self._report(run)

    def _read(self, runs: list[_Run], *, is_pinned: bool) -> _Stored:
        """The stored blocks of a wave, unchecked: the device does that."""
        import torch

        plane_offsets: list[tuple[int, ...]] = []
        ranges: list[tuple[int, int]] = []
        num_bytes = 0
        for run in runs:
            begin = []
            for plane in range(run.head.num_planes):
                offset, size = self.reader.block_range(run.part, run.head, plane, run.first, run.last)
                begin.append(num_bytes)
                num_bytes += size
                ranges.append((offset, size))
            plane_offsets.append(tuple(begin))
        try:
            data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:
            raise self._no_memory(runs[0]) from error
        memory = data.numpy()

        def read_piece(piece: tuple[int, int, int]) -> None:
            offset, begin, end = piece
            self.reader.read_into(offset, memory[begin:end])

        for _ in self._workers.copy_map(read_piece, _pieces(ranges)):
            pass
        return _Stored(runs=runs, data=data, plane_offsets=plane_offsets)

    def _decode_on_device(self, backend: DeviceBackend, stored: _Stored) -> list[int]:
        """Decode a wave; returns for each run the partial raw digest of all its blocks."""
        import torch

        try:
            outs = [_direct_or_scratch(run) for run in stored.runs]
            items = [
                DecodeItem(
                    part=coded_part(run.head),
                    first_block=run.first,
                    num_blocks=run.last - run.first,
                    plane_offsets=offsets,
                    digests=run.head.block_digests[:, run.first : run.last],
                    out=out,
                )
                for run, offsets, out in zip(stored.runs, stored.plane_offsets, outs, strict=True)
            ]
            with device_lock(backend.device):
                partials = backend.decode_batch(stored.data, items)
        except torch.cuda.OutOfMemoryError as error:
            raise self._no_memory(stored.runs[0]) from error
        except ThinpointError as error:
            place = getattr(error, "item", None)
            if place is None:
                raise
            self._check_stored(stored, place)
            raise self._located(error, stored.runs[place]) from error.__cause__
        for run, out in zip(stored.runs, outs, strict=True):
            if out is not run.out:
                low, _ = run.decoded
                run.out.copy_(out[run.start - low : run.end - low])
        return partials

    def _check_stored(self, stored: _Stored, place: int) -> None:
        """Raises for the first damaged block of a run, saying which it is; the device says no more than the run."""
        run, memory = stored.runs[place], stored.data.numpy()
        for plane, position in enumerate(stored.plane_offsets[place]):
            for block in range(run.first, run.last):
                end = position + int(run.head.block_sizes[plane, block])
                self.reader.check_block(run.part, run.head, plane, block, memory[position:end])
                position = end

    def _no_memory(self, run: _Run) -> ThinpointError:
        return self._located(LimitExceededError("there is not enough memory to decode a part"), run)

    def _located(self, error: ThinpointError, run: _Run) -> ThinpointError:
        """The error with the file, offset and tensor, where it does not name them yet."""
        entry = self.reader.index.parts[run.part]
        error.where = error.where or self.reader.name
        error.offset = entry.offset if error.offset is None else error.offset
        error.tensor = error.tensor or run.head.name
        return error


def _direct_or_scratch(run: _Run) -> torch.Tensor:
    """The tensor to decode a run into: its own, or one for all of its blocks if it wants less or lies askew."""
    import torch

    low, high = run.decoded
    out: torch.Tensor = run.out
    if (low, high) == (run.start, run.end) and out.data_ptr() % run.head.word_bytes == 0:
        return out
    return torch.empty(high - low, dtype=torch.uint8, device=out.device)


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


def _waves(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """The runs in lists of about WAVE_BYTES."""
    wave: list[_Run] = []
    wave_bytes = 0
    for run in runs:
        if wave and wave_bytes + run.wave_bytes > WAVE_BYTES:
            yield wave
            wave, wave_bytes = [], 0
        wave.append(run)
        wave_bytes += run.wave_bytes
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
