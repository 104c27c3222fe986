"""What the cells of tables are made of: numbers as people read them."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
NONE = "-"


def size(num_bytes: int) -> str:
    """Bytes in binary units."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):g} {unit}"
    return f"{num_bytes} B"


def rate(row: Row, verb: str, clock: str = "wall") -> float | None:
    """The median GB/s of a row; None if it has none."""
    return row[verb][f"{clock}_gb_per_s"]["median"] if f"{clock}_gb_per_s" in row.get(verb, {}) else None


def number(value: float | None, digits: int) -> str:
    """The number, or a dash."""
    return NONE if value is None else f"{value:,.{digits}f}"


def rate_digits(value: float | None) -> int:
    """Digits after the point that make sense for GB/s."""
    return 0 if value is not None and value >= 100 else 1 if value is not None and value >= 10 else 2


def size_gb(num_bytes: int) -> str:
    """Decimal gigabytes."""
    return f"{num_bytes / 1e9:.2f}"
