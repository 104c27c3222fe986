"""Work on a store that may never return: on a thread that can be left behind, until a deadline, again if that may help."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from thinpoint.checkpoint.log import log
from thinpoint.errors import SaveTimeoutError, StorageError

Item = TypeVar("Item")
Result = TypeVar("Result")

FIRST_PAUSE_S = 0.5
"""Before the second attempt; twice as long before each further one."""

MAX_PAUSE_S = 30.0


class Deadline:
    """A point in time, or never.

    Args:
        seconds: from now; None for never.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None for any number."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def error(self, where: object) -> SaveTimeoutError:
        """What to raise when it has passed."""
        return SaveTimeoutError(f"the save took longer than {self.seconds:,.0f} s", where=where)


class Lane:
    """A thread that runs one call after the other while the caller waits, at most until the deadline.

    After the deadline the lane is abandoned: its thread ends when the system lets go of it, and does not keep the
    process from ending. May be shared by threads.

    Args:
        deadline: of all calls together.
        retries: more attempts at a call that fails in a way that may pass.
        where: what it works on, for messages.
    """

    def __init__(self, deadline: Deadline, *, retries: int, where: object) -> None:
        self.deadline = deadline
        self.retries = retries
        self.num_retries = 0
        self._where = where
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned = False
        threading.Thread(target=_work, args=(self._jobs,), name="thinpoint-store", daemon=True).start()

    @property
    def abandoned(self) -> bool:
        """Whether a call has not come back in time."""
        return self._abandoned

    def once(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What the function returns or raises.

        Raises:
            SaveTimeoutError: it has not come back in time. What it does is not known.
        """
        if self._abandoned:
            raise self.deadline.error(self._where)
        future: Future[Result] = Future()
        self._jobs.put((future, lambda: function(*arguments)))
        try:
            return future.result(self.deadline.remaining())
        except FutureTimeoutError:
            # The function's own TimeoutError is of the same class; and it may have come back just now.
            if future.done():
                return future.result()
            future.cancel()
            self._abandoned = True
            raise self.deadline.error(self._where) from None

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """As `once`, with retries. For what may be done twice without harm."""
        return self.again(lambda: self.once(function, *arguments))

    def again(self, attempt: Callable[[], Result]) -> Result:
        """What the attempt returns; repeated, with growing pauses, while it fails in a way that may pass."""
        for pause in pauses(self.retries):
            try:
                return attempt()
            except StorageError as error:
                if not is_transient(error):
                    raise
                remaining = self.deadline.remaining()
                if remaining is not None and remaining <= pause:
                    raise
                log.warning("trying again in %.1f s: %s", pause, error)
                self.num_retries += 1
                time.sleep(pause)
        return attempt()

    def finally_(self, function: Callable[[], Any], *, most_s: float = 5.0) -> None:
        """Clean up: behind what may be stuck on the lane. Waits `most_s` seconds for it; what fails is logged."""

        def quietly() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001
                log.warning("could not clean up: %s", error)

        future: Future[None] = Future()
        self._jobs.put((future, quietly))
        try:
            is_late = self._abandoned or self.deadline.remaining() == 0
            future.result(0 if is_late else most_s)
        except FutureTimeoutError:
            self._abandoned = True

    def close(self) -> None:
        """Lets the thread end when it has done what was asked of it."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
        # What it holds, a save's buffers, must not stay until the next job.
        del job, future, function


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, StorageError) and error.transient and not isinstance(error, SaveTimeoutError)


def pauses(retries: int) -> list[float]:
    """Seconds to wait after each attempt but the last."""
    return [min(FIRST_PAUSE_S * 2**i, MAX_PAUSE_S) for i in range(retries)]


def retry(attempt: Callable[[], Result], retries: int) -> Result:
    """As `Lane.again`, without a deadline."""
    for pause in pauses(retries):
        try:
            return attempt()
        except StorageError as error:
            if not is_transient(error):
                raise
            log.warning("trying again in %.1f s: %s", pause, error)
            time.sleep(pause)
    return attempt()


def daemon_map(num_threads: int) -> Callable[[Callable[[Item], Result], Iterable[Item]], Iterable[Result]]:
    """A `store.contract.Mapper` on threads that do not keep the process from ending when they are stuck."""

    def run(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        work = list(items)
        if num_threads == 1 or len(work) <= 1:
            return [function(item) for item in work]
        jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        futures: list[Future[Result]] = []
        for item in work:
            futures.append(Future())
            jobs.put((futures[-1], lambda item=item: function(item)))  # type: ignore[misc]
        for _ in range(min(num_threads, len(work))):
            jobs.put(None)
            threading.Thread(target=_work, args=(jobs,), name="thinpoint-write", daemon=True).start()
        if any(future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done):
            for future in futures:
                future.cancel()
        # None may be under way when this ends, with an error neither.
        wait(futures)
        failed = (f.exception() for f in futures if not f.cancelled())
        if error := next(filter(None, failed), None):
            raise error
        return [future.result() for future in futures]

    return run
