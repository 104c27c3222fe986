"""Several measurements of one thing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Spread = dict[str, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of at least one value, as they stand in the JSON."""
    return {"median": median(values), "least": min(values), "greatest": max(values)}
