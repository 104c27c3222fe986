"""Encodes whole segments, two to a program: symbols, raw bits and rANS in one pass, for a fixed width of the raw bits."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.bits import UNROLL, put_bits, store_bits, take_bits
from thinpoint.device.kernels.coder import BALLOT, push_symbol, ranks
from thinpoint.device.kernels.patching import add_patches
from thinpoint.device.kernels.scan import next_columns, word_pointer


@triton.jit
def symbols_of(top, prediction, lowest, highest, zero_bad):
    """(symbol, whether it has to be patched); symbol 0 if the top is 0."""
    symbol = tl.where(top == 0, 0, top - prediction)
    bad = tl.where(top == 0, zero_bad, (symbol < lowest) | (symbol > highest))
    return symbol, bad


@triton.jit
def load_back(words, step):
    """The values of a step."""
    return tl.load(words + step * 32).to(tl.uint32)


@triton.jit
def encode_step(
    word,
    prediction,
    window,
    fill,
    table,
    scratch_at,
    lane,
    state,
    count,
    held,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Code one value in each lane.

    Returns:
        The new (state, words so far, raw bits of the steps from J on), and which values have to be patched.
    """
    lowest, highest, zero_bad = window
    top_at: tl.constexpr = SHIFT + LOW_BITS
    top_bits: tl.constexpr = WIDTH - top_at - (1 if WIDTH > 8 else 0)
    top = ((word >> top_at) & ((1 << top_bits) - 1)).to(tl.int32)
    symbol, bad = symbols_of(top, prediction, lowest, highest, zero_bad)
    if RAW_BITS > 0:
        bits = take_bits(word, WIDTH - 1, LOW_BITS, SHIFT, SIGNED)
        held = put_bits(held, bits, J * RAW_BITS, RAW_BITS)
    emit, new_state = push_symbol(state, tl.where(bad, fill, symbol), table)
    rank, num = ranks(emit, lane, BALLOT)
    tl.store((scratch_at + count) + rank, state.to(tl.uint16), mask=emit)
    return new_state, count + num, held, bad


@triton.jit
def late_patches(
    words,
    elems,
    means_at,
    stride,
    base,
    profile,
    row_elems,
    window,
    patches,
    num_patches,
    capacity,
    part,
    fields,
    step,
    TOP_AT: tl.constexpr,
    TOP_BITS: tl.constexpr,
    PROFILE: tl.constexpr,
):
    """Look again at steps in which something has to be patched. Seldom."""
    lowest, highest, zero_bad = window
    for k in range(UNROLL):
        late = step + k
        elem = elems + late * 32
        top = ((tl.load(words + elem).to(tl.uint32) >> TOP_AT) & ((1 << TOP_BITS) - 1)).to(tl.int32)
        prediction = tl.load(means_at + stride * (late // 8)) + base
        if PROFILE:
            prediction += tl.load(profile + elem % row_elems)
        _, bad = symbols_of(top, prediction, lowest, highest, zero_bad)
        num_bad = tl.sum(bad.to(tl.int32), 0)
        if num_bad > 0:
            add_patches(patches, num_patches, capacity, part, fields, elem, top, bad, num_bad)


@triton.jit
def encode_pair(
    segment,
    segments,
    parts,
    means,
    profiles,
    entries,
    raw,
    scratch,
    counts,
    states,
    patches,
    num_patches,
    capacity,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    PROFILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The work of `encode_whole` on a pair of segments, of a part with a column profile or without.

    The two, a and b, are independent chains that hide each other's latency.
    """
    row_a = segments + segment * f.SEGMENT_COLUMNS
    row_b = row_a + f.SEGMENT_COLUMNS
    part = tl.load(row_a + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    lane = tl.arange(0, 32)
    first = (tl.load(row_a + f.SEG_INDEX) * (STEPS * 32)).to(tl.int32)
    elems_a = first + lane
    elems_b = elems_a + STEPS * 32
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    words_a = words + elems_a
    words_b = words + elems_b
    raw_a = raw + (tl.load(row_a + f.SEG_RAW_AT) + lane)
    raw_b = raw + (tl.load(row_b + f.SEG_RAW_AT) + lane)
    # Ranks count from 1.
    scratch_a = scratch + (tl.load(row_a + f.SEG_SCRATCH_AT) - 1)
    scratch_b = scratch + (tl.load(row_b + f.SEG_SCRATCH_AT) - 1)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    means_a = means + tl.load(fields + f.MEANS_AT) + stride * (first // 256)
    means_b = means_a + stride * (STEPS // 8)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    zero_bad = tl.load(fields + f.ZERO_PRESENT) == 0
    fill = tl.load(fields + f.FILL).to(tl.int32)
    window = (tl.load(fields + f.LOWEST).to(tl.int32), tl.load(fields + f.HIGHEST).to(tl.int32), zero_bad)
    table = entries + part * f.SYMBOLS
    top_at: tl.constexpr = SHIFT + LOW_BITS
    top_bits: tl.constexpr = WIDTH - top_at - (1 if WIDTH > 8 else 0)
    row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
    profile = profiles + tl.load(fields + f.PROFILE_AT)
    if PROFILE:
        column_a = (elems_a + (STEPS - 1) * 32) % row_elems
        column_b = (elems_b + (STEPS - 1) * 32) % row_elems

    state_a = tl.full([32], f.STATE_LOW, tl.uint32)
    state_b = tl.full([32], f.STATE_LOW, tl.uint32)
    count_a = segment.to(tl.int32) * 0
    count_b = count_a
    # Values are loaded two steps before they are coded.
    word_a, next_a = load_back(words_a, STEPS - 1), load_back(words_a, STEPS - 2)
    word_b, next_b = load_back(words_b, STEPS - 1), load_back(words_b, STEPS - 2)
    last_word: tl.constexpr = STEPS * RAW_BITS // 32 - 1
    none = tl.zeros([32], tl.uint32)
    carry_a = none
    carry_b = none
    for chunk in range(STEPS // UNROLL):
        step = STEPS - UNROLL * (chunk + 1)
        any_bad = tl.zeros([32], tl.int1)
        held_a = (none, none, none)
        held_b = (none, none, none)
        mean_a = tl.load(means_a + stride * (step // 8)) + base
        mean_b = tl.load(means_b + stride * (step // 8)) + base
        from_a = words_a + step * 32
        from_b = words_b + step * 32
        for j in tl.static_range(UNROLL - 1, -1, -1):
            if j >= 2:
                later_a = tl.load(from_a + (j - 2) * 32).to(tl.uint32)
                later_b = tl.load(from_b + (j - 2) * 32).to(tl.uint32)
            else:
                later_a = load_back(words_a, tl.maximum(step + j - 2, 0))
                later_b = load_back(words_b, tl.maximum(step + j - 2, 0))
            prediction_a = lane * 0 + mean_a
            prediction_b = lane * 0 + mean_b
            if PROFILE:
                prediction_a += tl.load(profile + column_a)
                prediction_b += tl.load(profile + column_b)
                column_a = next_columns(column_a, row_elems, -32)
                column_b = next_columns(column_b, row_elems, -32)
            state_a, count_a, held_a, bad_a = encode_step(
                word_a,
                prediction_a,
                window,
                fill,
                table,
                scratch_a,
                lane,
                state_a,
                count_a,
                held_a,
                j,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
            )
            state_b, count_b, held_b, bad_b = encode_step(
                word_b,
                prediction_b,
                window,
                fill,
                table,
                scratch_b,
                lane,
                state_b,
                count_b,
                held_b,
                j,
                WIDTH,
                RAW_BITS,
                LOW_BITS,
                SHIFT,
                SIGNED,
            )
            any_bad = any_bad | bad_a | bad_b
            word_a, next_a = next_a, later_a
            word_b, next_b = next_b, later_b
        if RAW_BITS > 0:
            carry_a = store_bits(raw_a, held_a, carry_a, step, last_word, RAW_BITS)
            carry_b = store_bits(raw_b, held_b, carry_b, step, last_word, RAW_BITS)
        if tl.max(any_bad.to(tl.int32), 0) > 0:
            late_patches(
                words,
                elems_a,
                means_a,
                stride,
                base,
                profile,
                row_elems,
                window,
                patches,
                num_patches,
                capacity,
                part,
                fields,
                step,
                top_at,
                top_bits,
                PROFILE,
            )
            late_patches(
                words,
                elems_b,
                means_b,
                stride,
                base,
                profile,
                row_elems,
                window,
                patches,
                num_patches,
                capacity,
                part,
                fields,
                step,
                top_at,
                top_bits,
                PROFILE,
            )
    if RAW_BITS > 0:
        tl.store(raw_a, carry_a)
        tl.store(raw_b, carry_b)
    tl.store(states + segment * 32 + lane, state_a)
    tl.store(states + (segment + 1) * 32 + lane, state_b)
    tl.store(counts + segment, count_a)
    tl.store(counts + segment + 1, count_b)


@triton.jit(do_not_specialize=["capacity"])
def encode_whole(
    programs,
    segments,
    parts,
    means,
    profiles,
    entries,
    raw,
    scratch,
    counts,
    states,
    patches,
    num_patches,
    capacity,
    WIDTH: tl.constexpr,
    RAW_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Encode two consecutive whole segments of one part, all of whose groups are coded.

    programs: int64, first segment of each program. raw: uint32; scratch: uint16; counts: int32, words of each segment;
    states: uint32[segments, 32]; patches: int64, see `add_patches`. SHIFT: trailing zeros.
    STEPS x RAW_BITS is a multiple of 32.
    """
    segment = tl.load(programs + tl.program_id(0))
    part = tl.load(segments + segment * f.SEGMENT_COLUMNS + f.SEG_PART)
    if tl.load(parts + part * f.PART_COLUMNS + f.HAS_PROFILE) != 0:
        encode_pair(
            segment,
            segments,
            parts,
            means,
            profiles,
            entries,
            raw,
            scratch,
            counts,
            states,
            patches,
            num_patches,
            capacity,
            WIDTH,
            RAW_BITS,
            LOW_BITS,
            SHIFT,
            SIGNED,
            True,
            STEPS,
        )
    else:
        encode_pair(
            segment,
            segments,
            parts,
            means,
            profiles,
            entries,
            raw,
            scratch,
            counts,
            states,
            patches,
            num_patches,
            capacity,
            WIDTH,
            RAW_BITS,
            LOW_BITS,
            SHIFT,
            SIGNED,
            False,
            STEPS,
        )
