"""Decodes whole segments, two to a program, for a fixed width of the raw bits."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.bits import UNROLL, align_bits, get_bits, load_bits
from thinpoint.device.kernels.coder import BALLOT, pull_symbol, ranks, read_ahead, refill
from thinpoint.device.kernels.scan import next_columns, word_pointer


@triton.jit
def join(
    symbol,
    prediction,
    bits,
    sign,
    WIDTH: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Words (uint32) from symbols, predictions and raw bits."""
    top_at: tl.constexpr = SHIFT + LOW_BITS
    top_bits: tl.constexpr = WIDTH - top_at - (1 if WIDTH > 8 else 0)
    top = tl.where(symbol == 0, 0, (symbol + prediction) & ((1 << top_bits) - 1))
    word = (top.to(tl.uint32) << top_at) | ((bits & ((1 << LOW_BITS) - 1)) << SHIFT)
    if SIGNED:
        word |= (bits >> LOW_BITS) << (WIDTH - 1)
    elif WIDTH > 8:
        word |= sign
    return word


@triton.jit
def decode_step(
    prediction,
    table,
    slots,
    words_at,
    sign,
    lane,
    state,
    left,
    held,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """One value of each lane: (word, and the new state, words left). held: raw bits of UNROLL steps, of which this is the Jth."""
    bits = tl.zeros([32], tl.uint32)
    if RAW_BITS > 0:
        bits = get_bits(held, J * RAW_BITS, RAW_BITS)
    symbol, state, need = pull_symbol(state, table, slots)
    rank, num = ranks(need, lane, BALLOT)
    left -= num
    state = refill(state, need, left + rank, words_at)
    return join(symbol, prediction, bits, sign, WIDTH, LOW_BITS, SHIFT, SIGNED), state, left


@triton.jit
def decode_pair(
    segment,
    segments,
    parts,
    means,
    profiles,
    tables,
    raw,
    entropy_words,
    entropy_states,
    counts,
    errors,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    PROFILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The work of `decode_whole` on a pair of segments, of a part with a column profile or without."""
    row_a = segments + segment * f.SEGMENT_COLUMNS
    row_b = row_a + f.SEGMENT_COLUMNS
    part = tl.load(row_a + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    lane = tl.arange(0, 32)
    first = (tl.load(row_a + f.SEG_INDEX) * (STEPS * 32)).to(tl.int32)
    elems_a = first + lane
    elems_b = elems_a + STEPS * 32
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    raw_a = raw + (tl.load(row_a + f.SEG_RAW_AT) + lane)
    raw_b = raw + (tl.load(row_b + f.SEG_RAW_AT) + lane)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    means_a = means + tl.load(fields + f.MEANS_AT) + stride * (first // 256)
    means_b = means_a + stride * (STEPS // 8)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    sign = tl.load(fields + f.SIGN_VALUE).to(tl.uint32)
    table = tables + part * f.TABLE_WORDS
    slots = (table + f.TABLE_SLOTS_AT).to(tl.pointer_type(tl.uint8), bitcast=True)
    if PROFILE:
        row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
        profile = profiles + tl.load(fields + f.PROFILE_AT)
        column_a = elems_a % row_elems
        column_b = elems_b % row_elems

    entropy_a = entropy_words + (tl.load(row_a + f.SEG_WORDS_AT) - 1)
    entropy_b = entropy_words + (tl.load(row_b + f.SEG_WORDS_AT) - 1)
    left_a = tl.load(counts + segment)
    left_b = tl.load(counts + segment + 1)
    state_a = tl.load(entropy_states + (tl.load(row_a + f.SEG_STATES_AT) + lane))
    state_b = tl.load(entropy_states + (tl.load(row_b + f.SEG_STATES_AT) + lane))
    bad_state = (
        (state_a < f.STATE_LOW) | (state_a >= (1 << 31)) | (state_b < f.STATE_LOW) | (state_b >= (1 << 31))
    )
    last_word: tl.constexpr = STEPS * RAW_BITS // 32 - 1
    # Raw bits are loaded UNROLL steps before they are needed.
    loaded_a = (state_a, state_a, state_a, state_a)
    loaded_b = (state_b, state_b, state_b, state_b)
    if RAW_BITS > 0:
        loaded_a = load_bits(raw_a, left_a * 0, last_word, RAW_BITS)
        loaded_b = load_bits(raw_b, left_a * 0, last_word, RAW_BITS)
    ahead = tl.zeros([32], tl.uint32)
    for chunk in range(STEPS // UNROLL):
        step = UNROLL * chunk
        if chunk % 4 == 0:
            ahead ^= read_ahead(entropy_a, left_a, lane) ^ read_ahead(entropy_b, left_b, lane)
        held_a = align_bits(loaded_a, step, RAW_BITS)
        held_b = align_bits(loaded_b, step, RAW_BITS)
        if RAW_BITS > 0:
            loaded_a = load_bits(raw_a, step + UNROLL, last_word, RAW_BITS)
            loaded_b = load_bits(raw_b, step + UNROLL, last_word, RAW_BITS)
        to_a = words + (elems_a + step * 32)
        to_b = words + (elems_b + step * 32)
        mean_a = tl.load(means_a + stride * (step // 8)) + base
        mean_b = tl.load(means_b + stride * (step // 8)) + base
        for j in tl.static_range(UNROLL):
            prediction_a = lane * 0 + mean_a
            prediction_b = lane * 0 + mean_b
            if PROFILE:
                prediction_a += tl.load(profile + column_a)
                prediction_b += tl.load(profile + column_b)
                column_a = next_columns(column_a, row_elems, 32)
                column_b = next_columns(column_b, row_elems, 32)
            word_a, state_a, left_a = decode_step(
                prediction_a,
                table,
                slots,
                entropy_a,
                sign,
                lane,
                state_a,
                left_a,
                held_a,
                j,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
            )
            word_b, state_b, left_b = decode_step(
                prediction_b,
                table,
                slots,
                entropy_b,
                sign,
                lane,
                state_b,
                left_b,
                held_b,
                j,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
            )
            tl.store(to_a + j * 32, word_a.to(words.dtype.element_ty))
            tl.store(to_b + j * 32, word_b.to(words.dtype.element_ty))
    # Only to have them used: otherwise the compiler would drop the reads.
    tl.store(counts + segment, tl.max(ahead, 0).to(tl.int32))
    bad_end = (state_a != f.STATE_LOW) | (left_a != 0) | (state_b != f.STATE_LOW) | (left_b != 0)
    flags = tl.max(tl.where(bad_state, f.BAD_STATE, 0) | tl.where(bad_end, f.BAD_END, 0), 0)
    if flags != 0:
        tl.atomic_or(errors + part, flags)


@triton.jit
def decode_whole(
    programs,
    segments,
    parts,
    means,
    profiles,
    tables,
    raw,
    entropy_words,
    entropy_states,
    counts,
    errors,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Decode what `encode_whole` made into the words at the part's address; patches are left to `apply_patches`.

    tables: uint32[parts, TABLE_WORDS]. entropy_words, entropy_states: the same bytes as uint16 and uint32. counts: int32, checked
    by `open_blocks`; overwritten. errors: int32, or-ed for each part. Whatever the bytes say, reads and writes stay inside of
    the segments.
    """
    segment = tl.load(programs + tl.program_id(0))
    part = tl.load(segments + segment * f.SEGMENT_COLUMNS + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    # Parts of a single symbol are the general kernel's.
    if tl.load(fields + f.SINGLE) < 0:
        if tl.load(fields + f.HAS_PROFILE) != 0:
            decode_pair(
                segment,
                segments,
                parts,
                means,
                profiles,
                tables,
                raw,
                entropy_words,
                entropy_states,
                counts,
                errors,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
                True,
                STEPS,
            )
        else:
            decode_pair(
                segment,
                segments,
                parts,
                means,
                profiles,
                tables,
                raw,
                entropy_words,
                entropy_states,
                counts,
                errors,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
                False,
                STEPS,
            )
