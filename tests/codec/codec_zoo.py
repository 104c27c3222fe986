"""Words that codecs are tested on: every dtype's bit patterns, the lengths where something changes, and odd values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

WORDS = {
    "float64": np.uint64,
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float4_e2m1fn_x2": np.uint8,
    "int64": np.uint64,
    "uint32": np.uint32,
    "int16": np.uint16,
    "int8": np.uint8,
    "uint8": np.uint8,
    "bool": np.uint8,
    "bytes": np.uint8,
}
LENGTHS = (1, 2, 127, 255, 256, 257, 511, 512, 513, 1023, 5000, 32767, 32768, 32769)
LONG_LENGTHS = (65537, 262143, 262144, 262145, 300001)
KINDS = (
    "random",
    "normal",
    "constant",
    "zeros",
    "groups",
    "idle",
    "columns",
    "special",
    "powers",
    "outliers",
)


def to_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 values as the words of a dtype (rounding does not matter here)."""
    word = WORDS[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "float64":
            return values.view(np.uint64)
        if dtype == "float32":
            return values.astype(np.float32).view(np.uint32)
        if dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        if dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bool":
            return (values > 0).astype(np.uint8)
        finite = np.nan_to_num(values * 100, nan=1, posinf=3, neginf=-3)
        return finite.astype(np.int64).astype(word)


def make(kind: str, dtype: str, length: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """(words, row_elems) of one kind."""
    rng = np.random.default_rng(seed + length)
    x = rng.standard_normal(length) * 0.02
    per_group = np.repeat(rng.standard_normal(-(-length // 256)), 256)[:length]
    if kind == "random":
        return rng.integers(0, 1 << 63, length, dtype=np.uint64).astype(WORDS[dtype]), 0
    if kind == "constant":
        return to_words(np.full(length, 0.1), dtype), 0
    if kind == "zeros":
        return np.zeros(length, WORDS[dtype]), 0
    if kind == "groups":
        return to_words(x * np.exp2(per_group * 6), dtype), 0
    if kind == "idle":
        return to_words(np.where(per_group > -0.5, 0.0, x), dtype), 100
    if kind == "columns":
        scale = np.exp2(rng.standard_normal(96) * 6)[np.arange(length) % 96]
        return to_words(np.abs(x) * scale, dtype), 96
    if kind == "special":
        for step, value in (
            (7, 0.0),
            (11, np.nan),
            (13, -0.0),
            (17, np.inf),
            (19, -np.inf),
            (23, 5e-324),
            (29, 1e-40),
        ):
            x[::step] = value
        words = to_words(x, dtype)
        words[::31] = np.iinfo(words.dtype).max
        return words, 0
    if kind == "powers":
        return to_words(np.sign(x) * np.exp2(np.floor(rng.standard_normal(length) * 2)), dtype), 0
    if kind == "outliers":
        x[rng.random(length) < 0.002] *= 1e30
        x[rng.random(length) < 0.002] *= 1e-30
        return to_words(x, dtype), 128
    return to_words(x, dtype), 64


def zoo(lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, str, int]]:
    """(dtype, kind, length) of everything."""
    for dtype in WORDS:
        for length in lengths:
            for kind in KINDS:
                yield dtype, kind, length
