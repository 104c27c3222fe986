"""The half of a `Checkpointer` that writes, on every rank of a group: rank 0 claims, commits and deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thinpoint.checkpoint.commit import SaveJob
from thinpoint.checkpoint.future import CheckpointFuture
from thinpoint.checkpoint.group_saving import GroupJob, save_group_beside, save_group_now
from thinpoint.checkpoint.lane import Deadline, Lane
from thinpoint.checkpoint.names import run_name
from thinpoint.checkpoint.options import Options
from thinpoint.checkpoint.runs import MAX_RUN_BYTES, Run, dump_run
from thinpoint.checkpoint.saving import Outcome
from thinpoint.checkpoint.team import Team
from thinpoint.checkpoint.writer import Writer
from thinpoint.dcp.record import check_same_way, versions
from thinpoint.engine.backends import codec_named
from thinpoint.engine.overlap import log_fallback
from thinpoint.errors import CheckpointError, NotFoundError
from thinpoint.store.contract import Store

SHARED_S = 10.0
"""How long a file that one machine has written may take to be seen by the others."""


class GroupWriter(Writer):
    """As `Writer`, but `save`, `claim_within` and `truncate_after` are collective: every rank calls them, in the same order.

    Args:
        store, options, save_options: as for `Writer`.
        team: the ranks.
    """

    def __init__(self, store: Store, options: Options, save_options: dict[str, Any], team: Team) -> None:
        super().__init__(store, options, save_options)
        self._team = team
        self._run: Run | None = None
        self._begun: BaseException | None = None

    @property
    def run_id(self) -> str:
        """Of rank 0's claim; empty before it."""
        return self._run.run_id if self._run is not None else ""

    def claim_within(self, most_s: float) -> None:
        """See `Writer`. Also finds out whether all ranks see the same directory."""
        with self._lock:
            self._team.calls_ready()
            self._on_lane(self._claimed, most_s)

    def truncate_after(self, step: int) -> list[int]:
        """See `Checkpointer.truncate_after`."""
        with self._lock:
            self._team.ready()
            self.wait()
            gone: list[int] = self._team.calls.lead(
                "truncate", lambda: super(GroupWriter, self).truncate_after(step)
            )
            if self.before is not None and self.before.step > step:
                self.before = None
            self.damaged.difference_update(gone)
            return gone

    @contextmanager
    def before_a_save(self, what: str) -> Iterator[None]:
        """What fails in here, on this rank alone, fails the save on all; `raise_last` then raises it on all."""
        try:
            with self._team.told(what):
                yield
        except Exception as error:
            self.wait()
            # It is the caller's already, and belongs to no step.
            self._flight = CheckpointFuture(-1)
            self._flight.settle(error)
            self._flight.exception()
            raise

    def finish(self) -> None:
        """See `Writer`."""
        super().finish()
        self._team.close()

    def _make_room(self, step: int, within_s: float | None) -> bool:
        """Whether a save may begin: what rank 0 finds, after all have told how they would save."""
        self._begun = None
        flight = self._flight
        told = {
            "way": self._way(step),
            "is_busy": flight is not None and not flight.done(),
            "is_unasked": self.has_unasked,
            "is_urgent": within_s is not None,
        }
        deadline = Deadline(self._options.timeout if within_s is None else within_s)
        try:
            self._team.ready(deadline)
            all_told = self._team.calls.exchange("begin a save", told, deadline)
        except (CheckpointError, OSError) as error:
            # Told as what every failure of a save is, after the save under way, which has the other line.
            self._begun = error
            self.wait(within_s)
            return True
        check_same_way({rank: told["way"] for rank, told in enumerate(all_told)})
        policy = "wait" if any(told["is_urgent"] for told in all_told) else self._options.while_saving
        if all_told[0]["is_busy"] and policy == "skip":
            return False
        if all_told[0]["is_busy"] and policy == "fail":
            raise self._still_running(step)
        if not self.wait(within_s):
            raise Deadline(within_s).error(self._store.url)
        if any(told["is_unasked"] for told in all_told):
            # The same on all ranks, also where somebody has asked for it already.
            self.raise_last()
        self.raise_unasked()
        return True

    def _job(self, lane: Lane, step: int, metadata: dict[str, Any], overwrite: bool) -> Any:
        if self._begun is not None:
            raise self._begun
        run = self._claimed(lane)
        commit: list[SaveJob] = []

        def prepare() -> None:
            job = super(GroupWriter, self)._job(lane, step, metadata, overwrite)
            job.refuse_existing()
            commit.append(job)

        self._team.calls.lead("prepare a save", prepare, lane.deadline)
        return GroupJob(
            line=self._team.saves,
            store=self._store,
            lane=lane,
            run=run,
            step=step,
            metadata=metadata,
            commit=commit[0] if commit else None,
        )

    def _save_now(self, job: Any, state: Any) -> Outcome:
        return save_group_now(job, state, self._save_options)

    def _save_beside(
        self, job: Any, state: Any, done: Callable[[Outcome], None], staged: Callable[[], None]
    ) -> None:
        fallback = None
        if self._options.mode == "overlap":
            fallback = "the ranks of a group encode before they save together"
            log_fallback(fallback)
        save_group_beside(job, state, self._save_options, done, fallback)
        staged()

    def _claimed(self, lane: Lane) -> Run:
        """The run of rank 0's claim, which every rank has seen in the directory."""
        if self._run is None:
            line = self._team.calls
            run = line.lead("claim the directory", lambda: self.claim(lane).run, lane.deadline)
            seen = line.each("look at the directory", lambda: self._sees(lane, run), lane.deadline)
            blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
            if blind:
                raise not_shared(self._store, blind)
            self._run = run
        return self._run

    def _sees(self, lane: Lane, run: Run) -> bool:
        """Whether rank 0's claim, which no other file can be taken for, is in this rank's directory."""
        end = time.monotonic() + SHARED_S
        while True:
            try:
                return lane.call(self._store.get, run_name(run.run_id), MAX_RUN_BYTES) == dump_run(run)
            except NotFoundError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.5)

    def _way(self, step: int) -> dict[str, str]:
        """What must be the same on all ranks."""
        options = self._options
        return {
            "training step": str(step),
            **versions(),
            "codec": codec_named(self._save_options["codec"]),
            "allow_pickle": str(self._save_options["allow_pickle"]),
            **{
                name: str(getattr(options, name))
                for name in ("while_saving", "on_error", "max_failures", "stale", "keep_last", "keep_every")
            },
        }


def not_shared(store: Store, blind: list[str]) -> CheckpointError:
    """The error for ranks that do not see what rank 0 sees."""
    return CheckpointError(
        f"the directory is not shared: rank {', '.join(blind[:8])}{', ...' if len(blind) > 8 else ''} "
        "does not see what rank 0 has there",
        where=store.url,
        hint="Give all ranks the same folder of a shared file system, or a URL; a folder on each machine's own disk will not do",
    )
