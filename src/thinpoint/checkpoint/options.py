"""The options of a `Checkpointer`: frozen, and checked when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from thinpoint.checkpoint.leftovers import ORPHAN_AGE_S
from thinpoint.errors import UsageError

DEFAULT_TIMEOUT_S = 3600.0
"""A save that takes longer is taken for stuck: by then a run has lost more than a checkpoint is worth."""


DEFAULT_LOST_AFTER_S = 60.0
"""A rank that has not beaten for so long is taken for lost. It beats every 5 s, in the middle of any other work."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `Checkpointer`.

    Raises:
        UsageError: an option is not valid.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    on_error: Literal["raise", "warn"] = "raise"
    max_failures: int = 3
    timeout: float | None = DEFAULT_TIMEOUT_S
    retries: int = 3
    while_saving: Literal["wait", "skip", "fail"] = "wait"
    stale: Literal["warn", "fail", "ignore"] = "warn"
    mode: Literal["async", "overlap"] = "async"
    orphan_age: float = ORPHAN_AGE_S
    lost_after: float = DEFAULT_LOST_AFTER_S
    delete_pause: float = 0.1
    on_event: Callable[[Any], Any] | None = None
    on_committed: Callable[[int, str], Any] | None = None

    def __post_init__(self) -> None:
        for names, low, kind in (
            (("every_steps", "keep_last", "keep_every", "max_failures"), 1, int),
            (("retries",), 0, int),
            (("orphan_age", "delete_pause"), 0, float),
        ):
            for name in names:
                self._check_number(name, low, kind)
        for name in ("every_minutes", "timeout", "lost_after"):
            self._check_number(name, 0, float)
            if getattr(self, name) == 0:
                raise _invalid(name, "more than 0", 0)
        for name, choices in (
            ("on_error", ("raise", "warn")),
            ("while_saving", ("wait", "skip", "fail")),
            ("stale", ("warn", "fail", "ignore")),
            ("mode", ("async", "overlap")),
        ):
            if getattr(self, name) not in choices:
                raise _invalid(name, " or ".join(map(repr, choices)), repr(getattr(self, name)))
        for name in ("on_event", "on_committed"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise _invalid(name, "a function", repr(getattr(self, name)))

    def _check_number(self, name: str, low: int, kind: type) -> None:
        value = getattr(self, name)
        if value is None and next(f for f in fields(self) if f.name == name).default is None:
            return
        if name == "timeout" and value is None:
            return
        kinds = (int,) if kind is int else (int, float)
        if type(value) not in kinds or not low <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise _invalid(name, f"{what} of at least {low}", repr(value))


def _invalid(name: str, expected: object, actual: object) -> UsageError:
    return UsageError(f"{name} is not valid", expected=expected, actual=actual)
