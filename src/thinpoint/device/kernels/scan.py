"""One look at every word: bits in common, idle groups, group means."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f


@triton.jit
def word_pointer(address, WORD_BITS: tl.constexpr):
    """Pointer to unsigned words of that width."""
    if WORD_BITS == 8:
        return address.to(tl.pointer_type(tl.uint8))
    elif WORD_BITS == 16:
        return address.to(tl.pointer_type(tl.uint16))
    elif WORD_BITS == 32:
        return address.to(tl.pointer_type(tl.uint32))
    else:
        return address.to(tl.pointer_type(tl.uint64))


@triton.jit
def widened(words, WORD_BITS: tl.constexpr):
    """Words as uint32, or uint64 where they have 64 bits."""
    if WORD_BITS == 64:
        return words
    else:
        return words.to(tl.uint32)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def scan_groups(
    chunks,
    parts,
    means,
    kept,
    masks,
    WORD_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Masks of the parts, and for every group its mean top and whether any bit is set.

    A program takes GROUPS x ROUNDS groups; chunks: int64[programs, 2], part and first group. kept: uint8, indexed like means.
    """
    row = chunks + tl.program_id(0) * 2
    part = tl.load(row)
    first_group = tl.load(row + 1).to(tl.int32)
    fields = parts + part * f.PART_COLUMNS
    num_elems = tl.load(fields + f.NUM_ELEMS).to(tl.int32)
    address = tl.load(fields + f.ADDRESS)
    shift = tl.load(fields + f.TOP_SHIFT)
    top_mask = tl.load(fields + f.TOP_MASK)
    means_at = tl.load(fields + f.GROUP_MEANS_AT)
    pointer = word_pointer(address, WORD_BITS)
    wide: tl.constexpr = tl.uint64 if WORD_BITS == 64 else tl.uint32
    all_ones: tl.constexpr = (1 << (64 if WORD_BITS == 64 else 32)) - 1
    shift = shift.to(wide)
    top_mask = top_mask.to(wide)
    any_bit = tl.zeros([GROUPS], wide)
    any_gap = tl.zeros([GROUPS, 256], wide)
    num_idle = tl.zeros([GROUPS], tl.int32)
    highest = tl.zeros([GROUPS], tl.int32)
    lowest = tl.zeros([GROUPS], tl.int32)
    for round in range(ROUNDS):
        group = first_group + round * GROUPS + tl.arange(0, GROUPS)
        real = group * f.GROUP < num_elems
        elem = (group * f.GROUP)[:, None] + tl.arange(0, 256)[None, :]
        place = pointer + elem
        if ALIGNED:
            # Addresses are multiples of 16, which the compiler cannot know of a number from a table.
            place = tl.multiple_of(place, [16, 16])
        if (first_group + (round + 1) * GROUPS) * f.GROUP <= num_elems:
            words = widened(tl.load(place), WORD_BITS)
            any_gap |= words ^ all_ones
        else:
            inside = elem < num_elems
            words = widened(tl.load(place, mask=inside, other=0), WORD_BITS)
            any_gap |= tl.where(inside, words ^ all_ones, 0)
        bits = tl.reduce(words, 1, either)
        any_bit |= bits
        num_idle += ((bits == 0) & real).to(tl.int32)
        top = ((words >> shift) & top_mask).to(tl.int32)
        # Sum and count in one reduction: tops have at most 14 bits, so a sum stays below 2^22 and a count below 2^9.
        both = tl.sum(top + (tl.minimum(top, 1) << 22), 1)
        total = both & ((1 << 22) - 1)
        count = both >> 22
        mean = tl.where(count > 0, (2 * total + count) // (2 * tl.maximum(count, 1)), f.NO_MEAN)
        highest = tl.maximum(highest, mean)
        lowest = tl.maximum(lowest, tl.where(count > 0, -mean + f.MEAN_BOUND, 0))
        tl.store(means + means_at + group, mean, mask=real)
        tl.store(kept + means_at + group, (bits != 0).to(tl.uint8), mask=real)
    gaps = tl.reduce(tl.reduce(any_gap, 1, either), 0, either)
    mask_row = masks + part * f.MASK_COLUMNS
    tl.atomic_or(mask_row + f.OR_MASK, tl.reduce(any_bit, 0, either).to(tl.int64, bitcast=WORD_BITS == 64))
    tl.atomic_or(mask_row + f.NOR_MASK, gaps.to(tl.int64, bitcast=WORD_BITS == 64))
    tl.atomic_max(mask_row + f.HIGHEST_MEAN, tl.max(highest, 0).to(tl.int64))
    tl.atomic_max(mask_row + f.LOWEST_MEAN, tl.max(lowest, 0).to(tl.int64))
    idle = tl.sum(num_idle, 0)
    if idle > 0:
        tl.atomic_add(mask_row + f.NUM_IDLE, idle.to(tl.int64))


@triton.jit
def next_columns(column, row_elems, STEP: tl.constexpr):
    """Columns of the values one step further, STEP = 32, or one step back, STEP = -32."""
    column += STEP
    if STEP < 0:
        return tl.where(column < 0, column + row_elems, column)
    return tl.where(column >= row_elems, column - row_elems, column)
