"""The 64-bit checksum of raw and stored bytes (algorithm id 1, `spec/CODECS.md`).

    digest = sum over the 8-byte little-endian words w_j of mix(w_j + (j + 1) x GOLDEN)  mod 2^64

The last word is padded with zero bytes. The sum is free of order, so threads and GPUs add partial sums of the pieces they
hold, as long as each piece starts at a multiple of 8 bytes and knows the index of its first word.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

ALGORITHM_ID = 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xD6E8FEB86659FD93
MULTIPLIER_2 = 0xCA5A826395121157
MASK = (1 << 64) - 1

_CHUNK_WORDS = 1 << 16
_SMALL_BYTES = 1 << 12


def as_bytes(buffer: Any) -> np.ndarray:
    """A flat uint8 view of any contiguous buffer; no copy."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def reference(buffer: Any, first_word: int = 0) -> int:
    """The digest in plain NumPy: the truth that every other implementation is compared with.

    Args:
        buffer: contiguous bytes, host memory, any length and alignment.
        first_word: index j of the first 8-byte word, for a piece of a longer sequence.
    """
    data = as_bytes(buffer)
    total = 0
    for start in range(0, data.size, _CHUNK_WORDS * 8):
        piece = data[start : start + _CHUNK_WORDS * 8]
        num_words = -(-piece.size // 8)
        padded = np.zeros(num_words * 8, np.uint8)
        padded[: piece.size] = piece
        j = np.arange(num_words, dtype=np.uint64) + np.uint64((first_word + start // 8 + 1) & MASK)
        t = padded.view("<u8").astype(np.uint64) + j * np.uint64(GOLDEN)
        t ^= t >> np.uint64(32)
        t *= np.uint64(MULTIPLIER_1)
        t ^= t >> np.uint64(29)
        t *= np.uint64(MULTIPLIER_2)
        t ^= t >> np.uint64(32)
        total += int(t.sum(dtype=np.uint64))
    return total & MASK


def digest(buffer: Any, first_word: int = 0) -> int:
    """The digest, by the fastest implementation this machine has (Numba, else NumPy). Arguments as `reference`."""
    data = as_bytes(buffer)
    # Loading the kernel takes longer than a few small digests.
    if data.size < _SMALL_BYTES and not _fast_kernel.cache_info().currsize:
        return reference(data, first_word)
    kernel = _fast_kernel()
    if kernel is None:
        return reference(data, first_word)
    whole = data.size // 8
    words = data[: whole * 8].view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    total = int(kernel(words, np.uint64(first_word)))
    if data.size % 8:
        total += reference(data[whole * 8 :], first_word + whole)
    return total & MASK


@lru_cache(maxsize=1)
def _fast_kernel() -> Any:
    try:
        from thinpoint import digest_cpu
    except ImportError:
        return None
    return digest_cpu.digest_words
