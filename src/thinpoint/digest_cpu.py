"""The digest of `digest.py` as a Numba kernel: one thread, no GIL, vectorised by LLVM."""

from __future__ import annotations

import numba as nb
import numpy as np

from thinpoint.digest import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

_GOLDEN = np.uint64(GOLDEN)
_M1 = np.uint64(MULTIPLIER_1)
_M2 = np.uint64(MULTIPLIER_2)


@nb.njit(nogil=True, cache=True, boundscheck=False)
def digest_words(words, first_word):
    """Partial digest of uint64 words whose first has index first_word (uint64)."""
    total = np.uint64(0)
    for j in range(words.size):
        t = words[j] + (first_word + np.uint64(j) + np.uint64(1)) * _GOLDEN
        t ^= t >> np.uint64(32)
        t *= _M1
        t ^= t >> np.uint64(29)
        t *= _M2
        t ^= t >> np.uint64(32)
        total += t
    return total
