"""Which chain a part gets: integer cost estimates on a fixed sample, ties to the simpler chain (`spec/ENCODER.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinpoint.codec.contract import Mapper, PartSpec
from thinpoint.codec.rans.kernels import HISTOGRAM_BINS, HISTOGRAM_ZERO, Differences, Kernels, Scan
from thinpoint.codec.rans.spec import LANES, NUM_SYMBOLS, PROB_BITS, PROB_SCALE, normalise, table_bytes
from thinpoint.codec.transforms.predict import (
    GROUP_ELEMS,
    MIN_PROFILE_ROWS,
    NO_MEAN,
    profile_from_sums,
    profile_rows,
    rounded_mean,
)
from thinpoint.codec.transforms.split import Split

ENCODER_VERSION = 0

SEGMENT_STEPS = 1024
SEGMENT_ELEMS = LANES * SEGMENT_STEPS
BLOCK_ELEMS = 8 * SEGMENT_ELEMS
"""1 MiB of FP32: small enough for a slice, large enough for storage."""

PART_BYTES = 64 << 20
"""Raw bytes of a part at most: what a save holds in memory stays small whatever the size of a tensor."""

MIN_CODED_ELEMS = 512
"""Below this the tables cost more than the coding saves: real states with norm vectors of 768 and 512 values gain 0.4 % in all
from a bound of 512 instead of 1,024, and nothing from 192."""

SAMPLE_GROUPS = 256
SAMPLE_DIVISOR = 16
WINDOW = NUM_SYMBOLS - 1
PATCH_BITS = 48
COST_SCALE_BITS = 16


@lru_cache(maxsize=1)
def log2_table() -> np.ndarray:
    """int64[4097]: floor(2^16 log2 f) for f in 1..4096, by integer squaring, so that it is the same everywhere."""
    table = np.zeros(PROB_SCALE + 1, np.int64)
    for value in range(1, PROB_SCALE + 1):
        whole = value.bit_length() - 1
        mantissa = value << (62 - whole)
        result = whole
        for _ in range(COST_SCALE_BITS):
            mantissa = (mantissa * mantissa) >> 62
            bit = mantissa >> 63
            mantissa >>= bit
            result = 2 * result + bit
        table[value] = result
    return table


def sample_groups(kept: np.ndarray, num_elems: int) -> np.ndarray:
    """The groups that statistics are taken from: all, or one in 16 (at least 256), spread by a fixed hash.

    The hash breaks the rhythm: every 16th group would always hit the same columns of a matrix.

    Args:
        kept: bool array, the groups that are coded.
        num_elems: words in the part; an incomplete last group is sampled only if all groups are.
    """
    candidates = np.flatnonzero(kept)
    if candidates.size <= SAMPLE_GROUPS:
        return candidates
    if num_elems % GROUP_ELEMS and candidates[-1] == kept.size - 1:
        candidates = candidates[:-1]
    count = max(SAMPLE_GROUPS, candidates.size // SAMPLE_DIVISOR)
    if count >= candidates.size:
        return candidates
    i = np.arange(count, dtype=np.int64)
    jitter = ((i * 2654435761 + 0x9E3779B9) & 0xFFFFFFFF) * candidates.size >> 32
    return candidates[(i * candidates.size + jitter) // count]


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Symbols, frequencies and estimated size for one way to predict.

    Attributes:
        window_base: top = prediction + window_base + symbol.
        freqs: int64[256].
        lowest, highest: symbols above 0 that are coded; others are patches.
        fill: the most frequent symbol, coded in place of a patch.
        cost: estimated entropy-coded size of the sampled values and their patches, in 2^-16 bit.
    """

    window_base: int
    freqs: np.ndarray
    lowest: int
    highest: int
    fill: int
    cost: int


def make_coding(differences: Differences, exact: bool) -> Coding:
    """The window with the most mass, its table and its cost.

    Args:
        differences: the histogram.
        exact: whether it covers every value; if not, unseen symbols between seen ones, and zero, get a frequency too.
    """
    cumulative = np.concatenate([[0], np.cumsum(differences.bins)])
    mass = cumulative[WINDOW:] - cumulative[:-WINDOW]
    start = int(mass.argmax())
    histogram = np.zeros(NUM_SYMBOLS, np.int64)
    histogram[0] = differences.num_zero
    histogram[1:] = differences.bins[start : start + WINDOW]
    present = histogram > 0
    seen = np.flatnonzero(present[1:]) + 1
    lowest, highest = (int(seen[0]), int(seen[-1])) if seen.size else (NUM_SYMBOLS, 0)
    if exact:
        lowest, highest = 1, WINDOW
    else:
        present[lowest : highest + 1] = True
        present[0] = True
    if not present.any():
        present[0] = True
    freqs = normalise(histogram, present)
    fill = int(np.where(present, histogram, -1).argmax())
    bits = (PROB_BITS << COST_SCALE_BITS) - log2_table()[freqs]
    num_patches = differences.num_outside + int(differences.bins.sum()) - int(mass[start])
    cost = int((histogram * np.where(present, bits, 0)).sum())
    cost += num_patches * ((PATCH_BITS << COST_SCALE_BITS) + int(bits[fill]))
    return Coding(
        window_base=start - HISTOGRAM_ZERO - 1,
        freqs=freqs,
        lowest=lowest,
        highest=highest,
        fill=fill,
        cost=cost,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the values of a part are coded.

    Attributes:
        split: fields of a word.
        kept: bool array of the groups that are coded, or None for all.
        means: int32, one for each group of the part, or a single one.
        profile: int32 column profile or None.
        coding: symbols and table.
        estimated_bits: size of prefix and planes.
    """

    split: Split
    kept: np.ndarray | None
    means: np.ndarray
    profile: np.ndarray | None
    coding: Coding
    estimated_bits: int


def make_plan(
    words: np.ndarray, spec: PartSpec, split: Split, scan: Scan, kernels: Kernels, map: Mapper
) -> Plan:
    """The cheapest of: one mean for the part, a mean for each group, group means and a column profile."""
    num_elems = int(words.size)
    num_groups = scan.kept.size
    num_idle = num_groups - int(scan.kept.sum())
    elide = num_idle * GROUP_ELEMS * max(split.raw_bits, 1) > num_groups
    kept = scan.kept if elide else np.ones(num_groups, bool)
    num_coded = num_elems - (num_idle * GROUP_ELEMS if elide else 0)
    groups = sample_groups(kept, num_elems)
    num_sampled = int(np.minimum(GROUP_ELEMS, num_elems - groups * GROUP_ELEMS).sum())
    exact = num_sampled >= num_coded
    fixed_bits = num_coded * split.raw_bits + (num_groups if elide else 0)
    fixed_bits += -(-num_elems // SEGMENT_ELEMS) * 33 * 32

    def total_bits(coding: Coding, side_bits: int) -> int:
        table_bits = 8 * table_bytes(coding.freqs)
        entropy_bits = coding.cost * num_coded // (num_sampled << COST_SCALE_BITS)
        return fixed_bits + side_bits + table_bits + entropy_bits

    def result(means: np.ndarray, profile: np.ndarray | None, coding: Coding, bits: int) -> Plan:
        return Plan(
            split=split,
            kept=kept if elide else None,
            means=means,
            profile=profile,
            coding=coding,
            estimated_bits=bits,
        )

    if split.word_bits == 8:
        means = np.zeros(1, np.int32)
        coding = make_coding(kernels.differences(words, groups, split, means, None, map), exact)
        return result(means, None, coding, total_bits(coding, 0))

    sampled = kernels.group_means(words, groups, split, map)
    valid = sampled[sampled != NO_MEAN].astype(np.int64)
    mean = int(rounded_mean(valid.sum(), np.int64(valid.size))) if valid.size else 0
    means = np.array([mean], np.int32)
    coding = make_coding(kernels.differences(words, groups, split, means, None, map), exact)
    best = result(means, None, coding, total_bits(coding, 0))
    if num_groups == 1:
        return best

    by_group = fill_missing(sampled)
    coding = make_coding(kernels.differences(words, groups, split, by_group, None, map), exact)
    wide = 16 if int(by_group.max()) - int(by_group.min()) > 255 else 8
    group_bits = total_bits(coding, wide * num_groups)
    group_pays = group_bits < best.estimated_bits
    row_elems = spec.row_elems
    try_profile = row_elems > 0 and num_elems >= MIN_PROFILE_ROWS * row_elems
    if not group_pays and (spec.role == "weight" or not try_profile):
        return best
    means = fill_missing(kernels.group_means(words, np.arange(num_groups, dtype=np.int64), split, map))
    if group_pays:
        best = result(means, None, coding, group_bits)
    if not try_profile:
        return best
    rows = profile_rows(num_elems, row_elems)
    profile = profile_from_sums(*kernels.column_sums(words, split, means, rows, row_elems, map))
    coding = make_coding(kernels.differences(words, groups, split, means[groups], profile, map), exact)
    wide_column = 16 if int(profile.max()) - int(profile.min()) > 255 else 8
    bits = total_bits(coding, wide * num_groups + wide_column * row_elems)
    return result(means, profile, coding, bits) if bits < best.estimated_bits else best


def fill_missing(means: np.ndarray) -> np.ndarray:
    """The means with the lowest of them where a group has none; 0 if no group has one."""
    seen = means != NO_MEAN
    lowest = int(means[seen].min()) if seen.any() else 0
    return np.where(seen, means, lowest).astype(np.int32)


assert HISTOGRAM_BINS > WINDOW
