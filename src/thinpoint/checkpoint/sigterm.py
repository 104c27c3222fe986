"""A signal that asks a training run to end: noted, passed on, acted on at the next training step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from thinpoint.errors import UsageError


class SigtermFlag:
    """Notes SIGTERM. The handler that was there before is called too, and put back in the end.

    Args:
        grace_s: seconds from the signal until the process will be killed.

    Raises:
        UsageError: not in the main thread, the only one that may handle signals; the time is not valid.
    """

    def __init__(self, grace_s: float) -> None:
        if type(grace_s) not in (int, float) or not 0 < grace_s < float("inf"):
            raise UsageError("grace_seconds is not valid", expected="more than 0", actual=repr(grace_s))
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("only the main thread can handle signals")
        self._grace_s = grace_s
        self._received_at: float | None = None
        # One object, or the comparison in `remove` would never be true.
        self._handler = self._handle
        self._previous: Any = signal.signal(signal.SIGTERM, self._handler)

    @property
    def received(self) -> bool:
        """Whether the signal has come."""
        return self._received_at is not None

    def remaining_s(self) -> float | None:
        """Seconds of grace left, at least 0; None before the signal."""
        if self._received_at is None:
            return None
        return max(0.0, self._received_at + self._grace_s - time.monotonic())

    def remove(self) -> None:
        """Puts the previous handler back, unless somebody has replaced this one since. Twice is no error.

        Raises:
            UsageError: not in the main thread.
        """
        if signal.getsignal(signal.SIGTERM) is self._handler:
            if threading.current_thread() is not threading.main_thread():
                raise UsageError("only the main thread can give signals back")
            # None stands for a handler that was not set from Python and cannot be put back from here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No lock, no log, no I/O: it may run in the middle of anything, in one of these too.
        if self._received_at is None:
            self._received_at = time.monotonic()
        if callable(self._previous):
            self._previous(number, frame)
