"""A save whose options are settled: what `save` and `async_save` have in common."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from thinpoint.collector import collector_paused
from thinpoint.engine.auto import auto
from thinpoint.engine.backends import Backends
from thinpoint.engine.encode import Progress
from thinpoint.engine.report import SaveReport, bytes_of_roles, timed
from thinpoint.engine.save import Saving, Written, run
from thinpoint.engine.workers import Workers
from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import FlatState
from thinpoint.store.contract import Sink


@dataclass(frozen=True, kw_only=True)
class SaveTask:
    """Where and how to save. It knows nothing of the object, which it would keep alive while it is written.

    Attributes:
        begin: when it was asked for, as `time.perf_counter` counts.
        target: gives the sink and commits the file.
        path: what the report calls the file if the sink has no name.
        codec: what codes: what was asked for, or was chosen.
        auto_place: where it goes, if the codec was chosen by earlier saves (`engine.auto`), which this one is to teach.
        backends: what codes.
        host_memory_bytes: the budget for encoded bytes.
        num_threads: threads that compute, and threads that write.
        allow_pickle, progress: as for `thinpoint.save`.
    """

    begin: float
    target: AbstractContextManager[Sink]
    path: str
    codec: str
    backends: Backends
    host_memory_bytes: int
    num_threads: int
    allow_pickle: bool
    progress: Progress | None
    auto_place: str | None = None

    def saving(self, obj: Any, *, may_fill_budget: bool) -> Saving:
        """The save of an object, which must not change until it is encoded.

        Args:
            may_fill_budget: set aside the whole budget instead of a few waves.

        Raises:
            UnsupportedObjectError: something in the object cannot be stored.
        """
        state, seconds = self.flat(obj)
        return Saving(state, self.backends, **self.options(seconds, may_fill_budget=may_fill_budget))

    def flat(self, obj: Any) -> tuple[FlatState, dict[str, float]]:
        """The object taken apart, and the seconds that it took, as a stage. Raises: as `saving`."""
        seconds: dict[str, float] = {}
        with timed(seconds, "flatten"):
            return flatten(obj, allow_pickle=self.allow_pickle), seconds

    def options(self, seconds: dict[str, float], *, may_fill_budget: bool) -> dict[str, Any]:
        """Of a `Saving`. seconds: of the stages before."""
        return {
            "host_bytes": self.host_memory_bytes,
            "may_fill_budget": may_fill_budget,
            "seconds": seconds,
            "progress": self.progress,
        }

    @collector_paused()
    def run(self, obj: Any) -> SaveReport:
        """Save on this thread and a few of its own; blocks until the file is durable."""
        with Workers(self.num_threads) as workers:
            saving = self.saving(obj, may_fill_budget=False)
            return self.report(saving, run(saving, self.target, workers))

    def report(
        self,
        saving: Saving,
        written: Written,
        *,
        stall_s: float | None = None,
        mode: str = "sync",
        fallback: str | None = None,
    ) -> SaveReport:
        """The report of a save that is done now.

        Args:
            stall_s: how long the caller was held up; None: until now.
            mode, fallback: see `SaveReport`.
        """
        seconds = time.perf_counter() - self.begin
        stored_bytes = sum(entry.stored_bytes for entry in written.entries)
        report = SaveReport(
            path=self.path if written.name is None else written.name,
            file_id=f"{written.summary.file_id:016x}",
            file_bytes=written.summary.file_bytes,
            raw_bytes=sum(entry.raw_bytes for entry in written.entries),
            seconds=seconds,
            backend=saving.backend,
            codec=self.codec,
            roles=bytes_of_roles(written.entries),
            stall_seconds=seconds if stall_s is None else stall_s,
            stages=dict(saving.seconds),
            waves=max(2, -(-stored_bytes // saving.limit_bytes)) if saving.has_waited else 1,
            peak_host_bytes=saving.peak_bytes,
            host_memory_bytes=self.host_memory_bytes,
            mode=mode,
            fallback=fallback,
        )
        if self.auto_place is not None:
            auto.learn(self.auto_place, report)
        return report
