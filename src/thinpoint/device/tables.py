"""The tables that tell kernels what to do: parts, segments, blocks, and which program takes what. Built with NumPy, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinpoint.codec.plan import BLOCK_ELEMS, SEGMENT_STEPS
from thinpoint.codec.rans.spec import LANES, raw_words
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.codec.transforms.split import SIGN_NONE, SIGN_ONE, SIGN_STORED, Split
from thinpoint.device.kernels import fields as f

PAIR = 2
"""Segments that one program of the fast kernels takes."""


@dataclass(frozen=True)
class Variant:
    """What the fast kernels are compiled for: width of a word, bits of `low`, trailing zeros, sign stored or not."""

    word_bits: int
    low_bits: int
    trailing_zeros: int
    signed: bool

    @property
    def raw_bits(self) -> int:
        return self.low_bits + self.signed


FAST = {
    Variant(32, 21, 0, True),  # float32
    Variant(32, 20, 0, False),
    Variant(16, 5, 0, True),  # bfloat16
    Variant(16, 4, 0, False),
    Variant(32, 5, 16, True),  # float32 that holds bfloat16
    Variant(32, 4, 16, False),
    Variant(16, 7, 0, True),  # float16
    Variant(16, 8, 0, False),
    Variant(8, 0, 0, False),  # float8
}
"""A kernel takes seconds to compile, so that only usual splits have one; others go through the general kernel."""


def variant_of(split: Split) -> Variant:
    """The variant that a split would need."""
    return Variant(split.word_bits, split.low_bits, split.trailing_zeros, split.sign_mode == SIGN_STORED)


@dataclass(frozen=True, kw_only=True)
class PartShape:
    """A part, or consecutive blocks of one, as the tables need it.

    Attributes:
        num_elems: words in the part.
        split: fields of a word.
        kept: bool array, one for each group of the part, or None if all groups are coded.
        steps: steps of a whole segment.
        block_elems: words in a block.
        first_block, num_blocks: the blocks that are coded; all of them by default.
    """

    num_elems: int
    split: Split
    kept: np.ndarray | None = None
    steps: int = SEGMENT_STEPS
    block_elems: int = BLOCK_ELEMS
    first_block: int = 0
    num_blocks: int = -1

    @property
    def num_groups(self) -> int:
        return -(-self.num_elems // GROUP_ELEMS)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """See `kernels/fields.py` for the columns. Everything in host memory.

    Attributes:
        parts: int64[parts, PART_COLUMNS], addresses and profiles not filled.
        segments: int64[segments, SEGMENT_COLUMNS]; raw and scratch offsets count from 0.
        blocks: int64[blocks, BLOCK_COLUMNS], place and size not filled.
        block_part: int64[blocks].
        raw_block_bytes: int64[blocks], size of each block of the raw plane.
        order: int32, coded groups of the parts that leave some out.
        num_means: length of the array of means.
        num_scratch: uint16 that the words of all segments take at most.
        whole: for each fast variant the first segments of its programs.
        general: for each width of a word the segments that the general kernel takes.
    """

    parts: np.ndarray
    segments: np.ndarray
    blocks: np.ndarray
    block_part: np.ndarray
    raw_block_bytes: np.ndarray
    order: np.ndarray
    num_means: int
    num_scratch: int
    whole: dict[Variant, np.ndarray]
    general: dict[int, np.ndarray]

    @property
    def num_raw_words(self) -> int:
        return int(self.raw_block_bytes.sum()) // 4

    @property
    def widths(self) -> set[int]:
        """Bits of the words of all parts."""
        return {variant.word_bits for variant in self.whole} | self.general.keys()


def starts(sizes: np.ndarray) -> np.ndarray:
    """Exclusive running sum."""
    return np.cumsum(sizes) - sizes


def starts_within(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Exclusive running sums of things of which owner i has counts[i], from 0 for each owner."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return sums[:-1] - np.repeat(sums[starts(counts)], counts)


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, index within its owner) of things of which owner i has counts[i]."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - np.repeat(starts(counts), counts)


def make_tables(shapes: Sequence[PartShape]) -> Tables:
    """Tables for some parts."""
    num_elems = np.array([s.num_elems for s in shapes], np.int64)
    steps = np.array([s.steps for s in shapes], np.int64)
    block_elems = np.array([s.block_elems for s in shapes], np.int64)
    num_groups = -(-num_elems // GROUP_ELEMS)
    segment_elems = LANES * steps
    first_block = np.array([s.first_block for s in shapes], np.int64)
    all_blocks = -(-num_elems // block_elems)
    asked = np.array([s.num_blocks for s in shapes], np.int64)
    num_blocks = np.where(asked < 0, all_blocks - first_block, asked)
    per_block = block_elems // segment_elems
    first_segment = first_block * per_block
    num_segments = (
        -(-np.minimum(num_elems, (first_block + num_blocks) * block_elems) // segment_elems) - first_segment
    )

    parts = np.zeros((len(shapes), f.PART_COLUMNS.value), np.int64)
    parts[:, f.NUM_ELEMS.value] = num_elems
    parts[:, f.STEPS.value] = steps
    parts[:, f.NUM_CANDIDATES.value] = num_groups
    parts[:, f.NUM_CODED.value] = num_elems
    parts[:, f.ORDER_AT.value] = -1
    # One more for the single mean of the part.
    parts[:, f.GROUP_MEANS_AT.value] = starts(num_groups + 1)
    parts[:, _SPLIT_COLUMNS] = [_split_columns(s.split) for s in shapes]
    raw_bits = parts[:, f.RAW_BITS.value]

    part, index = _expand(num_segments)
    segment_start = starts(num_segments)
    index = index + first_segment[part]
    values = np.minimum(segment_elems[part], num_elems[part] - index * segment_elems[part])
    order_at = np.zeros(part.size, np.int64)
    orders: list[np.ndarray] = []
    order_length = 0
    for p, shape in enumerate(shapes):
        if shape.kept is None:
            continue
        order = np.flatnonzero(shape.kept).astype(np.int32)
        sizes = np.where(shape.kept, GROUP_ELEMS, 0)
        sizes[-1] = min(sizes[-1], shape.num_elems - (shape.num_groups - 1) * GROUP_ELEMS)
        groups_per_segment = int(segment_elems[p]) // GROUP_ELEMS
        own = np.add.reduceat(sizes, np.arange(0, shape.num_groups, groups_per_segment))
        slots = np.add.reduceat(
            shape.kept.astype(np.int64), np.arange(0, shape.num_groups, groups_per_segment)
        )
        here = slice(int(segment_start[p]), int(segment_start[p] + num_segments[p]))
        wanted = slice(int(first_segment[p]), int(first_segment[p] + num_segments[p]))
        values[here] = own[wanted]
        order_at[here] = order_length + starts(slots)[wanted]
        parts[p, f.ORDER_AT.value] = order_length
        parts[p, f.NUM_CANDIDATES.value] = order.size
        parts[p, f.NUM_CODED.value] = int(sizes.sum())
        orders.append(order)
        order_length += order.size

    words = raw_words(values, raw_bits[part])
    segments = np.zeros((part.size, f.SEGMENT_COLUMNS.value), np.int64)
    segments[:, f.SEG_PART.value] = part
    segments[:, f.SEG_INDEX.value] = index
    segments[:, f.SEG_VALUES.value] = values
    segments[:, f.SEG_RAW_AT.value] = starts(words)
    segments[:, f.SEG_SCRATCH_AT.value] = starts(values)
    segments[:, f.SEG_ORDER_AT.value] = order_at

    block_part, block_index = _expand(num_blocks)
    blocks = np.zeros((block_part.size, f.BLOCK_COLUMNS.value), np.int64)
    blocks[:, f.BLOCK_SEGMENT.value] = segment_start[block_part] + block_index * per_block[block_part]
    blocks[:, f.BLOCK_SEGMENTS.value] = np.minimum(
        per_block[block_part], num_segments[block_part] - block_index * per_block[block_part]
    )
    bytes_in_block = np.add.reduceat(4 * words, blocks[:, f.BLOCK_SEGMENT.value]) if part.size else words
    whole, general = _programs(shapes, parts, segments, part, segment_start)
    return Tables(
        parts=parts,
        segments=segments,
        blocks=blocks,
        block_part=block_part,
        raw_block_bytes=-(-bytes_in_block // 8) * 8,
        order=np.concatenate(orders) if orders else np.zeros(1, np.int32),
        num_means=int((num_groups + 1).sum()),
        num_scratch=int(values.sum()),
        whole=whole,
        general=general,
    )


_SPLIT_COLUMNS = [
    column.value
    for column in (
        f.TOP_SHIFT,
        f.TOP_MASK,
        f.TRAILING_ZEROS,
        f.LOW_BITS,
        f.SIGN_STORED,
        f.SIGN_VALUE,
        f.RAW_BITS,
        f.WORD_BITS,
    )
]


def _split_columns(split: Split) -> tuple[int, ...]:
    sign = 1 << (split.word_bits - 1) if split.sign_mode == SIGN_ONE else 0
    return (
        split.top_shift,
        (1 << split.top_bits) - 1,
        split.trailing_zeros,
        split.low_bits,
        int(split.sign_mode == SIGN_STORED),
        sign - (1 << 64) if sign >= 1 << 63 else sign,
        split.raw_bits,
        split.word_bits,
    )


def _programs(
    shapes: Sequence[PartShape],
    parts: np.ndarray,
    segments: np.ndarray,
    part: np.ndarray,
    segment_start: np.ndarray,
) -> tuple[dict[Variant, np.ndarray], dict[int, np.ndarray]]:
    """Which programs take which segments."""
    variants = [variant_of(s.split) for s in shapes]
    fast = np.array(
        [
            v in FAST
            and s.kept is None
            and s.steps == SEGMENT_STEPS
            and (s.split.sign_mode != SIGN_NONE or v.word_bits == 8)
            for v, s in zip(variants, shapes, strict=True)
        ],
        bool,
    )
    complete = segments[:, f.SEG_VALUES.value] == LANES * parts[part, f.STEPS.value]
    # Only the last segment of a part may be incomplete, so that complete ones pair up from the first.
    num_complete = np.bincount(part[complete & fast[part]], minlength=len(shapes))
    within = np.arange(part.size) - segment_start[part]
    paired = within < (num_complete // PAIR * PAIR)[part]
    first = np.flatnonzero(paired & (within % PAIR == 0)).astype(np.int64)
    rest = np.flatnonzero(~paired).astype(np.int64)
    keys = {v: i for i, v in enumerate(dict.fromkeys(variants))}
    key = np.array([keys[v] for v in variants], np.int64)
    widths = parts[part[rest], f.WORD_BITS.value]
    whole = {v: first[key[part[first]] == i] for v, i in keys.items()}
    general = {int(w): rest[widths == w] for w in np.unique(widths)}
    return {v: p for v, p in whole.items() if p.size}, general
