"""Ranges of bytes on the device, wherever they are: their digests, and what differs between two."""

from __future__ import annotations

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
    aligned = (address % 8 == 0) & (size % 8 == 0)
    for is_aligned in (True, False):
        rows = np.flatnonzero((aligned == is_aligned) & (size > 0))
        owner, start, length = _chunks(size[rows], DIGEST_BYTES)
        if not owner.size:
            continue
        row = rows[owner]
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
    aligned = (one % 8 == 0) & (other % 8 == 0) & (size % 8 == 0)
    for is_aligned in (True, False):
        rows = np.flatnonzero((aligned == is_aligned) & (size > 0))
        owner, start, length = _chunks(size[rows], COMPARE_BYTES * COMPARE_ROUNDS)
        if not owner.size:
            continue
        row = rows[owner]
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


def _chunks(sizes: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(owner, start, length) of pieces of at most `step` of things of these sizes."""
    per = -(-sizes // step)
    owner = np.repeat(np.arange(sizes.size), per)
    start = (np.arange(owner.size) - np.repeat(np.cumsum(per) - per, per)) * step
    return owner, start, np.minimum(step, sizes[owner] - start)
