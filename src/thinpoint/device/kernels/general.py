"""Segments that the other two do not take: incomplete ones, zero groups, unusual widths, words of 64 bits. One to a program."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.coder import BALLOT, pull_symbol, push_symbol, ranks, read_ahead, refill
from thinpoint.device.kernels.patching import add_patches
from thinpoint.device.kernels.scan import word_pointer


@triton.jit
def group_of_step(step, first_group, order, is_listed, order_at):
    """The group that a step's values come from. order: of the part, if `is_listed`."""
    listed = tl.load(order + order_at + step // 8, mask=is_listed, other=0)
    return tl.where(is_listed, listed, first_group + step // 8)


@triton.jit
def predict_step(step, group, lane, values, mean_at, stride, base, profile, has_profile, row_elems):
    """(elements of a step, which of them there are, their predictions)."""
    use = step * 32 + lane < values
    elem = group * 256 + (step % 8) * 32 + lane
    prediction = tl.load(mean_at + stride * group) + base
    return elem, use, prediction + tl.load(profile + elem % row_elems, mask=use & has_profile, other=0)


@triton.jit
def raw_bits_of_step(raw, step, raw_bits, num_words, some):
    """Raw bits of a step's values (uint64, the lowest bits count). raw: where those of each lane begin."""
    position = step * raw_bits
    at = position // 32
    within = position % 32
    reach = within + raw_bits
    first = tl.load(raw + at * 32, mask=some & (at < num_words), other=0).to(tl.uint64)
    second = tl.load(raw + (at + 1) * 32, mask=some & (reach > 32) & (at + 1 < num_words), other=0)
    third = tl.load(raw + (at + 2) * 32, mask=some & (reach > 64) & (at + 2 < num_words), other=0)
    bits = (first | (second.to(tl.uint64) << 32)) >> within.to(tl.uint64)
    # Beyond 64 bits there is something only if `within` is not 0.
    return bits | (third.to(tl.uint64) << ((64 - within) % 64).to(tl.uint64))


@triton.jit
def push_bits(raw, at, current, word_now, value, position, width):
    """Put `width` bits (at most 32) of each lane before those pushed so far, at a bit position that only falls.

    (bits of the word being filled, its number); words are stored when they are full.
    """
    last = (position + width - 1) // 32
    first = position // 32
    shift = position % 32
    if last != word_now:
        tl.store(raw + at + word_now * f.LANES, current)
        current = tl.zeros_like(current)
    if first != last:
        tl.store(raw + at + last * f.LANES, current | (value >> (32 - shift).to(tl.uint32)))
        current = value << shift.to(tl.uint32)
    else:
        current |= value << shift.to(tl.uint32)
    return current, first


@triton.jit(do_not_specialize=["capacity"])
def encode_any(
    programs,
    segments,
    parts,
    means,
    profiles,
    order,
    entries,
    raw,
    scratch,
    counts,
    states,
    patches,
    num_patches,
    capacity,
    WIDTH: tl.constexpr,
):
    """Encode one segment. Arguments as `encode.encode_whole`; order: int32, groups that are coded."""
    segment = tl.load(programs + tl.program_id(0))
    row = segments + segment * f.SEGMENT_COLUMNS
    part = tl.load(row + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    lane = tl.arange(0, 32)
    values = tl.load(row + f.SEG_VALUES).to(tl.int32)
    order_at = tl.load(row + f.SEG_ORDER_AT)
    has_order = tl.load(fields + f.ORDER_AT) >= 0
    first_group = (tl.load(row + f.SEG_INDEX) * tl.load(fields + f.STEPS)).to(tl.int32) // 8
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    raw_at = tl.load(row + f.SEG_RAW_AT) + lane
    scratch_at = tl.load(row + f.SEG_SCRATCH_AT)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    mean_at = means + tl.load(fields + f.MEANS_AT)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    lowest = tl.load(fields + f.LOWEST).to(tl.int32)
    highest = tl.load(fields + f.HIGHEST).to(tl.int32)
    zero_bad = tl.load(fields + f.ZERO_PRESENT) == 0
    fill = tl.load(fields + f.FILL).to(tl.int32)
    table = entries + part * f.SYMBOLS
    has_profile = tl.load(fields + f.HAS_PROFILE) != 0
    row_elems = tl.maximum(tl.load(fields + f.ROW_ELEMS), 1).to(tl.int32)
    profile = profiles + tl.load(fields + f.PROFILE_AT)
    raw_bits = tl.load(fields + f.RAW_BITS).to(tl.int32)
    low_bits = tl.load(fields + f.LOW_BITS).to(tl.uint64)
    shift = tl.load(fields + f.TRAILING_ZEROS).to(tl.uint64)
    top_shift = tl.load(fields + f.TOP_SHIFT).to(tl.uint64)
    top_mask = tl.load(fields + f.TOP_MASK).to(tl.uint64)
    sign_stored = tl.load(fields + f.SIGN_STORED) != 0
    one = tl.full([], 1, tl.uint64)

    steps = (values + 31) // 32
    is_listed = has_order & (steps > 0)
    state = tl.full([32], f.STATE_LOW, tl.uint32)
    count = tl.zeros([], tl.int32)
    current = tl.zeros([32], tl.uint32)
    word_now = (steps * raw_bits + 31) // 32 - 1
    step = steps - 1
    # Values are loaded one step before they are coded, and their group one before that: one group serves eight steps.
    group = group_of_step(tl.maximum(step, 0), first_group, order, is_listed, order_at)
    elem, use, prediction = predict_step(
        tl.maximum(step, 0), group, lane, values, mean_at, stride, base, profile, has_profile, row_elems
    )
    word = tl.load(words + elem, mask=use, other=0).to(tl.uint64)
    group = group_of_step(tl.maximum(step - 1, 0), first_group, order, is_listed, order_at)
    while step >= 0:
        before = tl.maximum(step - 1, 0)
        next_elem, next_use, next_prediction = predict_step(
            before, group, lane, values, mean_at, stride, base, profile, has_profile, row_elems
        )
        next_word = tl.load(words + next_elem, mask=next_use, other=0).to(tl.uint64)
        group = group_of_step(tl.maximum(step - 2, 0), first_group, order, is_listed, order_at)
        top = ((word >> top_shift) & top_mask).to(tl.int32)
        symbol = top - prediction
        is_zero = top == 0
        bad = use & tl.where(is_zero, zero_bad, (symbol < lowest) | (symbol > highest))
        num_bad = tl.sum(bad.to(tl.int32), 0)
        if num_bad > 0:
            add_patches(patches, num_patches, capacity, part, fields, elem, top, bad, num_bad)
        symbol = tl.where(bad, fill, tl.where(is_zero, 0, symbol))
        if raw_bits > 0:
            bits = (word >> shift) & ((one << low_bits) - 1)
            if sign_stored:
                bits |= (word >> (WIDTH - 1)) << low_bits
            position = step * raw_bits
            if raw_bits > 32:
                current, word_now = push_bits(
                    raw, raw_at, current, word_now, (bits >> 32).to(tl.uint32), position + 32, raw_bits - 32
                )
                current, word_now = push_bits(
                    raw, raw_at, current, word_now, bits.to(tl.uint32), position, raw_bits * 0 + 32
                )
            else:
                current, word_now = push_bits(
                    raw, raw_at, current, word_now, bits.to(tl.uint32), position, raw_bits
                )
        symbol = tl.where(use, symbol, fill)
        old = state
        emit, moved = push_symbol(state, symbol, table)
        emit = emit & use
        state = tl.where(use, moved, state)
        rank, num = ranks(emit, lane, BALLOT)
        tl.store(scratch + scratch_at + (count + rank - 1), (old & 0xFFFF).to(tl.uint16), mask=emit)
        count += num
        elem, use, prediction, word = next_elem, next_use, next_prediction, next_word
        step -= 1
    if (raw_bits > 0) & (steps > 0):
        tl.store(raw + raw_at + word_now * f.LANES, current)
    tl.store(states + segment * f.LANES + lane, state)
    tl.store(counts + segment, count)


@triton.jit
def decode_any(
    programs,
    segments,
    parts,
    means,
    profiles,
    order,
    tables,
    raw,
    entropy_words,
    entropy_states,
    counts,
    errors,
    WIDTH: tl.constexpr,
):
    """Decode one segment; words of zero groups are left as they are. Arguments as `decode.decode_whole`."""
    segment = tl.load(programs + tl.program_id(0))
    row = segments + segment * f.SEGMENT_COLUMNS
    part = tl.load(row + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    lane = tl.arange(0, 32)
    values = tl.load(row + f.SEG_VALUES).to(tl.int32)
    order_at = tl.load(row + f.SEG_ORDER_AT)
    has_order = tl.load(fields + f.ORDER_AT) >= 0
    first_group = (tl.load(row + f.SEG_INDEX) * tl.load(fields + f.STEPS)).to(tl.int32) // 8
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    raw_at = tl.load(row + f.SEG_RAW_AT) + lane
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    mean_at = means + tl.load(fields + f.MEANS_AT)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    table = tables + part * f.TABLE_WORDS
    slots = (table + f.TABLE_SLOTS_AT).to(tl.pointer_type(tl.uint8), bitcast=True)
    single = tl.load(fields + f.SINGLE).to(tl.int32)
    has_profile = tl.load(fields + f.HAS_PROFILE) != 0
    row_elems = tl.maximum(tl.load(fields + f.ROW_ELEMS), 1).to(tl.int32)
    profile = profiles + tl.load(fields + f.PROFILE_AT)
    raw_bits = tl.load(fields + f.RAW_BITS).to(tl.int32)
    low_bits = tl.load(fields + f.LOW_BITS).to(tl.uint64)
    shift = tl.load(fields + f.TRAILING_ZEROS).to(tl.uint64)
    top_shift = tl.load(fields + f.TOP_SHIFT).to(tl.uint64)
    top_mask = tl.load(fields + f.TOP_MASK).to(tl.int32)
    sign_stored = tl.load(fields + f.SIGN_STORED) != 0
    sign = tl.load(fields + f.SIGN_VALUE).to(tl.uint64, bitcast=True)
    one = tl.full([], 1, tl.uint64)

    steps = (values + 31) // 32
    is_listed = has_order & (steps > 0)
    num_words = (steps * raw_bits + 31) // 32
    words_at = entropy_words + tl.load(row + f.SEG_WORDS_AT) - 1
    left = tl.load(counts + segment)
    state = tl.full([32], f.STATE_LOW, tl.uint32)
    if single < 0:
        state = tl.load(entropy_states + tl.load(row + f.SEG_STATES_AT) + lane)
    bad_state = (state < f.STATE_LOW) | (state >= (1 << 31))
    some = lane < 32 * (raw_bits > 0).to(tl.int32)
    raw_lane = raw + raw_at
    step = steps * 0
    last = tl.maximum(steps - 1, 0)
    # As in `encode_any`.
    group = group_of_step(step, first_group, order, is_listed, order_at)
    elem, use, prediction = predict_step(
        step, group, lane, values, mean_at, stride, base, profile, has_profile, row_elems
    )
    bits = raw_bits_of_step(raw_lane, step, raw_bits, num_words, some)
    group = group_of_step(tl.minimum(step + 1, last), first_group, order, is_listed, order_at)
    ahead = tl.zeros([32], tl.uint32)
    while step < steps:
        if step % 16 == 0:
            ahead ^= read_ahead(words_at, left, lane)
        after = tl.minimum(step + 1, last)
        next_elem, next_use, next_prediction = predict_step(
            after, group, lane, values, mean_at, stride, base, profile, has_profile, row_elems
        )
        next_bits = raw_bits_of_step(raw_lane, after, raw_bits, num_words, some)
        group = group_of_step(tl.minimum(step + 2, last), first_group, order, is_listed, order_at)
        symbol = tl.full([32], 0, tl.int32) + single
        if single < 0:
            symbol, moved, need = pull_symbol(state, table, slots)
            need = need & use
            rank, num = ranks(need, lane, BALLOT)
            left -= num
            moved = refill(moved, need, left + rank, words_at)
            state = tl.where(use, moved, state)
        top = tl.where(symbol == 0, 0, (symbol + prediction) & top_mask)
        word = (top.to(tl.uint64) << top_shift) | ((bits & ((one << low_bits) - 1)) << shift)
        if sign_stored:
            word |= ((bits >> low_bits) & 1) << (WIDTH - 1)
        else:
            word |= sign
        tl.store(words + elem, word.to(words.dtype.element_ty), mask=use)
        elem, use, prediction, bits = next_elem, next_use, next_prediction, next_bits
        step += 1
    # Only to have them used: otherwise the compiler would drop the reads.
    tl.store(counts + segment, tl.max(ahead, 0).to(tl.int32))
    bad_end = (state != f.STATE_LOW) | (left != 0)
    flags = tl.max(tl.where(bad_state, f.BAD_STATE, 0) | tl.where(bad_end, f.BAD_END, 0), 0)
    if (flags != 0) & (single < 0):
        tl.atomic_or(errors + part, flags)
