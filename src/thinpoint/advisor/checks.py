"""Checks of input that name the field and what it may be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from thinpoint.errors import UsageError


def number(
    field: str, value: Any, *, least: float = 0.0, above: bool = False, most: float = math.inf
) -> float:
    """The value as a float.

    Args:
        field: what messages call it: "storage.gb_per_s".
        least, most: the range. Infinite values and NaN are never allowed.
        above: `least` itself is not allowed.

    Raises:
        UsageError: no number, or not in the range.
    """
    allowed = f"a number {'above' if above else 'of at least'} {least:g}"
    if most != math.inf:
        allowed += f" and at most {most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{field} is not valid", expected=allowed, actual=repr(value))
    if value < least or value > most or (above and value == least):
        raise UsageError(f"{field} is not valid", expected=allowed, actual=f"{value:g}")
    return float(value)


def whole(field: str, value: Any, *, least: int = 1) -> int:
    """The value as an int; a float without a fraction is taken.

    Raises:
        UsageError: no whole number, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < least:
        raise UsageError(
            f"{field} is not valid", expected=f"a whole number of at least {least}", actual=repr(value)
        )
    return int(value)


def choice(field: str, value: Any, allowed: Iterable[str]) -> str:
    """The value, if it is one of those allowed.

    Raises:
        UsageError: it is not; the message lists them, and says which may be meant.
    """
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        raise UsageError(
            f"{field} is not valid", expected=" or ".join(names), actual=repr(value), hint=meant(value, names)
        )
    return value


def meant(value: Any, names: Iterable[str]) -> str | None:
    """A hint with the name that comes closest, or None."""
    close = difflib.get_close_matches(str(value), list(names), n=1, cutoff=0.6)
    return f"Do you mean {close[0]!r}?" if close else None
