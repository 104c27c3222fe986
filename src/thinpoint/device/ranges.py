"""Ranges of bytes on the device, wherever they are: their digests, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from thinpoint.device.kernels import planes
from thinpoint.device.launch import Launcher

DIGEST_WORDS, DIGEST_ROUNDS = 1024, 32
DIGEST_BYTES = 8 * DIGEST_WORDS * DIGEST_ROUNDS
COMPARE_BYTES, COMPARE_ROUNDS = 8192, 32


def digest_ranges(
    launcher: Launcher, address: np.ndarray, size: np.ndarray, first_word: np.ndarray
) -> torch.Tensor:
    """int64[ranges]: digests of byte ranges on the device (`thinpoint.digest`); first_word: index of the first word."""
    sums = launcher.zeros(address.size, torch.int64)
    for is_aligned, row, start, length in _programs([address, size], size, DIGEST_BYTES):
        table = np.stack([address[row] + start, length, first_word[row] + start // 8, row], 1)
        launcher.run(
            planes.digest_ranges,
            (len(table),),
            launcher.upload(table),
            sums,
            WORDS=DIGEST_WORDS,
            ROUNDS=DIGEST_ROUNDS,
            ALIGNED=is_aligned,
            num_warps=4,
        )
    return sums


def compare_ranges(launcher: Launcher, one: np.ndarray, other: np.ndarray, size: np.ndarray) -> torch.Tensor:
    """int32[ranges]: how many words (or bytes) differ between pairs of byte ranges."""
    sums = launcher.zeros(one.size, torch.int32)
    for is_aligned, row, start, length in _programs([one, other, size], size, COMPARE_BYTES * COMPARE_ROUNDS):
        table = np.stack([one[row] + start, other[row] + start, length, row], 1)
        launcher.run(
            planes.compare_ranges,
            (len(table),),
            launcher.upload(table),
            sums,
            BYTES=COMPARE_BYTES,
            ROUNDS=COMPARE_ROUNDS,
            WIDTH=64 if is_aligned else 8,
            num_warps=4,
        )
    return sums


def _programs(
    must_be_aligned: list[np.ndarray], size: np.ndarray, step: int
) -> Iterator[tuple[bool, np.ndarray, np.ndarray, np.ndarray]]:
    """What programs do that take at most `step` bytes each: those of ranges in words of 8 bytes, then those of others.

    Args:
        must_be_aligned: int64, for each range; all multiples of 8 if it is one of words.

    Returns:
        (whether words, then for each program: the range, where it begins in there, bytes), as often as there are any.
    """
    aligned = np.bitwise_or.reduce(must_be_aligned) % 8 == 0
    for is_aligned in (True, False):
        rows = np.flatnonzero((aligned == is_aligned) & (size > 0))
        owner, start, length = _chunks(size[rows], step)
        if owner.size:
            yield is_aligned, rows[owner], start, length


def _chunks(sizes: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(owner, start, length) of pieces of at most `step` of things of these sizes."""
    per = -(-sizes // step)
    owner = np.repeat(np.arange(sizes.size), per)
    start = (np.arange(owner.size) - np.repeat(np.cumsum(per) - per, per)) * step
    return owner, start, np.minimum(step, sizes[owner] - start)
