"""Prediction of `top`: an integer mean for each group of 256 values and, on top of it, a column profile.

All in integers with stated rounding, so that every backend predicts the same. Values whose top is 0 (zeros, and denormals too
small to show in top) take no part: they have a symbol of their own.
"""

from __future__ import annotations

import numpy as np

GROUP_ELEMS = 256
NO_MEAN = -1
"""Stands for the mean of a group in which every top is 0."""

PROFILE_MAX_ROWS = 512
"""Rows that a column profile is fitted on at most; more do not change an integer mean of a few octaves' spread."""

MIN_PROFILE_ROWS = 16
"""A profile costs a byte a column: with fewer rows it would cost more than half a bit a value."""


def rounded_mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """floor(total / count + 1/2) in integers; count must be positive."""
    return (2 * total + count) // (2 * count)


def group_means(top: np.ndarray, num_groups: int) -> np.ndarray:
    """The mean of each group of 256 tops (int32 array of num_groups), NO_MEAN where every top is 0."""
    padded = np.zeros(num_groups * GROUP_ELEMS, np.int64)
    padded[: top.size] = top
    grouped = padded.reshape(num_groups, GROUP_ELEMS)
    total, count = grouped.sum(1), (grouped != 0).sum(1)
    return np.where(count > 0, rounded_mean(total, np.maximum(count, 1)), NO_MEAN).astype(np.int32)


def profile_rows(num_elems: int, row_elems: int) -> np.ndarray:
    """The rows that a profile is fitted on: at most PROFILE_MAX_ROWS, evenly spaced (int64)."""
    rows = num_elems // row_elems
    fitted = min(rows, PROFILE_MAX_ROWS)
    return np.arange(fitted, dtype=np.int64) * rows // max(fitted, 1)


def profile_from_sums(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The column profile (int32) from sums of top - mean over the non-zero tops of each column, lowest where none."""
    seen = count > 0
    profile = rounded_mean(total, np.maximum(count, 1))
    lowest = profile[seen].min() if seen.any() else 0
    return np.where(seen, profile, lowest).astype(np.int32)
