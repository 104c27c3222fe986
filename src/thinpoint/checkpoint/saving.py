"""One save from the state to the committed checkpoint, on the caller's thread or beside it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from thinpoint import api
from thinpoint.checkpoint.commit import SaveJob
from thinpoint.checkpoint.guard import DataFile
from thinpoint.engine.future import SaveFuture
from thinpoint.folder.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a save.

    Attributes:
        manifest: of the checkpoint; None if it failed.
        saved: the report of the data file; None if it did not get that far.
        error: why it failed; None if it did not.
        commit_s: seconds that the commit took, from the complete data file on.
        replaced: files of the checkpoint that was replaced, as names in the store.
    """

    manifest: Manifest | None = None
    saved: api.SaveReport | None = None
    error: BaseException | None = None
    commit_s: float = 0.0
    replaced: tuple[str, ...] = ()


def save_now(job: SaveJob, state: Any, options: dict[str, Any]) -> Outcome:
    """Saves; blocks until the checkpoint is durable, or the lane's deadline has passed.

    Args:
        options: of `thinpoint.save`.
    """
    saved: api.SaveReport | None = None
    try:
        job.refuse_existing()
        data, saved = job.write(lambda data: api.save(state, data, **options))
        return _committed(job, data, saved)
    except Exception as error:  # noqa: BLE001
        return Outcome(saved=saved, error=error)


def save_beside(
    job: SaveJob,
    state: Any,
    options: dict[str, Any],
    done: Callable[[Outcome], None],
    staged: Callable[[], None],
) -> None:
    """Returns when `thinpoint.async_save` does; the rest is done on a thread that the process waits for when it ends.

    Args:
        options: of `thinpoint.async_save`.
        staged: called when the state may change again; not if the save fails before.
        done: called once, on that thread, or on this one if the save fails before or THINPOINT_DISABLE_ASYNC is set.
    """
    try:
        job.refuse_existing()
        data = job.open()
        try:
            future = api.async_save(state, data, **options)
        except BaseException as error:
            data.discard(error)
            raise
    except Exception as error:  # noqa: BLE001
        done(Outcome(error=error))
        return

    def tell_staged(staging: Future[None]) -> None:
        if staging.exception() is None:
            staged()

    future.staging_completion.add_done_callback(tell_staged)

    def finish() -> None:
        saved: api.SaveReport | None = None
        try:
            saved = _await(job, data, future)
            outcome = _committed(job, data, saved)
        except BaseException as error:  # noqa: BLE001
            outcome = Outcome(saved=saved, error=error)
        done(outcome)

    # What failed before it was staged is known now, and is to reach staging as well.
    failed = future.done() and future.exception() is not None
    if failed or os.environ.get("THINPOINT_DISABLE_ASYNC") == "1":
        finish()
    else:
        threading.Thread(target=finish, name="thinpoint-commit", daemon=False).start()


def _await(job: SaveJob, data: DataFile, future: SaveFuture) -> api.SaveReport:
    try:
        saved = future.result(job.lane.deadline.remaining())
        data.finish()
        return saved
    except Exception as error:
        reason: Exception = data.error or error
        # The save's own errors may be of the same class.
        if isinstance(error, FutureTimeoutError) and not future.done():
            reason = job.lane.deadline.error(data.name)
            future.cancel()
        data.discard(reason)
        if reason is error:
            raise
        raise reason from error


def _committed(job: SaveJob, data: DataFile, saved: api.SaveReport) -> Outcome:
    begin = time.perf_counter()
    manifest = job.commit(data, saved)
    return Outcome(
        manifest=manifest,
        saved=saved,
        commit_s=time.perf_counter() - begin,
        replaced=tuple(job.replaced),
    )
