"""One save of many ranks, from the state to the manifest that rank 0 puts in place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from thinpoint.checkpoint.commit import SaveJob
from thinpoint.checkpoint.lane import Lane
from thinpoint.checkpoint.line import Line
from thinpoint.checkpoint.names import new_id, step_folder, tag_of
from thinpoint.checkpoint.runs import Run
from thinpoint.checkpoint.saving import Outcome
from thinpoint.checkpoint.stateful import state_of
from thinpoint.checkpoint.together import write_together
from thinpoint.dcp.commit import Origin
from thinpoint.dcp.record import RankRecord
from thinpoint.dcp.staging import ThinStager
from thinpoint.dcp.writer import ThinWriter
from thinpoint.engine.report import SaveReport
from thinpoint.errors import UsageError
from thinpoint.folder.manifest import Manifest
from thinpoint.folder.names import DCP_METADATA, MANIFEST, layout_name, save_id_of
from thinpoint.store.below import Below
from thinpoint.store.contract import Store


@dataclass(kw_only=True)
class GroupJob:
    """One save of one step, on one rank.

    Attributes:
        line: the ranks.
        store, lane: the directory, and what runs its calls.
        run: in whose name.
        step: training step.
        metadata: see `Manifest`.
        commit: on rank 0 what claims, checks and replaces; its manifest is the commit.
    """

    line: Line
    store: Store
    lane: Lane
    run: Run
    step: int
    metadata: dict[str, Any]
    commit: SaveJob | None


def save_group_now(job: GroupJob, state: Any, options: dict[str, Any]) -> Outcome:
    """Saves; blocks until the checkpoint is durable, has failed on some rank, or the lane's deadline has passed.

    Args:
        state: as the user gave it.
        options: of `thinpoint.save`.
    """
    return _Save(job, options).run(lambda: plain_state(state), can_repeat=True)


def save_group_beside(
    job: GroupJob,
    state: Any,
    options: dict[str, Any],
    done: Callable[[Outcome], None],
    fallback: str | None = None,
) -> None:
    """Returns when the state may change again; the rest is done on a thread that the process waits for when it ends.

    Args:
        state, options: as for `save_group_now`.
        done: called once, on that thread, or on this one if THINPOINT_DISABLE_ASYNC is set.
        fallback: see `SaveReport`.
    """
    begin = time.perf_counter()
    try:
        stager = ThinStager(
            codec=options["codec"],
            backend=options["backend"],
            prove=options["prove"],
            num_threads=options["num_threads"],
            host_memory=options["host_memory"],
        )
        staged = [stager.stage(plain_state(state))]
        failed = []
    except Exception as error:  # noqa: BLE001
        staged, failed = [], [error]
    stage_s = time.perf_counter() - begin

    def give() -> dict[str, Any]:
        if failed:
            raise failed.pop()
        # Given away: what is written is let go of.
        return staged.pop()

    def finish() -> None:
        outcome = _Save(job, options, stage_s=stage_s, mode="async", fallback=fallback).run(
            give, can_repeat=False
        )
        done(outcome)

    if os.environ.get("THINPOINT_DISABLE_ASYNC") == "1":
        finish()
    else:
        threading.Thread(target=on_this_device(finish), name="thinpoint-commit", daemon=False).start()


def plain_state(state: Any) -> dict[str, Any]:
    """The state as DCP's planners take it.

    Raises:
        UsageError: it is no dict, or holds an optimizer, whose own state dict names no parameters.
    """
    _refuse_optimizers(state, "the state")
    plain = state_of(state)
    if not isinstance(plain, dict):
        raise UsageError("the state of many ranks must be a dict with names", actual=type(state).__name__)
    return plain


def on_this_device(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, to be called on another thread with this one's current GPU."""
    if not torch.cuda.is_initialized():
        return function
    device = torch.cuda.current_device()

    def call() -> Any:
        torch.cuda.set_device(device)
        return function()

    return call


class _Save:
    def __init__(
        self,
        job: GroupJob,
        options: dict[str, Any],
        stage_s: float = 0.0,
        mode: str = "sync",
        fallback: str | None = None,
    ) -> None:
        self._job = job
        self._mode, self._fallback = mode, fallback
        self._options = options
        self._begin = time.perf_counter()
        self._seconds = {"stage": stage_s} if stage_s else {}
        self._own: RankRecord | None = None

    def run(self, give_state: Callable[[], dict[str, Any]], *, can_repeat: bool) -> Outcome:
        job = self._job
        folder = Below(job.store, step_folder(job.step))
        writer = _StepWriter(job, folder, self._options)

        def write(attempt: Callable[[], list[WriteResult]]) -> list[WriteResult]:
            begin = time.perf_counter()

            def own_file() -> list[WriteResult]:
                writer.rename_file()
                return attempt()

            call = on_this_device(own_file)
            results: list[WriteResult] = job.lane.call(call) if can_repeat else job.lane.once(call)
            self._seconds["write"] = time.perf_counter() - begin
            self._own = next(r.storage_data for r in results if isinstance(r.storage_data, RankRecord))
            return results

        try:
            metadata, results = write_together(job.line, give_state, writer, write, job.lane.deadline)
        except Exception as error:  # noqa: BLE001
            if not job.line.is_broken:
                # All know that no manifest was made: what this rank has written is in the way.
                if (own := self._own) is not None:
                    job.lane.finally_(lambda: folder.delete(own.file.name))
            return Outcome(error=error, saved=self._report())
        begin = time.perf_counter()

        def commit() -> tuple[Manifest, tuple[str, ...]]:
            assert metadata is not None and job.commit is not None
            # The job's own lane is for the calls in the middle of it.
            lane = Lane(job.lane.deadline, retries=0, where=folder.url)
            try:
                lane.once(writer.finish, metadata, results)
                assert writer.manifest is not None
            except Exception:
                if not job.commit.may_be_named:
                    job.lane.finally_(lambda: _delete_all(folder, results))
                raise
            finally:
                lane.close()
            return writer.manifest, tuple(job.commit.replaced)

        try:
            manifest, replaced = job.line.lead("commit", commit, job.lane.deadline)
        except Exception as error:  # noqa: BLE001
            return Outcome(error=error, saved=self._report())
        return Outcome(
            manifest=manifest,
            saved=self._report(),
            commit_s=time.perf_counter() - begin,
            replaced=replaced,
        )

    def _report(self) -> SaveReport | None:
        """What this rank has written."""
        if self._own is None:
            return None
        file, roles = self._own.file, self._own.roles
        return SaveReport(
            path=f"{self._job.store.url}/{step_folder(self._job.step)}/{file.name}",
            file_id=file.file_id,
            file_bytes=file.num_bytes,
            raw_bytes=sum(raw for raw, _ in roles.values()),
            seconds=time.perf_counter() - self._begin,
            backend=self._options["backend"],
            codec=self._options["codec"],
            roles=roles,
            stages=dict(self._seconds),
            mode=self._mode,
            fallback=self._fallback,
        )


class _StepWriter(ThinWriter):
    """Writes into a training step's folder; the manifest goes the way of every checkpoint in the directory.

    Attributes:
        manifest: once it is in place.
    """

    def __init__(self, job: GroupJob, folder: Below, options: dict[str, Any]) -> None:
        super().__init__(
            folder,
            overwrite=True,
            thread_count=options["num_threads"],
            codec=options["codec"],
            backend=options["backend"],
            prove=options["prove"],
            allow_pickle=options["allow_pickle"],
            host_memory=options["host_memory"],
            origin=Origin(
                step=job.step,
                run_id=job.run.run_id,
                generation=job.run.generation,
                metadata=job.metadata,
            ),
        )
        self.manifest: Manifest | None = None
        self._job = job

    def rename_file(self) -> None:
        """Before an attempt to write: one that has failed may have left a file of the name before."""
        self._save_id = new_id(tag_of(self._job.run.run_id))

    def put_manifest(self, manifest: Manifest, raw: bytes) -> None:
        """The commit, as every checkpoint in the directory is committed."""
        assert self._job.commit is not None
        self._job.commit.place(manifest, raw)
        self.manifest = manifest


def _delete_all(folder: Below, results: list[list[WriteResult]]) -> None:
    """What all ranks have written, and rank 0 for them, of a checkpoint that is none."""
    records = [r.storage_data for of in results for r in of if isinstance(r.storage_data, RankRecord)]
    names = [record.file.name for record in records]
    names += [layout_name(save_id) for name in names if (save_id := save_id_of(name))]
    if not folder.files(MANIFEST):
        names.append(DCP_METADATA)
    for name in names:
        folder.delete(name)


def _refuse_optimizers(value: Any, where: str) -> None:
    if isinstance(value, torch.optim.Optimizer):
        raise UsageError(
            f"{where} is an optimizer, whose state dict names parameters by numbers",
            hint="Give what torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns",
        )
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_optimizers(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _refuse_optimizers(item, f"{where}[{i}]")
