"""Which chain a part gets: integer cost estimates on a fixed sample, ties to the simpler chain (`spec/ENCODER.md`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

ENCODER_VERSION = 1

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
"""Groups that the candidates are judged on: 65,536 values cost no ratio on any tensor tried."""

SAMPLE_DIVISOR = 32
"""The table of a large part is made from one group in so many."""

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


def sample_groups(candidates: np.ndarray, num_elems: int, count: int) -> np.ndarray:
    """`count` of the candidates, spread by a fixed hash; all of them if there are no more.

    The hash breaks the rhythm: every 16th group would always hit the same columns of a matrix.

    Args:
        candidates: int64 array, ascending: the groups that are coded.
        num_elems: words in the part; an incomplete last group is sampled only if all groups are.
        count: at least 1.
    """
    if candidates.size <= count:
        return candidates
    if num_elems % GROUP_ELEMS and candidates[-1] == num_elems // GROUP_ELEMS:
        candidates = candidates[:-1]
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


def best_window(bins: np.ndarray) -> int:
    """First bin of the run of WINDOW bins with the most mass; among equals the middle one, or the first if that is less."""
    cumulative = np.concatenate([[0], np.cumsum(bins)])
    mass = cumulative[WINDOW:] - cumulative[:-WINDOW]
    best = np.flatnonzero(mass == mass.max())
    middle = (int(best[0]) + int(best[-1])) // 2
    return middle if mass[middle] == mass[best[0]] else int(best[0])


def make_coding(differences: Differences, exact: bool, start: int | None = None) -> Coding:
    """A table for a window of differences, and its cost.

    Args:
        differences: the histogram.
        exact: whether it covers every value; if not, unseen symbols between seen ones, and zero, get a frequency too.
        start: first bin of the window; None for the best one.
    """
    if start is None:
        start = best_window(differences.bins)
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
    num_patches = differences.num_outside + int(differences.bins.sum()) - int(histogram[1:].sum())
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
    planner = _Planner(words, spec, split, scan, kernels, map)
    best = planner.one_mean()
    if split.word_bits == 8 or planner.num_groups == 1:
        return planner.with_larger_sample(best)
    grouped, mean_bits = planner.sampled_group_means()
    group_pays = grouped.estimated_bits < best.estimated_bits
    try_profile = (group_pays or spec.role != "weight") and planner.has_rows_enough
    if group_pays or try_profile:
        grouped = planner.with_all_means(grouped)
    if group_pays:
        best = grouped
    if try_profile:
        profiled = planner.column_profile(grouped, mean_bits)
        best = profiled if profiled.estimated_bits < best.estimated_bits else best
    return planner.with_larger_sample(best)


class _Planner:
    """What the candidates for one part share: which groups are coded and sampled, and what is stored in any case."""

    def __init__(
        self, words: np.ndarray, spec: PartSpec, split: Split, scan: Scan, kernels: Kernels, map: Mapper
    ) -> None:
        self.words, self.split, self.kernels, self.map = words, split, kernels, map
        self.row_elems = spec.row_elems
        self.num_groups = scan.kept.size
        num_idle = self.num_groups - int(scan.kept.sum())
        elide = num_idle * GROUP_ELEMS * max(split.raw_bits, 1) > self.num_groups
        self.kept = scan.kept if elide else None
        self.candidates = np.flatnonzero(scan.kept) if elide else np.arange(self.num_groups, dtype=np.int64)
        self.num_coded = self._num_values(self.candidates)
        self.sample = sample_groups(self.candidates, words.size, SAMPLE_GROUPS)
        self.fixed_bits = self.num_coded * split.raw_bits + (self.num_groups if elide else 0)
        self.fixed_bits += -(-words.size // SEGMENT_ELEMS) * 33 * 32

    @property
    def has_rows_enough(self) -> bool:
        return self.row_elems > 0 and self.words.size >= MIN_PROFILE_ROWS * self.row_elems

    def one_mean(self) -> Plan:
        """Every value predicted by the mean of the sampled groups' means; 8-bit types by 0."""
        mean = 0
        if self.split.word_bits > 8:
            means = self.kernels.group_means(self.words, self.sample, self.split, self.map)
            valid = means[means != NO_MEAN].astype(np.int64)
            mean = int(rounded_mean(valid.sum(), np.int64(valid.size))) if valid.size else 0
        return self._plan(np.array([mean], np.int32), np.array([mean], np.int32), None, 0)

    def sampled_group_means(self) -> tuple[Plan, int]:
        """A plan that knows the means of the sampled groups only, and the estimated size of all means in bits."""
        means = fill_missing(self.kernels.group_means(self.words, self.sample, self.split, self.map))
        mean_bits = self._mean_bits(means)
        return self._plan(means, means, None, mean_bits), mean_bits

    def with_all_means(self, plan: Plan) -> Plan:
        """The plan with the means of all groups."""
        groups = np.arange(self.num_groups, dtype=np.int64)
        return replace(
            plan, means=fill_missing(self.kernels.group_means(self.words, groups, self.split, self.map))
        )

    def column_profile(self, grouped: Plan, mean_bits: int) -> Plan:
        """A profile on top of the group means, which take `mean_bits`."""
        means, row_elems = grouped.means, self.row_elems
        rows = profile_rows(self.words.size, row_elems)
        sums = self.kernels.column_sums(self.words, self.split, means, rows, row_elems, self.map)
        profile = profile_from_sums(*sums)
        wide = int(profile.max()) - int(profile.min()) > 255
        side_bits = mean_bits + (16 if wide else 8) * row_elems
        return self._plan(means, means[self.sample], profile, side_bits)

    def with_larger_sample(self, plan: Plan) -> Plan:
        """The plan with its table made from one group in SAMPLE_DIVISOR, where that is more than chose plan and window."""
        count = self.candidates.size // SAMPLE_DIVISOR
        if count <= SAMPLE_GROUPS:
            return plan
        sample = sample_groups(self.candidates, self.words.size, count)
        means = plan.means if plan.means.size == 1 else plan.means[sample]
        start = plan.coding.window_base + HISTOGRAM_ZERO + 1
        return replace(plan, coding=self._coding(sample, means, plan.profile, start))

    def _mean_bits(self, sampled_means: np.ndarray) -> int:
        wide = int(sampled_means.max()) - int(sampled_means.min()) > 255
        return (16 if wide else 8) * self.num_groups

    def _coding(
        self, sample: np.ndarray, means: np.ndarray, profile: np.ndarray | None, start: int | None = None
    ) -> Coding:
        exact = self._num_values(sample) >= self.num_coded
        found = self.kernels.differences(self.words, sample, self.split, means, profile, self.map)
        return make_coding(found, exact, start)

    def _num_values(self, sample: np.ndarray) -> int:
        return int(np.minimum(GROUP_ELEMS, self.words.size - sample * GROUP_ELEMS).sum())

    def _plan(
        self, means: np.ndarray, sampled_means: np.ndarray, profile: np.ndarray | None, side_bits: int
    ) -> Plan:
        coding = self._coding(self.sample, sampled_means, profile)
        entropy_bits = coding.cost * self.num_coded // (self._num_values(self.sample) << COST_SCALE_BITS)
        return Plan(
            split=self.split,
            kept=self.kept,
            means=means,
            profile=profile,
            coding=coding,
            estimated_bits=self.fixed_bits + side_bits + 8 * table_bytes(coding.freqs) + entropy_bits,
        )


def fill_missing(means: np.ndarray) -> np.ndarray:
    """The means with the lowest of them where a group has none; 0 if no group has one."""
    seen = means != NO_MEAN
    lowest = int(means[seen].min()) if seen.any() else 0
    return np.where(seen, means, lowest).astype(np.int32)


assert HISTOGRAM_BINS > WINDOW
