"""Digests of byte ranges of a tensor in torch's own integer arithmetic, on any device."""

from __future__ import annotations

import numpy as np
import torch

from thinpoint.digest import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

_CHUNK_WORDS = 1 << 22
"""Words taken at a time: the arithmetic needs about six times their memory."""


def digest_ranges(
    data: torch.Tensor, starts: np.ndarray, sizes: np.ndarray, first_words: np.ndarray
) -> np.ndarray:
    """Partial digests of ranges; waits for the device.

    Args:
        data: flat uint8, contiguous, its length and address multiples of 8.
        starts, sizes: int64 arrays of equal length: byte ranges, multiples of 8, sorted and without overlap.
        first_words: int64 array: index in its sequence of the first 8-byte word of each range.

    Returns:
        uint64 array, host memory.
    """
    words = data.view(torch.int64)
    starts, counts = np.asarray(starts) // 8, np.asarray(sizes) // 8
    ends = torch.from_numpy(starts + counts).to(data.device)
    begins = torch.from_numpy(starts).to(data.device)
    # A word at p of a range that starts at s and is numbered from f has index p + f - s.
    shifts = torch.from_numpy(np.asarray(first_words) - starts + 1).to(data.device)
    total = torch.zeros(starts.size, dtype=torch.int64, device=data.device)
    for low in range(0, words.numel(), _CHUNK_WORDS):
        piece = words[low : low + _CHUNK_WORDS]
        place = torch.arange(low, low + piece.numel(), dtype=torch.int64, device=data.device)
        owner = torch.searchsorted(begins, place, right=True).sub_(1).clamp_(min=0)
        mixed = _mix(piece + (place + shifts[owner]) * _signed(GOLDEN))
        # Sums up to each place, so that a range's is a difference: what lies between ranges drops out.
        sums = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
        first, last = ((edge - low).clamp_(0, piece.numel()) for edge in (begins, ends))
        total += sums[last] - sums[first]
    return total.cpu().numpy().view(np.uint64)


def _mix(t: torch.Tensor) -> torch.Tensor:
    t = (t ^ _shifted(t, 32)) * _signed(MULTIPLIER_1)
    t = (t ^ _shifted(t, 29)) * _signed(MULTIPLIER_2)
    return t ^ _shifted(t, 32)


def _shifted(t: torch.Tensor, bits: int) -> torch.Tensor:
    """t >> bits of the same 64 bits without a sign."""
    return (t >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
