"""What `Checkpointer.async_save` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from thinpoint.checkpoint.report import CheckpointReport


class CheckpointFuture:
    """A checkpoint that may still be under way. May be shared by threads.

    An error that nobody asks for is raised by the checkpointer's next call.

    Attributes:
        step: training step.
        staging_completion: done, with None, as soon as the state may change again.
        upload_completion: done, with the report, as soon as the checkpoint is durable, or has failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[CheckpointReport] = Future()
        for future in (self.staging_completion, self.upload_completion):
            # From here on nobody can cancel them from outside.
            future.set_running_or_notify_cancel()
        self._was_asked = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"CheckpointFuture(step={self.step}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """Whether the checkpoint is durable, or has failed."""
        return self.upload_completion.done()

    def result(self, timeout: float | None = None) -> CheckpointReport:
        """The report, once the checkpoint is durable; blocks at most `timeout` seconds.

        Raises:
            What `Checkpointer.save` raises.
            concurrent.futures.TimeoutError: it is still under way, and goes on.
        """
        report = self.upload_completion
        if report.exception(timeout) is not None:
            self._was_asked = True
        return report.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but returns what the save raised, or None."""
        error = self.upload_completion.exception(timeout)
        self._was_asked = self._was_asked or error is not None
        return error

    def add_done_callback(self, function: Callable[[CheckpointFuture], Any]) -> None:
        """Call `function` with this object when it is done: on the thread that commits, or now if it is done already."""
        self.upload_completion.add_done_callback(lambda _: function(self))

    @property
    def is_unasked(self) -> bool:
        """For the checkpointer: whether it has failed, and nobody has been given the error."""
        return self.done() and not self._was_asked and self.upload_completion.exception() is not None

    def unasked_error(self) -> BaseException | None:
        """For the checkpointer: the error of a save that is done, unless somebody has been given it. Once."""
        if self._was_asked or not self.done():
            return None
        return self.exception()

    def settle(self, outcome: CheckpointReport | BaseException) -> None:
        """For the checkpointer: it is done; an error reaches staging too if that is not."""
        if not isinstance(outcome, BaseException):
            self.set_staged()
            self.upload_completion.set_result(outcome)
            return
        with self._lock:
            if not self.staging_completion.done():
                self.staging_completion.set_exception(outcome)
        self.upload_completion.set_exception(outcome)

    def set_staged(self) -> None:
        """For the checkpointer: the state may change again."""
        with self._lock:
            if not self.staging_completion.done():
                self.staging_completion.set_result(None)
