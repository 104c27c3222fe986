"""Fills memory from a file: stored bytes are read ahead, checked and decoded, on the CPU or on the device that wants them.

On the CPU, threads that read stay a few runs ahead of those that check and decode. On a device, all blocks of a wave are
read into page-locked memory and decoded in one go, while those of the next wave are read.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES
from thinpoint.device.contract import DecodeItem, DeviceBackend, FinishDecode
from thinpoint.digest import MASK
from thinpoint.engine.backends import Devices, device_lock
from thinpoint.engine.fetch import StoredWave, check_run, check_wave, fetch_run, fetch_wave
from thinpoint.engine.runs import (
    DEVICE_RUN_BYTES,
    RUN_BYTES,
    WAVE_BYTES,
    DeviceTarget,
    PartRange,
    Run,
    RunMaker,
    Target,
    coded_part,
    waves,
)
from thinpoint.engine.workers import Workers
from thinpoint.errors import DigestMismatchError, NotEnoughMemoryError, ThinpointError
from thinpoint.file.layout import hex64
from thinpoint.file.reader import FileReader

if TYPE_CHECKING:
    import torch

TASK_BYTES = 1 << 20
"""Raw bytes that a thread decodes at least, unless fewer are left."""

__all__ = ["RUN_BYTES", "WAVE_BYTES", "DeviceTarget", "Restorer", "Target", "coded_part"]


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    """A wave that a device decodes.

    Attributes:
        outs: for each run the tensor that takes all of its blocks.
        finish: see `DeviceBackend.begin_decode`.
    """

    stored: StoredWave
    outs: list[torch.Tensor]
    finish: FinishDecode


class _PartDigests:
    """Adds up the digests of what was decoded of parts that are wanted whole."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._sums: dict[int, int] = {}
        self._parts: dict[int, int] = {}

    def add(self, run: Run, partial: int) -> None:
        if run.whole is not None:
            self._sums[run.whole] = (self._sums.get(run.whole, 0) + partial) & MASK
            self._parts[run.whole] = run.part

    def check(self) -> None:
        for number, part in self._parts.items():
            expected = self._reader.index.parts[part].raw_digest
            if self._sums[number] != expected:
                raise DigestMismatchError(
                    "the decoded bits do not match their checksum",
                    where=self._reader.name,
                    tensor=self._reader.read_head(part).name,
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
        self._maker = RunMaker(reader)

    def fill(self, targets: Iterable[Target | DeviceTarget]) -> None:
        """Fill every target; bytes that no part covers become zero. Blocks until done, on devices too.

        To be called from any thread but the workers' background thread, which reads for devices.

        Memory: the stored bytes of a few runs for each thread, of RUN_BYTES each. On a device, page-locked: those of three
        waves of at most WAVE_BYTES (and a part); on the device itself, those of two and their partly wanted blocks.

        Raises:
            DigestMismatchError, MalformedFileError, UnknownCodecError: what was read is damaged or not for this
                version; targets may be partly written.
            NotEnoughMemoryError: there is not enough memory.
            StorageError: the store refused.
        """
        digests = _PartDigests(self.reader)
        numbers = itertools.count()
        on_device: dict[torch.device, list[DeviceTarget]] = {}

        def host_targets() -> Iterator[Target]:
            for target in targets:
                if isinstance(target, Target):
                    self._maker.clear_gaps(target)
                    yield target
                elif target.start < target.end:
                    on_device.setdefault(target.out.device, []).append(target)

        items = (item for target in host_targets() for item in self._maker.items(target, numbers, RUN_BYTES))
        for decoded in self._workers.staged(self._fetch, self._decode, _groups(items)):
            for run, digest in decoded:
                digests.add(run, digest)
        for device, of_device in on_device.items():
            backend = self.devices.get(device)
            assert backend is not None, f"no backend decodes on {device}"
            self._fill_on_device(backend, of_device, digests, numbers)
        digests.check()

    def _fetch(self, group: list[Run | PartRange]) -> list[tuple[Run, list[list[np.ndarray]]]]:
        """Runs, each with the stored blocks of its planes, unchecked."""
        fetched = []
        for item in group:
            with self._locating(item):
                fetched.append(fetch_run(self.reader, item))
        return fetched

    def _decode(
        self, group: list[Run | PartRange], fetched: Future[list[tuple[Run, list[list[np.ndarray]]]]]
    ) -> list[tuple[Run, int]]:
        """Check and decode runs; returns them, each with the partial raw digest of all its blocks."""
        decoded = []
        for run, planes in fetched.result():
            with self._locating(run):
                check_run(self.reader, run, planes)
                decoded.append((run, self._decode_blocks(run, planes)))
        return decoded

    @contextmanager
    def _locating(self, item: Run | PartRange) -> Iterator[None]:
        """Errors tell where it is."""
        try:
            yield
        except MemoryError as error:
            raise self._no_memory(item) from error
        except ThinpointError as error:
            raise self._located(error, item) from error.__cause__

    def _decode_blocks(self, run: Run, planes: list[list[np.ndarray]]) -> int:
        coded = coded_part(run.head)
        word = WORD_DTYPES[run.head.word_bytes]
        low, high = run.decoded
        if (low, high) == (run.start, run.end) and run.out.ctypes.data % run.head.word_bytes == 0:
            digest = self._backend.decode(coded, run.first, planes, run.out.view(word))
        else:
            words = np.empty((high - low) // run.head.word_bytes, word)
            digest = self._backend.decode(coded, run.first, planes, words)
            run.out[...] = words.view(np.uint8)[run.start - low : run.end - low]
        self._report(run)
        return digest

    def _report(self, run: Run) -> None:
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
            self._maker.clear_gaps(target)
        made = waves(
            item for target in targets for item in self._maker.items(target, numbers, DEVICE_RUN_BYTES)
        )

        def read_next() -> StoredWave | None:
            wave = next(made, None)
            return None if wave is None else self._fetch_wave(wave, backend.device)

        reading = self._workers.in_background(read_next)
        before: _Decoding | None = None
        while (stored := reading.result()) is not None:
            reading = self._workers.in_background(read_next)
            begun: _Decoding | None = None
            try:
                begun = self._begin_decode(backend, stored)
            except NotEnoughMemoryError:
                if before is None:
                    raise
            if before is not None:
                self._finish_decode(backend, before, digests)
                before = None
            # Where two have no memory, one comes after the other.
            before = begun or self._begin_decode(backend, stored)
        if before is not None:
            self._finish_decode(backend, before, digests)

    def _fetch_wave(self, wave: list[Run | PartRange], device: torch.device) -> StoredWave:
        try:
            return fetch_wave(self.reader, wave, self._workers, is_pinned=device.type == "cuda")
        except MemoryError as error:
            raise self._no_memory(wave[0]) from error

    def _begin_decode(self, backend: DeviceBackend, stored: StoredWave) -> _Decoding:
        with self._locating_in(stored):
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
                return _Decoding(stored=stored, outs=outs, finish=backend.begin_decode(stored.data, items))

    def _finish_decode(self, backend: DeviceBackend, wave: _Decoding, digests: _PartDigests) -> None:
        with self._locating_in(wave.stored), device_lock(backend.device):
            partials = wave.finish()
        for run, out, digest in zip(wave.stored.runs, wave.outs, partials, strict=True):
            if out is not run.out:
                low, _ = run.decoded
                run.out.copy_(out[run.start - low : run.end - low])
            digests.add(run, digest)
            self._report(run)

    @contextmanager
    def _locating_in(self, stored: StoredWave) -> Iterator[None]:
        """Errors of a device tell where in the file it is."""
        import torch

        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise self._no_memory(stored.runs[0]) from error
        except ThinpointError as error:
            place = getattr(error, "item", None)
            if place is None:
                raise
            check_wave(self.reader, stored, place)
            raise self._located(error, stored.runs[place]) from error.__cause__

    def _no_memory(self, item: Run | PartRange) -> ThinpointError:
        tensor = self._maker.head(item.part).name
        return self._located(
            NotEnoughMemoryError("there is not enough memory to decode a part", tensor=tensor), item
        )

    def _located(self, error: ThinpointError, item: Run | PartRange) -> ThinpointError:
        """The error with the file, offset and tensor (if its head is known), where it does not name them yet."""
        entry = self.reader.index.parts[item.part]
        error.where = error.where or self.reader.name
        error.offset = entry.offset if error.offset is None else error.offset
        if isinstance(item, Run):
            error.tensor = error.tensor or item.head.name
        return error


def _groups(items: Iterable[Run | PartRange]) -> Iterator[list[Run | PartRange]]:
    """Items in order; many small ones are one task, as it takes longer to hand it to a thread than to decode them."""
    group: list[Run | PartRange] = []
    room = TASK_BYTES
    for item in items:
        num_bytes = item.end - item.start
        if group and num_bytes > room:
            yield group
            group, room = [], TASK_BYTES
        group.append(item)
        room -= num_bytes
    if group:
        yield group


def _direct_or_scratch(run: Run) -> torch.Tensor:
    """The tensor to decode a run into: its own, or one for all of its blocks if it wants less or lies askew."""
    import torch

    low, high = run.decoded
    out: torch.Tensor = run.out
    if (low, high) == (run.start, run.end) and out.data_ptr() % run.head.word_bytes == 0:
        return out
    return torch.empty(high - low, dtype=torch.uint8, device=out.device)
