"""Byte ranges of many parts in one buffer: waves, aligned places, slices, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

WAVE_BYTES = 64 << 20
"""Raw bytes coded at a time. A wave takes about 10 times as much device memory: a copy of the words, the coded blocks with room
for the worst case, the packed blocks, the proof, the scratch of its decoder (3 to 5 times, Zstandard) and digests."""

ALIGN_BYTES = 16
"""Where nvCOMP wants its buffers."""

_Item = TypeVar("_Item")


def waves(items: Sequence[_Item], sizes: Sequence[int]) -> Iterator[Sequence[_Item]]:
    """The items in order, at most WAVE_BYTES at a time; a larger one is alone."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > WAVE_BYTES:
            yield items[first:i]
            first, total = i, 0
        total += size
    if first < len(items):
        yield items[first:]


def up(sizes: Any, multiple: Any = ALIGN_BYTES) -> Any:
    """Sizes, a number or an array, rounded up to a multiple."""
    return -(-sizes // multiple) * multiple


def aligned_starts(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each of some ranges begins, one behind the other at multiples of ALIGN_BYTES, and where the last one's room ends."""
    ends = np.cumsum(up(sizes))
    return ends - up(sizes), int(ends[-1])


def slices(memory: torch.Tensor, starts: Any, sizes: Any) -> list[torch.Tensor]:
    """Views of byte ranges."""
    return [memory[s : s + n] for s, n in zip(map(int, starts), map(int, sizes), strict=True)]


def clear(memory: torch.Tensor, starts: np.ndarray, ends: np.ndarray) -> None:
    """Set ranges of fewer than ALIGN_BYTES bytes to zero, all at once."""
    places = starts[:, None] + np.arange(ALIGN_BYTES)
    memory[torch.from_numpy(places[places < ends[:, None]]).to(memory.device)] = 0
