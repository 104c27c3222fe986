"""When a training run saves."""

from __future__ import annotations

import time


class Schedule:
    """Every so many training steps, every so many minutes, and once when the run is to end.

    Args:
        every_steps: at its multiples, but not at step 0; None for never.
        every_minutes: since the last save began, or since the start; None for never.

    Attributes:
        stopped: the save before the end is done.
    """

    def __init__(self, *, every_steps: int | None, every_minutes: float | None) -> None:
        self.stopped = False
        self._every_steps = every_steps
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._last_step: int | None = None
        self._last_time = time.monotonic()

    def is_late(self) -> bool:
        """Whether so many minutes have passed, by this process's clock."""
        return self._every_s is not None and time.monotonic() - self._last_time >= self._every_s

    def is_due(self, step: int, *, stop: bool, late: bool | None = None) -> bool:
        """Whether a save is due at this training step.

        Args:
            stop: the run is to end.
            late: what `is_late` says on the rank that decides; None asks this process.
        """
        if stop:
            return not self.stopped
        if step == self._last_step:
            return False
        if self._every_steps is not None and step > 0 and step % self._every_steps == 0:
            return True
        return self.is_late() if late is None else late

    def began(self, step: int) -> None:
        """A save of this step begins."""
        self._last_step = step
        self._last_time = time.monotonic()

    def restored(self, step: int) -> None:
        """The state is that of a checkpoint: it need not be saved again, and the minutes count from now."""
        self.began(step)
