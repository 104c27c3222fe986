"""What `async_save` returns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from thinpoint.engine.report import SaveReport
from thinpoint.errors import SaveCancelledError, UsageError


class SaveFuture:
    """A save that may still be under way. May be shared between threads; not with a process that was forked meanwhile.

    Args:
        stop: ends the save with an error, without waiting.

    Attributes:
        staging_completion: done, with None, as soon as the state may change again.
        upload_completion: done, with the report, as soon as the file is durable.
    """

    def __init__(self, stop: Callable[[BaseException], None] = lambda error: None) -> None:
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[SaveReport] = Future()
        for future in (self.staging_completion, self.upload_completion):
            # From here on their own `cancel` returns False: the save would not hear of it.
            future.set_running_or_notify_cancel()
        self._stop = stop
        self._is_settled = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether the file is durable, or the save has failed."""
        self._check_process()
        return self.upload_completion.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report, once the file is durable; blocks at most `timeout` seconds.

        Raises:
            What `save` raises, and SaveCancelledError.
            concurrent.futures.TimeoutError: it is still under way, and goes on.
            UsageError: this process was forked from the one that saves.
        """
        self._check_process()
        return self.upload_completion.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but returns what the save raised, or None."""
        self._check_process()
        return self.upload_completion.exception(timeout)

    def add_done_callback(self, function: Callable[[SaveFuture], Any]) -> None:
        """Call `function` with this object when the save is done: on the thread that wrote, or now if it is done already.

        The process does not end before it returns. The next save may begin before.
        """
        self._check_process()
        self.upload_completion.add_done_callback(lambda _: function(self))

    def cancel(self) -> bool:
        """Give the save up; False if it is done already. Does not wait, not even for a store that never answers.

        What was there before stays as it was, unless the new file was just being put in place.
        """
        self._check_process()
        error = SaveCancelledError("the save was cancelled")
        if not self.set_outcome(error):
            return False
        self._stop(error)
        return True

    def set_staged(self) -> None:
        """For whoever saves: the state may change again."""
        with self._lock:
            if not self.staging_completion.done():
                self.staging_completion.set_result(None)

    def set_outcome(self, outcome: SaveReport | BaseException) -> bool:
        """For whoever saves: it is done; an error reaches staging too if that is not. False if it was done before."""
        with self._lock:
            if self._is_settled:
                return False
            self._is_settled = True
            if isinstance(outcome, BaseException) and not self.staging_completion.done():
                self.staging_completion.set_exception(outcome)
        if isinstance(outcome, BaseException):
            self.upload_completion.set_exception(outcome)
        else:
            self.upload_completion.set_result(outcome)
        return True

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("the save belongs to the process that this one was forked from")
