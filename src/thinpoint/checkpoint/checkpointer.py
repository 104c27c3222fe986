"""A directory of checkpoints: saved in turn, committed one by one, restored from the newest that is intact."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from inspect import isfunction, ismethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from thinpoint.checkpoint import restore as restoring
from thinpoint.checkpoint.catalog import committed, folders
from thinpoint.checkpoint.commit import Saved
from thinpoint.checkpoint.future import CheckpointFuture
from thinpoint.checkpoint.lane import retry
from thinpoint.checkpoint.leftovers import ORPHAN_AGE_S
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import MAX_STEP
from thinpoint.checkpoint.options import DEFAULT_LOST_AFTER_S, DEFAULT_TIMEOUT_S, Options
from thinpoint.checkpoint.report import CheckpointReport, RestoreReport
from thinpoint.checkpoint.schedule import Schedule
from thinpoint.checkpoint.sigterm import SigtermFlag
from thinpoint.checkpoint.stateful import state_of
from thinpoint.checkpoint.writer import Writer
from thinpoint.errors import DamagedFileError, NotFoundError, StorageError, UnsupportedError, UsageError
from thinpoint.folder.manifest import Manifest, check_metadata
from thinpoint.store import open_store

if TYPE_CHECKING:
    from thinpoint.checkpoint.team import Team

FIRST_CLAIM_S = 30.0
"""How long the first training step may be held up by taking the directory over."""


class Checkpointer:
    """Saves the state of a training run again and again, and gives back the newest checkpoint that is intact.

    A context manager; leaving it waits for what is in flight. One process, or one group of them, writes to a directory: the
    first save, or the first `maybe_save`, takes it over, and whoever wrote before can neither commit nor delete anything any
    more. Reading takes nothing over. May be shared by threads; a forked process takes the directory over when it saves.

    With `process_group` every rank has a `Checkpointer`, and the constructor, `save`, `async_save`, `maybe_save`, `restore`
    and `truncate_after` are collective: all ranks call them, in the same order, from one thread. `steps`, `latest` and `load`
    are not: each rank reads for itself. See `docs/checkpointer.md` for the state that is expected.

    Args:
        directory: a path, a URL (`s3://bucket/run`) or a store. It need not exist yet. All ranks must see the same one.
        process_group: True, or a group of torch.distributed: its ranks save one checkpoint together. The group itself is
            not used: two gloo groups of the same ranks are made.
        lost_after: seconds without a sign of life after which a rank counts as lost, and what the ranks are doing together
            fails. One whose process has ended is found in about a second by those on its machine.
        every_steps, every_minutes: when `maybe_save` saves: at multiples, and when so much time has passed since the last
            save began.
        keep_last: the newest so many are kept; None keeps all. Others are deleted, in the background, once a newer one is
            durable.
        keep_every: multiples of this are kept for ever and do not count.
        on_error: "raise" what a save raises, at the latest at the next call; "warn" logs it, until `max_failures` saves in a
            row have failed. A superseded run always raises.
        max_failures: see `on_error`.
        timeout: seconds that a save may take in all, its commit included. Then it has failed; what hangs is left behind. None
            waits for ever.
        retries: more attempts after errors that may pass, after 0.5, 1, 2, ... seconds. (The data of an asynchronous save
            can be written only once.)
        while_saving: a save while another is running "wait"s for it, is "skip"ped, or "fail"s.
        mode: what `async_save` and `maybe_save` wait for: "async" until the state is encoded; "overlap" not even that
            (`docs/overlap.md`).
        stale: if the step has advanced and no weight has changed since the checkpoint before: "warn", "fail" or "ignore".
        orphan_age: seconds after which what belongs to no checkpoint is deleted even if its writer may be alive.
        delete_pause: seconds between two deletions.
        on_event: called with the report of every save and restore, on the thread that did it. It must not save.
        on_committed: called with (step, path) of every new checkpoint, on the thread that committed it. It must not save.
        codec, backend, prove, allow_pickle, num_threads, host_memory: as for `thinpoint.async_save`.

    Raises:
        UsageError: an option is not valid, or there is no such group.
    """

    def __init__(
        self,
        directory: Any,
        *,
        process_group: Any = None,
        lost_after: float = DEFAULT_LOST_AFTER_S,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        max_failures: int = 3,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 3,
        while_saving: Literal["wait", "skip", "fail"] = "wait",
        mode: Literal["async", "overlap"] = "async",
        stale: Literal["warn", "fail", "ignore"] = "warn",
        orphan_age: float = ORPHAN_AGE_S,
        delete_pause: float = 0.1,
        on_event: Callable[[CheckpointReport | RestoreReport], Any] | None = None,
        on_committed: Callable[[int, str], Any] | None = None,
        codec: str = "thin",
        backend: str = "auto",
        prove: bool | None = None,
        allow_pickle: bool = True,
        num_threads: int | None = None,
        host_memory: int | None = None,
    ) -> None:
        self._store = open_store(directory)
        self._options = Options(
            every_steps=every_steps,
            every_minutes=every_minutes,
            keep_last=keep_last,
            keep_every=keep_every,
            on_error=on_error,
            max_failures=max_failures,
            timeout=timeout,
            retries=retries,
            while_saving=while_saving,
            stale=stale,
            mode=mode,
            orphan_age=orphan_age,
            delete_pause=delete_pause,
            lost_after=lost_after,
            on_event=on_event,
            on_committed=on_committed,
        )
        self._save_options = {
            "codec": codec,
            "backend": backend,
            "prove": prove,
            "allow_pickle": allow_pickle,
            "num_threads": num_threads,
            "host_memory": host_memory,
        }
        self._load_options: dict[str, Any] = {"backend": backend, "num_threads": num_threads}
        self._team = None if process_group is None else _team(process_group, lost_after)
        self._writer = self._new_writer()
        self._schedule = Schedule(every_steps=every_steps, every_minutes=every_minutes)
        self._sigterm: SigtermFlag | None = None
        self._is_stopping = False
        self._tried_to_claim = False
        self._is_closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as own:  # noqa: BLE001
            # What ended the block matters more.
            log.error("a save failed: %s", own)

    @property
    def url(self) -> str:
        """The directory, for people: a path, or a URL without secrets."""
        return self._store.url

    def save(
        self, state: Any, step: int, *, metadata: dict[str, Any] | None = None, overwrite: bool = False
    ) -> CheckpointReport:
        """Saves, and returns a report when the checkpoint is durable. Blocks on I/O, at most `timeout` seconds.

        Args:
            state: whatever `thinpoint.save` takes; must not change meanwhile. Modules, optimizers and whatever else has
                `state_dict` and `load_state_dict` stand for their state dict, in dicts, lists and tuples too. With a process
                group a dict with the same names on all ranks, see `docs/checkpointer.md`.
            step: training step, from 0 on.
            metadata: JSON values for the manifest, at most 1 MiB: readable without the data.
            overwrite: replace the step's checkpoint, in one step, if there is one.

        Returns:
            What was done. With `on_error="warn"` or `while_saving="skip"` its `outcome` may be other than "committed".

        Raises:
            AlreadyExistsError: the step has a checkpoint, and was not found damaged by `restore`.
            SupersededError: another run has taken the directory over.
            StaleStateError: see `stale`.
            CheckpointError: see `while_saving`.
            SaveTimeoutError: see `timeout`.
            RanksFailedError, RankLostError: it failed on some of the ranks, or one of them is lost.
            And what `thinpoint.save` raises, and an earlier save that nobody asked about.
        """
        return self._save(state, step, metadata, overwrite, asynchronous=False).result()

    def async_save(
        self, state: Any, step: int, *, metadata: dict[str, Any] | None = None, overwrite: bool = False
    ) -> CheckpointFuture:
        """As `save`, but returns as soon as the state may change again, or before (see `mode`); a future of the report.

        The process does not end before the save has. With THINPOINT_DISABLE_ASYNC=1 the future is done on return.

        Raises:
            CheckpointError, and what an earlier save raised that nobody asked about; all else is in the future.
        """
        return self._save(state, step, metadata, overwrite, asynchronous=True)

    def maybe_save(
        self,
        state: Any,
        step: int,
        *,
        metadata: dict[str, Any] | None = None,
        blocking: bool = False,
    ) -> CheckpointFuture | None:
        """Saves if `every_steps` or `every_minutes` say so, or SIGTERM has come. For every training step.

        Args:
            state: as for `save`, or a function without arguments that gives it, called only when it is needed.
            blocking: as `save`; otherwise as `async_save`. After SIGTERM always as `save`, within the time of grace.

        Returns:
            A future of the report; None if no save was due.

        Raises: as `async_save`.
        """
        self._check_open()
        with self._writing().before_a_save("maybe_save"):
            step = _checked_step(step)
        late = None
        if self._team is None:
            self._take_over()
            self._writing().raise_unasked()
        else:
            late = self._agreed_late(step)
            self._take_over()
        stop = self.should_stop
        if not self._schedule.is_due(step, stop=stop, late=late):
            return None
        if isfunction(state) or ismethod(state):
            with self._writing().before_a_save("give the state"):
                state = state()
        future = self._save(state, step, metadata, False, asynchronous=not (blocking or stop))
        if stop and future.exception() is None and future.result().outcome == "committed":
            self._schedule.stopped = True
        return future

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        weights_only: bool = True,
    ) -> RestoreReport | None:
        """Loads the newest intact checkpoint into the tensors of `state`, in place. Blocks on I/O.

        Newer ones that are damaged are passed over: the log and the report say which and why, and a later save may replace
        them. What is no tensor is replaced in its dict or list.

        Args:
            state, strict, cast, weights_only: as for `thinpoint.load_into`.
            step: this one and no other; None for the newest.

        Returns:
            What was restored; None if the directory holds no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, but none is intact, or none of that step. The state may be partly
                overwritten.
            StateMismatchError: the checkpoint and the state differ; nothing was touched. (Of `PerRank` objects: without `merge`
                another number of ranks; tensors are filled by then.)
            RanksFailedError, RankLostError: it failed on some of the ranks for other reasons than damage, or one is lost.
            StorageError: the store refused, for reasons that say nothing about the data.
            NotEnoughMemoryError: nor does this.
            And, if a step was given, what `thinpoint.load_into` raises.
        """
        found = self._restore(
            state,
            step,
            strict=strict,
            cast=cast,
            weights_only=weights_only,
            **self._load_options,
        )
        if found is None:
            log.info("there is no checkpoint in %s", self._store.url)
            return None
        report, manifest = found
        writer = self._writing()
        writer.before = Saved(step=manifest.training_step, trainable=manifest.trainable)
        writer.damaged.update(skipped.step for skipped in report.skipped)
        self._schedule.restored(report.step)
        log.info("training step %d is restored from %s", report.step, report.path)
        writer.tell(self._options.on_event, report)
        return report

    def load(
        self,
        step: int | None = None,
        *,
        map_location: Any = None,
        weights_only: bool = True,
        names: Any = None,
    ) -> Any:
        """The object itself, of the newest intact checkpoint or of one step; None if there is no checkpoint at all.

        Args:
            map_location, weights_only, names: as for `thinpoint.load`.

        Raises: as `restore`, and what `thinpoint.load` raises.
        """
        make = restoring.make(
            map_location=map_location, weights_only=weights_only, names=names, **self._load_options
        )
        read = restoring.read_newest(self._store, make, _step_or_none(step), retries=self._options.retries)
        return None if read is None else read.result

    def steps(self) -> list[int]:
        """The training steps that have a checkpoint, ascending, by their manifests. Blocks on I/O."""
        return [*self._newest_first()][::-1]

    def latest(self) -> int | None:
        """The newest training step that has a checkpoint, by its manifest; None without any. Blocks on I/O."""
        return next(self._newest_first(), None)

    def truncate_after(self, step: int) -> list[int]:
        """Deletes all checkpoints behind a training step, newest first, and returns their steps. Blocks on I/O.

        For rolling back: what is saved from here on belongs to another history.

        Raises:
            CheckpointError: no checkpoint would be left.
            SupersededError: another run has taken the directory over.
        """
        self._check_open()
        return self._writing().truncate_after(_checked_step(step))

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises: what it raises, if nobody has asked for it.
        """
        writer = self._writing()
        writer.wait()
        writer.raise_unasked()

    def close(self) -> None:
        """Waits for what is in flight, and takes the handler of SIGTERM away. Twice is no error.

        Raises: what a save raised that nobody asked about.
        """
        self._is_closed = True
        if self._sigterm is not None:
            self._sigterm.remove()
        writer = self._writing()
        writer.finish()
        writer.raise_unasked()

    def install_sigterm(self, grace_seconds: float) -> None:
        """From now on SIGTERM does not end the process: it sets `should_stop`, and the next `maybe_save` saves.

        A handler that was there before is called as well. Only in the main thread.

        Args:
            grace_seconds: from the signal until the process will be killed; the save may take no longer.

        Raises:
            UsageError: not the main thread, or not a number above 0.
        """
        if self._sigterm is not None:
            self._sigterm.remove()
        self._sigterm = SigtermFlag(grace_seconds)

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM has come: leave the training loop once `maybe_save` has saved.

        With a process group: whether it had come to any rank by the last `maybe_save`, the same on all ranks.
        """
        if self._team is not None:
            return self._is_stopping
        return self._sigterm is not None and self._sigterm.received

    def _save(
        self, state: Any, step: int, metadata: dict[str, Any] | None, overwrite: bool, *, asynchronous: bool
    ) -> CheckpointFuture:
        self._check_open()
        with self._writing().before_a_save("save"):
            step = _checked_step(step)
            metadata = check_metadata({} if metadata is None else metadata)
        self._schedule.began(step)
        return self._writing().save(
            state_of(state) if self._team is None else state,
            step,
            metadata=metadata,
            overwrite=overwrite,
            asynchronous=asynchronous,
            within_s=self._sigterm.remaining_s() if self._sigterm is not None else None,
        )

    def _restore(self, state: Any, step: int | None, **options: Any) -> tuple[RestoreReport, Manifest] | None:
        retries = self._options.retries
        if self._team is None:
            use = restoring.fill(state, **options)
            return restoring.restore_newest(self._store, use, _step_or_none(step), retries=retries)
        from thinpoint.checkpoint.group_restore import restore_group

        with self._team.told("restore"):
            step = _step_or_none(step)
        self._team.ready()
        return restore_group(self._team.calls, self._store, state, step, retries=retries, **options)

    def _agreed_late(self, step: int) -> bool:
        """Whether rank 0 is late with a save; all ranks agree on that and on whether to stop."""
        assert self._team is not None
        agreed = self._team.agree(
            step,
            stop=self._sigterm is not None and self._sigterm.received,
            late=self._schedule.is_late(),
            has_failed=self._writing().has_unasked,
        )
        self._is_stopping = self._is_stopping or agreed.stop
        if agreed.has_failed:
            self._writing().raise_last()
        return agreed.late

    def _new_writer(self) -> Writer:
        if self._team is None:
            return Writer(self._store, self._options, self._save_options)
        from thinpoint.checkpoint.group_writer import GroupWriter

        return GroupWriter(self._store, self._options, self._save_options, self._team)

    def _take_over(self) -> None:
        """Before the first training step: from here on an older run cannot add checkpoints to this one's history."""
        if self._tried_to_claim:
            return
        self._tried_to_claim = True
        try:
            self._writing().claim_within(FIRST_CLAIM_S)
        except StorageError as error:
            log.warning("the directory could not be taken over yet: %s", error)

    def _writing(self) -> Writer:
        """This process's writer: threads, locks and the claim of the one that it was forked from are not its own."""
        if self._writer.pid != os.getpid():
            if self._team is not None:
                raise UsageError("a forked process is no rank of the group", where=self._store.url)
            inherited = self._writer
            self._writer = self._new_writer()
            self._writer.before, self._writer.damaged = inherited.before, set(inherited.damaged)
        return self._writer

    def _newest_first(self) -> Iterator[int]:
        retries = self._options.retries
        for step, folder in retry(lambda: folders(self._store), retries).items():
            if not folder.has_manifest:
                continue
            try:
                retry(lambda folder=folder: committed(self._store, folder), retries)  # type: ignore[misc]
            except (DamagedFileError, NotFoundError, UnsupportedError) as error:
                log.warning("training step %d has no checkpoint that counts: %s", step, error)
            else:
                yield step

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the checkpointer is closed", where=self._store.url)


def _team(process_group: Any, lost_after: float) -> Team:
    from thinpoint.checkpoint.team import Team

    return Team(process_group, lost_after)


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise UsageError("a training step is a whole number", actual=repr(step))
    number = int(step)
    if not 0 <= number <= MAX_STEP:
        raise UsageError("the training step is not valid", expected=f"0 to {MAX_STEP:,}", actual=number)
    return number


def _step_or_none(step: Any) -> int | None:
    return None if step is None else _checked_step(step)
