"""Split of a word into the *symbol part* (exponent and first mantissa bits), raw low bits and sign.

    word = sign | top | low | trailing zeros        (most significant bit first)

`top` is what prediction and entropy coding work on; it is a piecewise-linear log2 of the magnitude. `low` (and the sign, where
it varies) is stored raw. Trailing zero bits that a whole part has in common, and a constant sign, are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SIGN_NONE, SIGN_STORED, SIGN_ZERO, SIGN_ONE = 0, 1, 2, 3
"""No sign bit apart from top (8-bit types); sign stored with the low bits; every sign 0; every sign 1."""

MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Explicit mantissa bits of the floats that are split; IEEE 754 and bfloat16."""

MAX_TOP_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the fields of a word lie.

    Attributes:
        word_bits: 8, 16, 32 or 64.
        sign_mode: one of the SIGN_ constants.
        trailing_zeros: number of low bits that are zero in every word of the part.
        low_bits: number of bits of `low`.
    """

    word_bits: int
    sign_mode: int
    trailing_zeros: int
    low_bits: int

    @property
    def top_shift(self) -> int:
        return self.trailing_zeros + self.low_bits

    @property
    def top_bits(self) -> int:
        return self.word_bits - self.top_shift - (self.sign_mode != SIGN_NONE)

    @property
    def raw_bits(self) -> int:
        """Bits stored raw for each value: low, and the sign above it if it is stored."""
        return self.low_bits + (self.sign_mode == SIGN_STORED)

    @property
    def is_valid(self) -> bool:
        return (
            self.word_bits in {8, 16, 32, 64}
            and SIGN_NONE <= self.sign_mode <= SIGN_ONE
            and self.trailing_zeros >= 0
            and self.low_bits >= 0
            and 1 <= self.top_bits <= MAX_TOP_BITS
        )


def choose_split(dtype: str, word_bytes: int, or_mask: int, and_mask: int) -> Split | None:
    """The split for a part, or None if its dtype is not coded by symbols (`spec/ENCODER.md`, "Split").

    Args:
        dtype: name of the dtype.
        word_bytes: bytes of one word.
        or_mask: bitwise OR of all words.
        and_mask: bitwise AND of all words.
    """
    if word_bytes == 1:
        return Split(word_bits=8, sign_mode=SIGN_NONE, trailing_zeros=0, low_bits=0)
    mantissa_bits = MANTISSA_BITS.get(dtype)
    if mantissa_bits is None:
        return None
    word_bits = 8 * word_bytes
    sign_or, sign_and = or_mask >> (word_bits - 1), and_mask >> (word_bits - 1)
    sign_mode = SIGN_STORED if sign_or != sign_and else SIGN_ONE if sign_or else SIGN_ZERO
    sign_bits = int(sign_mode == SIGN_STORED)
    mantissa_or = or_mask & ((1 << mantissa_bits) - 1)
    kept = mantissa_bits - ((mantissa_or & -mantissa_or).bit_length() - 1) if mantissa_or else 0
    in_top = min(2 if (kept + sign_bits) % 2 == 0 else 3, kept)
    if (kept + sign_bits - in_top) % 2:
        kept += 1
    return Split(
        word_bits=word_bits,
        sign_mode=sign_mode,
        trailing_zeros=mantissa_bits - kept,
        low_bits=kept - in_top,
    )


def split_words(words: np.ndarray, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(top as int32, raw as uint64) of each word."""
    wide = words.astype(np.uint64)
    top = (wide >> np.uint64(split.top_shift)) & np.uint64((1 << split.top_bits) - 1)
    raw = (wide >> np.uint64(split.trailing_zeros)) & np.uint64((1 << split.low_bits) - 1)
    if split.sign_mode == SIGN_STORED:
        raw |= (wide >> np.uint64(split.word_bits - 1)) << np.uint64(split.low_bits)
    return top.astype(np.int32), raw


def join_words(top: np.ndarray, raw: np.ndarray, split: Split) -> np.ndarray:
    """The words that `split_words` took apart; bits of top beyond top_bits are dropped."""
    wide = (top.astype(np.int64).astype(np.uint64) & np.uint64((1 << split.top_bits) - 1)) << np.uint64(
        split.top_shift
    )
    wide |= (raw & np.uint64((1 << split.low_bits) - 1)) << np.uint64(split.trailing_zeros)
    wide |= sign_bits(raw, split)
    return wide.astype(f"<u{split.word_bits // 8}")


def sign_bits(raw: np.ndarray, split: Split) -> Any:
    """The sign in place, uint64, from the raw bits or the constant."""
    if split.sign_mode == SIGN_STORED:
        return (raw >> np.uint64(split.low_bits)) << np.uint64(split.word_bits - 1)
    return np.uint64((1 if split.sign_mode == SIGN_ONE else 0) << (split.word_bits - 1))
