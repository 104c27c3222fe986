"""The half of a `Checkpointer` that writes: one save at a time, its failures counted, its outcome told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from thinpoint.checkpoint.catalog import Folder, committed, folders
from thinpoint.checkpoint.commit import Saved, SaveJob
from thinpoint.checkpoint.future import CheckpointFuture
from thinpoint.checkpoint.lane import Deadline, Lane
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import step_folder
from thinpoint.checkpoint.options import Options
from thinpoint.checkpoint.report import CheckpointReport
from thinpoint.checkpoint.retention import drop_step, expired
from thinpoint.checkpoint.runs import Claim
from thinpoint.checkpoint.saving import Outcome, save_beside, save_now
from thinpoint.checkpoint.sweeper import Sweeper
from thinpoint.errors import (
    CheckpointError,
    RankLostError,
    RanksFailedError,
    SupersededError,
    ThinpointError,
    UsageError,
)
from thinpoint.store.contract import Store
from thinpoint.version import __version__

FINISH_S = 60.0
"""How long `close` waits for deletions; what is left is deleted by the next run."""


class Writer:
    """Saves into a directory, in the name of one process. May be shared by threads.

    Args:
        store: the directory.
        options: see `Checkpointer`.
        save_options: of `thinpoint.save`.

    Attributes:
        pid: the process whose writer this is.
        before: the newest checkpoint known, for telling a stale state.
        damaged: training steps whose checkpoints were found damaged: they may be replaced, and retention leaves them.
    """

    def __init__(self, store: Store, options: Options, save_options: dict[str, Any]) -> None:
        self.pid = os.getpid()
        self.before: Saved | None = None
        self.damaged: set[int] = set()
        self._store = store
        self._options = options
        self._save_options = save_options
        self._claim: Claim | None = None
        self._sweeper: Sweeper | None = None
        self._flight: CheckpointFuture | None = None
        self._num_failures = 0
        self._lock = threading.RLock()

    def save(
        self,
        state: Any,
        step: int,
        *,
        metadata: dict[str, Any],
        overwrite: bool,
        asynchronous: bool,
        within_s: float | None = None,
    ) -> CheckpointFuture:
        """A save, begun; done on return unless `asynchronous`. What fails is in the future.

        Args:
            within_s: the process will be killed after so many seconds: waits for a running save, whatever the options say,
                and for no longer.

        Raises:
            CheckpointError: another save is running, and `while_saving` is "fail".
            And what an earlier save raised that nobody asked about.
        """
        begin = time.perf_counter()
        with self._lock:
            if not self._make_room(step, within_s):
                return self._skipped(step)
            limits = [s for s in (self._options.timeout, within_s) if s is not None]
            lane = self._lane(min(limits, default=None))
            flight = self._flight = CheckpointFuture(step)
            # Filled in when the call returns; what is done before has held the caller up until then.
            stall_s: list[float] = []

            def done(outcome: Outcome) -> None:
                seconds = time.perf_counter() - begin
                # An optimizer's step may have been held back after the return.
                held_s = outcome.saved.stages.get("hold", 0.0) if outcome.saved is not None else 0.0
                report = self._report(
                    step,
                    outcome,
                    asynchronous=asynchronous,
                    seconds=seconds,
                    stall_s=stall_s[0] + held_s if stall_s else seconds,
                    num_retries=lane.num_retries,
                )
                self._settle(flight, report, outcome)
                lane.close()

            try:
                try:
                    job = self._job(lane, step, metadata, overwrite)
                except Exception as error:  # noqa: BLE001
                    done(Outcome(error=error))
                    return flight
                if asynchronous:
                    self._save_beside(job, state, done, flight.set_staged)
                    stall_s.append(time.perf_counter() - begin)
                else:
                    done(self._save_now(job, state))
            except BaseException as error:
                if not flight.done():
                    flight.settle(error)
                    # It is raised here, not once more by the next call.
                    flight.exception()
                lane.close()
                raise
            return flight

    @property
    def run_id(self) -> str:
        """Of the claim; empty before it."""
        return self._claim.run.run_id if self._claim is not None else ""

    def claim(self, lane: Lane) -> Claim:
        """This process's claim on the directory, made at the first call; then a clean-up begins in the background."""
        if self._claim is None:
            self._claim = lane.call(Claim, self._store)
            log.info("%s writes to %s", self._claim.run, self._store.url)
            self._sweeper = Sweeper(
                self._store,
                self._claim,
                orphan_age_s=self._options.orphan_age,
                pause_s=self._options.delete_pause,
                retries=self._options.retries,
            )
            self._sweeper.request()
        return self._claim

    def claim_within(self, most_s: float) -> None:
        """Claims the directory if this process has not; raises what the store raises."""
        with self._lock:
            if self._claim is None:
                self._on_lane(self.claim, most_s)

    def truncate_after(self, step: int) -> list[int]:
        """See `Checkpointer.truncate_after`."""
        with self._lock:
            self.wait()
            gone = self._on_lane(lambda lane: self._truncate(lane, step), self._options.timeout)
            if self.before is not None and self.before.step > step:
                self.before = None
            self.damaged.difference_update(gone)
            assert self._sweeper is not None
            self._sweeper.request()
            return gone

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the save under way; False if it takes longer."""
        flight = self._flight
        return flight is None or not wait([flight.upload_completion], timeout_s).not_done

    def raise_unasked(self) -> None:
        """Raises what the last save raised, if nobody has asked for it."""
        error = self._flight.unasked_error() if self._flight is not None else None
        if error is not None:
            raise error

    @property
    def has_unasked(self) -> bool:
        """Whether the last save has raised something that nobody asked for."""
        return self._flight is not None and self._flight.is_unasked

    def raise_last(self) -> None:
        """Waits for the last save, and raises what it raised, asked for or not. Once."""
        flight, self._flight = self._flight, None
        error = flight.exception() if flight is not None else None
        if error is not None:
            raise error

    def before_a_save(self, what: str) -> AbstractContextManager[None]:
        """For what the caller does before it calls `save`; what it raises is the caller's."""
        return nullcontext()

    def finish(self) -> None:
        """Waits for the save under way, and a while for deletions."""
        self.wait()
        if self._sweeper is not None and not self._sweeper.finish(FINISH_S):
            log.warning("deletions are left to the next run: they took more than %d s", FINISH_S)

    def _job(self, lane: Lane, step: int, metadata: dict[str, Any], overwrite: bool) -> Any:
        """What `_save_now` and `_save_beside` need, with a claim on the directory."""
        return SaveJob(
            store=self._store,
            lane=lane,
            claim=self.claim(lane),
            step=step,
            metadata=metadata,
            overwrite=overwrite or step in self.damaged,
            stale=self._options.stale,
            before=self.before,
        )

    def _save_now(self, job: Any, state: Any) -> Outcome:
        return save_now(job, state, self._save_options)

    def _save_beside(
        self, job: Any, state: Any, done: Callable[[Outcome], None], staged: Callable[[], None]
    ) -> None:
        options = {**self._save_options, "overlap": self._options.mode == "overlap"}
        save_beside(job, state, options, done, staged)

    def _make_room(self, step: int, within_s: float | None) -> bool:
        """Whether a save may begin now."""
        flight = self._flight
        if flight is not None and not flight.done():
            policy = "wait" if within_s is not None else self._options.while_saving
            if policy == "skip":
                return False
            if policy == "fail":
                raise self._still_running(step)
            if not self.wait(within_s):
                raise Deadline(within_s).error(self._store.url)
        self.raise_unasked()
        return True

    def _still_running(self, step: int) -> CheckpointError:
        assert self._flight is not None
        return CheckpointError(
            f"training step {step} cannot be saved: the save of step {self._flight.step} is still running",
            where=self._store.url,
        )

    def _truncate(self, lane: Lane, step: int) -> list[int]:
        claim = self.claim(lane)
        lane.call(claim.check, self._store)
        found = lane.call(folders, self._store)
        if not any(s <= step and self._is_committed(lane, found[s]) for s in found):
            raise CheckpointError(
                f"no checkpoint would be left: there is none of training step {step} or before",
                where=self._store.url,
            )
        gone = [s for s, folder in found.items() if s > step and folder.has_manifest]
        # Newest first: whenever this is interrupted, what is left is a history without gaps.
        for s in gone:
            lane.call(drop_step, self._store, s)
        return gone

    def _is_committed(self, lane: Lane, folder: Folder) -> bool:
        try:
            lane.call(committed, self._store, folder)
        except ThinpointError:
            return False
        return True

    def _on_lane(self, function: Callable[[Lane], Any], most_s: float | None) -> Any:
        lane = self._lane(most_s)
        try:
            return function(lane)
        finally:
            lane.close()

    def _lane(self, most_s: float | None) -> Lane:
        return Lane(Deadline(most_s), retries=self._options.retries, where=self._store.url)

    def _skipped(self, step: int) -> CheckpointFuture:
        flight = CheckpointFuture(step)
        report = CheckpointReport(outcome="skipped", step=step, path=self._path(step))
        log.warning("training step %d is not saved: another save is running", step)
        self.tell(self._options.on_event, report)
        flight.settle(report)
        return flight

    def _report(
        self,
        step: int,
        outcome: Outcome,
        *,
        asynchronous: bool,
        seconds: float,
        stall_s: float,
        num_retries: int,
    ) -> CheckpointReport:
        manifest, saved = outcome.manifest, outcome.saved
        stages = dict(saved.stages) if saved is not None else {}
        if manifest is not None:
            stages["commit"] = stages.get("commit", 0.0) + outcome.commit_s
        return CheckpointReport(
            outcome="failed" if manifest is None else "committed",
            step=step,
            path=self._path(step),
            run_id=self.run_id,
            save_id=manifest.save_id if manifest is not None else "",
            seconds=seconds,
            stall_seconds=stall_s,
            stages=stages,
            retries=num_retries,
            asynchronous=asynchronous,
            error=None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}",
            saved=saved,
            versions={"thinpoint": __version__} if manifest is None else manifest.versions,
        )

    def _settle(self, flight: CheckpointFuture, report: CheckpointReport, outcome: Outcome) -> None:
        """Books the outcome, tells it, and only then lets those go on who wait for it."""
        error = outcome.error
        if outcome.manifest is not None:
            self._committed(outcome)
            log.info("training step %d is saved in %s", report.step, report.path)
            if self._options.on_committed is not None:
                self.tell(self._options.on_committed, report.step, report.path)
        else:
            self._num_failures += 1
            log.error("training step %d could not be saved: %s", report.step, report.error)
        self.tell(self._options.on_event, report)
        if error is None or (self._options.on_error == "warn" and self._may_go_on(error)):
            flight.settle(report)
        else:
            flight.settle(error)

    def _may_go_on(self, error: BaseException) -> bool:
        """Whether training may go on without this checkpoint."""
        causes = error.failures.values() if isinstance(error, RanksFailedError) else [error]
        if any(isinstance(cause, SupersededError | UsageError) for cause in causes):
            return False
        if isinstance(error, RankLostError) or not isinstance(error, Exception):
            return False
        if self._num_failures < self._options.max_failures:
            return True
        log.error("%d saves in a row have failed: giving up", self._num_failures)
        return False

    def _committed(self, outcome: Outcome) -> None:
        manifest = outcome.manifest
        assert manifest is not None
        self._num_failures = 0
        self.before = Saved(step=manifest.training_step, trainable=manifest.trainable)
        self.damaged.discard(manifest.training_step)
        if self._sweeper is None:
            # Another rank has claimed the directory: it deletes.
            return
        step, options, store = manifest.training_step, self._options, self._store
        damaged = frozenset(self.damaged)
        self._sweeper.request(
            lambda: expired(
                store,
                folders(store),
                step,
                keep_last=options.keep_last,
                keep_every=options.keep_every,
                damaged=damaged,
            ),
            outcome.replaced,
        )

    def tell(self, function: Callable[..., Any] | None, *arguments: Any) -> None:
        """Calls a function of the user's; what it raises does not undo the save."""
        if function is None:
            return
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001
            log.exception("%r failed", function)

    def _path(self, step: int) -> str:
        return f"{self._store.url}/{step_folder(step)}"
