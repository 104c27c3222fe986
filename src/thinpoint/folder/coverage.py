"""Whether boxes fill a larger box exactly: none beyond it, no gap, no overlap."""

from __future__ import annotations

from math import prod

import numpy as np

MAX_TANGLED = 4096
"""Boxes that no straight cut separates are compared in pairs: this many are 17 million."""


def check_coverage(shape: tuple[int, ...], offsets: np.ndarray, sizes: np.ndarray) -> str | None:
    """None if the boxes fill the shape exactly, else what is wrong.

    Boxes that straight cuts separate, as all shardings by dimensions are, take O(n log n).

    Args:
        shape: of the whole.
        offsets, sizes: int64 of shape (boxes, dimensions); boxes without elements do not count.
    """
    bounds = np.asarray(shape, np.int64).reshape(1, -1)
    beyond = (offsets < 0) | (sizes < 0) | (offsets > bounds - sizes)
    if beyond.any():
        row = int(np.flatnonzero(beyond.any(axis=1))[0])
        return f"chunk {_box(offsets, sizes, row)} lies outside of the shape {tuple(shape)}"
    full = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[full], sizes[full]
    # In Python's integers: none of it overflows.
    covered = sum(prod(row) for row in sizes.tolist()) if sizes.shape[1] else len(sizes)
    expected = prod(shape)
    if covered < expected:
        return f"its chunks hold {covered:,} of {expected:,} elements"
    if covered > expected:
        return f"its chunks overlap: they hold {covered:,} elements of {expected:,}"
    return _overlap(offsets, sizes)


def _overlap(offsets: np.ndarray, sizes: np.ndarray) -> str | None:
    groups = [np.arange(len(offsets))]
    while groups:
        rows = groups.pop()
        if len(rows) < 2:
            continue
        apart = _separated(offsets[rows], sizes[rows])
        if apart is None:
            reason = _compare_pairs(offsets[rows], sizes[rows])
            if reason is not None:
                return reason
            continue
        groups += [rows[part] for part in apart]
    return None


def _separated(offsets: np.ndarray, sizes: np.ndarray) -> list[np.ndarray] | None:
    """The boxes in groups that straight cuts across one dimension separate, single ones left out; None without a cut."""
    for dim in range(offsets.shape[1]):
        order = np.argsort(offsets[:, dim], kind="stable")
        starts = offsets[order, dim]
        ends = np.maximum.accumulate(starts + sizes[order, dim])
        cuts = np.flatnonzero(starts[1:] >= ends[:-1]) + 1
        if len(cuts):
            borders = np.concatenate(([0], cuts, [len(order)]))
            several = np.flatnonzero(np.diff(borders) > 1)
            return [order[borders[i] : borders[i + 1]] for i in several.tolist()]
    return None


def _compare_pairs(offsets: np.ndarray, sizes: np.ndarray) -> str | None:
    if len(offsets) > MAX_TANGLED:
        return f"{len(offsets):,} of its chunks cannot be told apart by straight cuts; at most {MAX_TANGLED:,} may"
    ends = offsets + sizes
    for row in range(len(offsets) - 1):
        both = np.maximum(offsets[row], offsets[row + 1 :]) < np.minimum(ends[row], ends[row + 1 :])
        found = np.flatnonzero(both.all(axis=1))
        if len(found):
            other = row + 1 + int(found[0])
            return f"its chunks {_box(offsets, sizes, row)} and {_box(offsets, sizes, other)} overlap"
    return None


def _box(offsets: np.ndarray, sizes: np.ndarray, row: int) -> str:
    ranges = zip(offsets[row].tolist(), sizes[row].tolist(), strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in ranges) + "]"
