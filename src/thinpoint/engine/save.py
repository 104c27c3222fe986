"""A save as two halves that overlap: encoding, on the caller's thread, and writing, on another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.plan import ENCODER_VERSION
from thinpoint.collector import collector_paused
from thinpoint.engine.backends import Backends, Devices
from thinpoint.engine.encode import (
    LARGE_WAVES,
    MakeParts,
    Progress,
    devices_used,
    encode_waves,
    enough_bytes,
)
from thinpoint.engine.flow import Flow, clear_frames
from thinpoint.engine.jobs import backend_names, part_jobs
from thinpoint.engine.report import timed
from thinpoint.engine.workers import Workers
from thinpoint.file.index import PartEntry, StorageEntry, TensorEntry
from thinpoint.file.writer import FileSummary, FileWriter
from thinpoint.state.leaves import FlatState
from thinpoint.store.contract import Sink
from thinpoint.version import __version__

__all__ = ["Saving", "Written", "backend_names", "part_jobs", "run", "tensor_entry", "write_file"]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that was written.

    Attributes:
        summary: its size and identity.
        entries: what the index says of its parts.
        name: what the sink calls it, if it has a name.
    """

    summary: FileSummary
    entries: list[PartEntry]
    name: str | None


class Saving:
    """One save under way. `encode` and `write` are called once each, at the same time, on two threads.

    Between them lie at most so many bytes of encoded parts (and one part at least). The first error of either half, or
    `stop`, ends both, and each raises it.

    Args:
        state: what is saved; it must not change until `encode` has returned.
        backends: what codes it.
        host_bytes: the budget; None for no limit but that of a few waves.
        may_fill_budget: let all of it be filled, as the caller waits only for encoding; what devices encode is written only
            then or after. Otherwise a few waves are set aside, which is enough for the halves to overlap.
        seconds: of stages before this one.
        meta: for the file's index.
        progress: called by `encode`.

    Attributes:
        backend: what codes the tensors, for people.
        seconds: of each stage.
        active_at: when the writer last got on, as `time.monotonic` counts.
    """

    def __init__(
        self,
        state: FlatState,
        backends: Backends,
        *,
        host_bytes: int | None = None,
        may_fill_budget: bool = False,
        seconds: dict[str, float] | None = None,
        meta: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        used = devices_used(state.storages, backends.devices)
        if host_bytes is None or not may_fill_budget:
            enough = enough_bytes(len(used))
            host_bytes = enough if host_bytes is None else min(enough, host_bytes)
        self._flow: Flow[MakeParts] = Flow(host_bytes, drains_late=may_fill_budget and bool(used))
        # Nobody waits for encoding alone when the halves overlap.
        self._wave_scale = LARGE_WAVES if may_fill_budget else 1
        self._storages = state.storages
        self._backends = backends
        self._progress = progress
        self._rest: dict[str, Any] = {
            "storages": [StorageEntry(bytes=s.num_bytes, device=s.device) for s in state.storages],
            "tree": state.tree,
            "meta": meta or {},
        }
        self._tensors = state.tensors
        self.backend = backend_names(state.storages, backends.host, backends.devices)
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self.active_at = time.monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether an error has ended it."""
        return self._flow.error is not None

    @property
    def limit_bytes(self) -> int:
        """How many bytes of encoded parts may be between the halves."""
        return self._flow.limit_bytes

    @property
    def peak_bytes(self) -> int:
        """The most of them that were set aside at a time."""
        return self._flow.peak_bytes

    @property
    def has_waited(self) -> bool:
        """Whether encoding had to wait for storage."""
        return self._flow.has_waited

    def stop(self, error: BaseException) -> None:
        """End both halves with this error, unless another was before; returns at once."""
        self._flow.stop(error)

    def encode(self, workers: Workers) -> None:
        """Encode everything; what was encoded no longer depends on the state.

        Raises:
            StateChangedError: a tensor changed while it was being read.
            Whatever ended the other half.
        """
        storages, self._storages = self._storages, []
        with self._stopping_on_error():
            encode_waves(
                storages,
                self._flow,
                self._backends.host,
                workers,
                devices=self._backends.devices,
                seconds=self.seconds,
                progress=self._progress,
                wave_scale=self._wave_scale,
            )

    def write(self, target: AbstractContextManager[Sink], num_threads: int) -> Written:
        """Write what is encoded, as it comes, and commit it; blocks until it is durable.

        Args:
            target: gives the sink; left with an error, it makes as if the file never was.

        Raises:
            StorageError: the system refused.
            Whatever ended the other half.
        """
        with self._stopping_on_error(), self._timed_commit(target) as sink, Workers(num_threads) as workers:
            write_all = partial(sink.write_all, map=self._flow.unless_stopped(workers.copy_map))
            behind = _Behind(write_all, workers, self._got_on, self.seconds)
            writer = FileWriter(sink, behind.write_all)
            entries: list[PartEntry] = []

            def write_wave(make_parts: MakeParts) -> None:
                with timed(self.seconds, "write"):
                    with collector_paused():
                        parts = make_parts()
                    entries.extend(writer.add_parts(parts))

            def settle() -> None:
                with timed(self.seconds, "write"):
                    behind.settle()

            self._flow.drain(write_wave, settle)
            with timed(self.seconds, "write"):
                rest, self._rest = self._rest, {}
                tensors, self._tensors = [tensor_entry(record) for record in self._tensors], []
                summary = writer.finish(
                    **rest, tensors=tensors, encoder=ENCODER_VERSION, writer_version=__version__
                )
                behind.settle()
            # A sink may have been spared the rest after an error: what it has is then not to be committed.
            self._flow.check()
        return Written(summary=summary, entries=entries, name=getattr(sink, "name", None))

    def _got_on(self) -> None:
        self.active_at = time.monotonic()

    @contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._flow.stop(error)
            clear_frames(error)
            first = self._flow.error
            if first is None or first is error:
                raise
            # What came after the first error came of it.
            raise first from first.__cause__

    @contextmanager
    def _timed_commit(self, target: AbstractContextManager[Sink]) -> Iterator[Sink]:
        end = None
        with target as sink:
            yield sink
            end = time.perf_counter()
        if end is not None:
            self.seconds["commit"] = time.perf_counter() - end
            self.active_at = time.monotonic()


class _Behind:
    """Writes on another thread, so that the next parts are made meanwhile.

    Args:
        write_all: writes buffers in order.
        workers: theirs is the thread.
        got_on: called whenever something has been written.
        seconds: of each stage; "storage" is added to.
    """

    def __init__(
        self,
        write_all: Callable[[list[Any]], None],
        workers: Workers,
        got_on: Callable[[], None],
        seconds: dict[str, float],
    ) -> None:
        self._write_all, self._workers, self._got_on = write_all, workers, got_on
        self._seconds = seconds
        self._writing: Future[None] | None = None

    def write_all(self, buffers: list[Any]) -> None:
        """Begin to write buffers, once those before are written; raises what went wrong with those."""
        self.settle()
        self._writing = self._workers.in_background(self._write, buffers)

    def settle(self) -> None:
        """Wait for what is being written; raises what goes wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, buffers: list[Any]) -> None:
        with timed(self._seconds, "storage"):
            self._write_all(buffers)
        self._got_on()


def run(saving: Saving, target: AbstractContextManager[Sink], workers: Workers) -> Written:
    """Both halves of a save; returns, or raises, when nothing is under way any more."""
    writing: Future[Written] | None = None
    try:
        writing = workers.in_background(saving.write, target, workers.num_threads)
        saving.encode(workers)
        return writing.result()
    except BaseException as error:
        saving.stop(error)
        if writing is not None:
            wait([writing])
        raise


def write_file(
    state: FlatState,
    sink: Sink,
    backend: HostBackend,
    workers: Workers,
    *,
    devices: Devices | None = None,
    meta: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[FileSummary, list[PartEntry]]:
    """Write a flattened state to a sink as one file; returns its summary and the index entries of its parts.

    Blocks until every byte is with the sink. Host memory besides the state: four waves, each encoded from at most
    DEVICE_WAVE_BYTES on every device with a backend and PART_BYTES on the CPU.

    Args:
        sink: opened and committed by the caller.
        devices: what codes storages on accelerators; by default they are read and coded on the CPU.
    """
    backends = Backends(backend, Devices() if devices is None else devices)
    saving = Saving(state, backends, meta=meta, progress=progress)
    written = run(saving, nullcontext(sink), workers)
    return written.summary, written.entries


def tensor_entry(record: dict[str, Any]) -> TensorEntry:
    """A tensor record of the state as an entry of the index."""
    own = {"storage", "dtype", "shape", "stride", "offset"}
    return TensorEntry(
        storage=record["storage"],
        dtype=record["dtype"],
        shape=tuple(record["shape"]),
        stride=tuple(record["stride"]),
        offset=record["offset"],
        extra={key: value for key, value in record.items() if key not in own},
    )
