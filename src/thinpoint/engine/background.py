"""Saves that go on in the background: one after the other, and finished or reported when the process ends."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from thinpoint.collector import collector_paused
from thinpoint.engine.future import SaveFuture
from thinpoint.engine.report import SaveReport
from thinpoint.engine.save import Saving
from thinpoint.engine.task import SaveTask
from thinpoint.engine.workers import Workers
from thinpoint.errors import SaveCancelledError, StorageError

log = logging.getLogger("thinpoint")

EXIT_WAIT_S = 600.0
"""How long the end of the process waits for a save that does not get on, unless THINPOINT_EXIT_WAIT says otherwise."""

STOPPED_WAIT_S = 5.0
"""And for one that has failed or was cancelled, to remove what it began."""


class _Turns:
    """One save at a time; a save that hangs gives its turn back when it is cancelled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object = None

    def take(self, holder: object) -> None:
        """Wait until nobody has it."""
        with self._changed:
            while self._holder is not None:
                self._changed.wait()
            self._holder = holder

    def give(self, holder: object) -> None:
        """Give it back if one has it."""
        with self._changed:
            if self._holder is holder:
                self._holder = None
                self._changed.notify_all()


_turns = _Turns()
_under_way: list[BackgroundSave] = []


class BackgroundSave:
    """One save, from the call to the end of the thread that writes.

    Args:
        task: how to save.
        saving: what. Its turn has been taken in the name of `task`.
        fallback: why it is no `OverlapSave`, if one was asked for.
    """

    mode = "async"

    def __init__(self, task: SaveTask, saving: Saving, fallback: str | None = None) -> None:
        self.future = SaveFuture(self._stop)
        self.path = task.path
        self._task = task
        self._saving = saving
        self._fallback = fallback
        self._stall_s = 0.0
        self._thread = threading.Thread(target=self._write, name="thinpoint-save", daemon=True)

    @property
    def is_stopped(self) -> bool:
        """Whether it has failed or was cancelled."""
        return self._saving.is_stopped

    def start(self) -> None:
        """Begin to write what will be encoded."""
        _under_way.append(self)
        try:
            self._thread.start()
        except BaseException as error:
            # An interrupt may come when it runs already.
            self._saving.stop(error)
            self._forget()
            raise

    def encode(self) -> None:
        """On the caller's thread; returns when the state may change. Errors go to the future, interrupts also further up."""
        try:
            with Workers(self._task.num_threads) as workers:
                self._saving.encode(workers)
            if self._saving.has_waited:
                _log_waves(self._task.host_memory_bytes)
            self._stall_s = self._stalled_s()
            self.future.set_staged()
        except BaseException as error:
            self._saving.stop(error)
            self.future.set_outcome(error)
            if not isinstance(error, Exception):
                self._thread.join()
                raise

    def _stalled_s(self) -> float:
        """How long the caller was held up, now that the state may change."""
        return time.perf_counter() - self._task.begin

    def finish(self, wait_s: float) -> bool:
        """Wait for its end, callbacks included, as long as it gets on at least every `wait_s` seconds; whether it came."""
        begin = time.monotonic()
        while self._thread.is_alive():
            if self._saving.is_stopped:
                give_up_at = begin + min(wait_s, STOPPED_WAIT_S)
            else:
                give_up_at = self._saving.active_at + wait_s
            if time.monotonic() >= give_up_at:
                return False
            self._thread.join(min(give_up_at - time.monotonic(), 1.0))
        return True

    def _write(self) -> None:
        outcome: SaveReport | BaseException
        try:
            written = self._saving.write(self._task.target, self._task.num_threads)
            wait([self.future.staging_completion])
            outcome = self._task.report(
                self._saving, written, stall_s=self._stall_s, mode=self.mode, fallback=self._fallback
            )
        except BaseException as error:  # noqa: BLE001
            outcome = error
            _log_failure(self.path, error)
        # Before the callbacks, which may begin the next save.
        _turns.give(self._task)
        self.future.set_outcome(outcome)
        self._forget()

    def _forget(self) -> None:
        with suppress(ValueError):
            _under_way.remove(self)

    def _stop(self, error: BaseException) -> None:
        self._saving.stop(error)
        _turns.give(self._task)


def save_in_background(
    task: SaveTask, obj: Any, make: Callable[[SaveTask, Any], BackgroundSave] | None = None
) -> SaveFuture:
    """Encode an object now, on this thread, and write it on another; returns when the object may change.

    Waits first for the end of the save before. Errors are in the future; what interrupts this thread is raised.

    Args:
        make: makes another kind of `BackgroundSave`, whose `encode` may return before.
    """
    _turns.take(task)
    with collector_paused():
        try:
            if make is None:
                save = BackgroundSave(task, task.saving(obj, may_fill_budget=True))
            else:
                save = make(task, obj)
            save.start()
        except Exception as error:  # noqa: BLE001
            _turns.give(task)
            return _failed(task.path, error)
        except BaseException:
            _turns.give(task)
            raise
        save.encode()
    return save.future


def save_at_once(task: SaveTask, obj: Any, fallback: str | None = None) -> SaveFuture:
    """As `save_in_background`, with everything done on return. fallback: see `SaveReport`."""
    try:
        report = replace(task.run(obj), fallback=fallback)
    except Exception as error:  # noqa: BLE001
        return _failed(task.path, error)
    future = SaveFuture()
    future.set_staged()
    future.set_outcome(report)
    return future


def _failed(path: str, error: Exception) -> SaveFuture:
    _log_failure(path, error)
    future = SaveFuture()
    future.set_outcome(error)
    return future


def _log_failure(path: str, error: BaseException) -> None:
    """In the log as well: nobody may ever look at the future."""
    if not isinstance(error, SaveCancelledError):
        log.error("an asynchronous save failed: %s: %s", path, error)


@cache
def _log_waves(host_memory_bytes: int) -> None:
    log.warning(
        "the compressed state is larger than the %d bytes of host memory that a save may take: async_save waits for "
        "storage (host_memory= or THINPOINT_HOST_MEMORY set the limit)",
        host_memory_bytes,
    )


def exit_wait_s() -> float:
    """THINPOINT_EXIT_WAIT, else EXIT_WAIT_S. What is no number of seconds counts as unset: at exit nobody hears of it."""
    text = os.environ.get("THINPOINT_EXIT_WAIT", "")
    return float(text) if text.isdecimal() else EXIT_WAIT_S


def _at_exit() -> None:
    """Finish what is under way; what cannot be finished is told to whoever watches, as no caller is left."""
    for save in list(_under_way):
        if save.finish(exit_wait_s()):
            error = save.future.exception()
            if error is None or isinstance(error, SaveCancelledError):
                continue
        elif save.is_stopped:
            continue
        else:
            error = StorageError("the store did not answer; the save was given up as the process ended")
            _log_failure(save.path, error)
        if log.hasHandlers():
            # Without one the log itself has gone to stderr.
            print(f"thinpoint: an asynchronous save failed: {save.path}: {error}", file=sys.stderr)


def _after_fork() -> None:
    """A forked process has none of the threads, and locks perhaps as one of them held them."""
    global _turns, _under_way
    _turns, _under_way = _Turns(), []


os.register_at_fork(after_in_child=_after_fork)
# Stores may use the threads of `concurrent.futures`, which end before `atexit` calls anybody: this call comes before they do,
# as those registered last come first.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
