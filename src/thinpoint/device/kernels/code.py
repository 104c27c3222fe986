"""Whole segments, several to a program: symbols, raw bits and rANS in one pass, unrolled for a fixed width of the raw bits."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.scan import word_pointer


@triton.jit
def add_patches(patches, num_patches, capacity, part, fields, elem, top, bad, num):
    """Append `num` patches in any order: part << 42 | element << 16 | top. Beyond the capacity they are only counted."""
    tl.atomic_add(fields + f.NUM_PATCHES, num.to(tl.int64))
    at = tl.atomic_add(num_patches + tl.zeros_like(elem), 1, mask=bad)
    entry = part << 42 | elem.to(tl.int64) << 16 | top.to(tl.int64)
    tl.store(patches + at, entry, mask=bad & (at < capacity))


@triton.jit
def push_symbol(state, symbol, entries):
    """(which lanes emit the low 16 bits of their state first, the state after coding a symbol)."""
    entry = tl.load(entries + symbol).to(tl.uint64, bitcast=True)
    reciprocal = entry.to(tl.uint32)
    high = (entry >> 32).to(tl.uint32)
    freq = high & 0x1FFF
    bias = (high >> 13) & 0x1FFF
    emit = state >= (freq << 19)
    shrunk = tl.where(emit, state >> 16, state)
    return emit, shrunk + bias + (tl.umulhi(shrunk, reciprocal) >> (high >> 26)) * (4096 - freq)


@triton.jit
def ranks(flags, last):
    """(inclusive rank of each set flag in its half, set flags of its half) of 2 x 32 flags: one prefix sum for both halves.

    flags: bool[64]. last: int32[32], all 31.
    """
    shift = (tl.arange(0, 2) * 16)[:, None]
    packed = tl.sum(tl.reshape(flags.to(tl.int32), [2, 32]) << shift, 0)
    prefix = tl.cumsum(packed, 0)
    total = tl.gather(prefix, last, 0)
    rank = tl.reshape((prefix[None, :] >> shift) & 0xFFFF, [64])
    return rank, tl.reshape((total[None, :] >> shift) & 0xFFFF, [64])


@triton.jit
def symbols_of(top, prediction, lowest, highest, zero_bad):
    """(symbol, whether it has to be patched); symbol 0 if the top is 0."""
    symbol = tl.where(top == 0, 0, top - prediction)
    bad = tl.where(top == 0, zero_bad, (symbol < lowest) | (symbol > highest))
    return symbol, bad


@triton.jit
def take_bits(word, SIGN_AT: tl.constexpr, LOW_BITS: tl.constexpr, SHIFT: tl.constexpr, SIGNED: tl.constexpr):
    """The raw bits of words: low bits and, where it is stored, the sign above them."""
    bits = (word >> SHIFT) & ((1 << LOW_BITS) - 1)
    if SIGNED:
        bits |= (word >> SIGN_AT) << LOW_BITS
    return bits


@triton.jit
def push_raw(line, current, bits, J: tl.constexpr, RAW_BITS: tl.constexpr):
    """Put raw bits of step J before those pushed so far (of later steps); stores words that are full. line: pointers."""
    at: tl.constexpr = (J * RAW_BITS) % 32
    number: tl.constexpr = (J * RAW_BITS) // 32
    if at + RAW_BITS > 32:
        tl.store(line + (number + 1) * 32, current | (bits >> (32 - at)))
        current = bits << at
    else:
        current |= bits << at
    if at == 0:
        tl.store(line + number * 32, current)
        current = tl.zeros_like(current)
    return current


@triton.jit
def mean_of_halves(means_at, stride, step, half, STEPS: tl.constexpr):
    """Mean of the group that a step of each half belongs to."""
    at = means_at + stride * (step // 8)
    return tl.where(half == 0, tl.load(at), tl.load(at + stride * (STEPS // 8)))


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
    PROFILE: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Encode two consecutive whole segments of one part, all of whose groups are coded.

    The two halves of every tensor are independent chains that hide each other's latency and share a prefix sum.

    programs: int64, first segment of each program. raw: uint32; scratch: uint16; counts: int32, words of each segment;
    states: uint32[segments, 32]; patches: int64, see `add_patches`. SHIFT: trailing zeros.
    UNROLL x RAW_BITS is a multiple of 32. A program leaves at once if its part is planned otherwise than PROFILE says.
    """
    first_segment = tl.load(programs + tl.program_id(0))
    both = tl.arange(0, 64)
    lane = both % 32
    half = both // 32
    last = tl.arange(0, 32) * 0 + 31
    rows = segments + (first_segment + half) * f.SEGMENT_COLUMNS
    part = tl.load(segments + first_segment * f.SEGMENT_COLUMNS + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    if (tl.load(fields + f.HAS_PROFILE) != 0) != PROFILE:
        return
    first = (tl.load(segments + first_segment * f.SEGMENT_COLUMNS + f.SEG_INDEX) * (STEPS * 32)).to(tl.int32)
    elems = first + half * (STEPS * 32) + lane
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    raw_at = raw + (tl.load(rows + f.SEG_RAW_AT) + lane)
    # Ranks count from 1.
    scratch_at = scratch + (tl.load(rows + f.SEG_SCRATCH_AT) - 1)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    means_at = means + tl.load(fields + f.MEANS_AT) + stride * (first // 256)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    lowest = tl.load(fields + f.LOWEST).to(tl.int32)
    highest = tl.load(fields + f.HIGHEST).to(tl.int32)
    zero_bad = tl.load(fields + f.ZERO_PRESENT) == 0
    fill = tl.load(fields + f.FILL).to(tl.int32)
    table = entries + part * f.SYMBOLS
    top_at: tl.constexpr = SHIFT + LOW_BITS
    top_bits: tl.constexpr = WIDTH - top_at - (1 if WIDTH > 8 else 0)
    row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
    profile = profiles + tl.load(fields + f.PROFILE_AT)
    if PROFILE:
        column = (elems + (STEPS - 1) * 32) % row_elems

    state = tl.full([64], f.STATE_LOW, tl.uint32)
    count = tl.zeros([64], tl.int32)
    for chunk in range(STEPS // UNROLL):
        step = STEPS - UNROLL * (chunk + 1)
        current = tl.zeros([64], tl.uint32)
        any_bad = tl.zeros([64], tl.int1)
        line = raw_at + (step * RAW_BITS // 32) * 32
        for j in tl.static_range(UNROLL - 1, -1, -1):
            if j % 8 == 7:
                mean = mean_of_halves(means_at, stride, step + j, half, STEPS) + base
            word = tl.load(words + (elems + (step + j) * 32)).to(tl.uint32)
            top = ((word >> top_at) & ((1 << top_bits) - 1)).to(tl.int32)
            prediction = mean
            if PROFILE:
                prediction = mean + tl.load(profile + column)
                column -= 32
                column = tl.where(column < 0, column + row_elems, column)
            symbol, bad = symbols_of(top, prediction, lowest, highest, zero_bad)
            any_bad = any_bad | bad
            if RAW_BITS > 0:
                bits = take_bits(word, WIDTH - 1, LOW_BITS, SHIFT, SIGNED)
                current = push_raw(line, current, bits, j, RAW_BITS)
            old = state
            emit, state = push_symbol(state, tl.where(bad, fill, symbol), table)
            rank, num = ranks(emit, last)
            tl.store(scratch_at + (count + rank), old.to(tl.uint16), mask=emit)
            count += num
        if tl.max(any_bad.to(tl.int32), 0) > 0:
            # Seldom: look again for what has to be patched.
            for k in range(UNROLL):
                late = step + k
                late_elem = elems + late * 32
                late_top = ((tl.load(words + late_elem).to(tl.uint32) >> top_at) & ((1 << top_bits) - 1)).to(
                    tl.int32
                )
                late_prediction = mean_of_halves(means_at, stride, late, half, STEPS) + base
                if PROFILE:
                    late_prediction += tl.load(profile + late_elem % row_elems)
                _, late_bad = symbols_of(late_top, late_prediction, lowest, highest, zero_bad)
                num_bad = tl.sum(late_bad.to(tl.int32), 0)
                if num_bad > 0:
                    add_patches(
                        patches, num_patches, capacity, part, fields, late_elem, late_top, late_bad, num_bad
                    )
    tl.store(states + (first_segment * 32 + both), state)
    tl.store(counts + (first_segment + half), count, mask=lane == 0)


@triton.jit
def pull_symbol(state, table, slots):
    """(symbol, state after the step, which lanes need a word): the inverse of `push_symbol`.

    table: see `fields.TABLE_WORDS`; slots: its last piece, as uint8.
    """
    slot = state % f.PROB_SCALE
    bucket = tl.load(table + slot // f.BUCKET_SLOTS)
    within = slot % f.BUCKET_SLOTS
    symbol = tl.where(within < ((bucket >> 16) & 0xFF), bucket, bucket >> 8) & 0xFF
    more = bucket >> 31 != 0
    symbol = tl.where(more, tl.load(slots + slot, mask=more, other=0).to(tl.uint32), symbol).to(tl.int32)
    entry = tl.load(table + f.TABLE_SYMBOLS_AT + symbol)
    state = (entry & 0xFFFF) * (state >> f.PROB_BITS) + slot - (entry >> 16)
    return symbol, state, state < f.STATE_LOW


@triton.jit
def refill(state, need, at, words):
    """States with the next words put in; `at` counts the words of the segment from 1, none before the first is read."""
    word = tl.load(words + at, mask=need & (at > 0), other=0).to(tl.uint32)
    return tl.where(need, (state << 16) | word, state)


@triton.jit
def pull_raw(line, current, J: tl.constexpr, RAW_BITS: tl.constexpr):
    """(raw bits of step J, word that the next step begins in). line: pointers."""
    at: tl.constexpr = (J * RAW_BITS) % 32
    number: tl.constexpr = (J * RAW_BITS) // 32
    if at == 0:
        current = tl.load(line + number * 32)
    bits = current >> at
    if at + RAW_BITS > 32:
        current = tl.load(line + (number + 1) * 32)
        bits |= current << (32 - at)
    return bits & ((1 << RAW_BITS) - 1), current


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
    PROFILE: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Decode what `encode_whole` made into the words at the part's address; patches are left to `apply_patches`.

    tables: uint32[parts, TABLE_WORDS]. entropy_words, entropy_states: the same bytes as uint16 and uint32. counts: int32, checked
    by `open_blocks`. errors: int32, or-ed for each part. Reads and writes stay inside of the segments whatever the bytes say.
    """
    first_segment = tl.load(programs + tl.program_id(0))
    both = tl.arange(0, 64)
    lane = both % 32
    half = both // 32
    last = tl.arange(0, 32) * 0 + 31
    rows = segments + (first_segment + half) * f.SEGMENT_COLUMNS
    part = tl.load(segments + first_segment * f.SEGMENT_COLUMNS + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    if ((tl.load(fields + f.HAS_PROFILE) != 0) != PROFILE) | (tl.load(fields + f.SINGLE) >= 0):
        return
    first = (tl.load(segments + first_segment * f.SEGMENT_COLUMNS + f.SEG_INDEX) * (STEPS * 32)).to(tl.int32)
    elems = first + half * (STEPS * 32) + lane
    words = word_pointer(tl.load(fields + f.ADDRESS), WIDTH)
    raw_at = raw + (tl.load(rows + f.SEG_RAW_AT) + lane)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    means_at = means + tl.load(fields + f.MEANS_AT) + stride * (first // 256)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    sign = tl.load(fields + f.SIGN_VALUE).to(tl.uint32)
    table = tables + part * f.TABLE_WORDS
    slots = (table + f.TABLE_SLOTS_AT).to(tl.pointer_type(tl.uint8), bitcast=True)
    if PROFILE:
        row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
        profile = profiles + tl.load(fields + f.PROFILE_AT)
        column = elems % row_elems

    words_at = entropy_words + (tl.load(rows + f.SEG_WORDS_AT) - 1)
    left = tl.load(counts + (first_segment + half))
    state = tl.load(entropy_states + (tl.load(rows + f.SEG_STATES_AT) + lane))
    bad_state = (state < f.STATE_LOW) | (state >= (1 << 31))
    for chunk in range(STEPS // UNROLL):
        step = UNROLL * chunk
        current = tl.zeros([64], tl.uint32)
        line = raw_at + (step * RAW_BITS // 32) * 32
        for j in tl.static_range(UNROLL):
            if j % 8 == 0:
                mean = mean_of_halves(means_at, stride, step + j, half, STEPS) + base
            bits = tl.zeros([64], tl.uint32)
            if RAW_BITS > 0:
                bits, current = pull_raw(line, current, j, RAW_BITS)
            symbol, state, need = pull_symbol(state, table, slots)
            rank, num = ranks(need, last)
            left -= num
            state = refill(state, need, left + rank, words_at)
            prediction = mean
            if PROFILE:
                prediction = mean + tl.load(profile + column)
                column += 32
                column = tl.where(column >= row_elems, column - row_elems, column)
            word = join(symbol, prediction, bits, sign, WIDTH, LOW_BITS, SHIFT, SIGNED)
            tl.store(words + (elems + (step + j) * 32), word.to(words.dtype.element_ty))
    bad_end = (state != f.STATE_LOW) | (left != 0)
    flags = tl.max(tl.where(bad_state, f.BAD_STATE, 0) | tl.where(bad_end, f.BAD_END, 0), 0)
    if flags != 0:
        tl.atomic_or(errors + part, flags)


@triton.jit(do_not_specialize=["length"])
def apply_patches(patches, length, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Put the top of patched elements right, in parts of that width that have an address.

    patches: int64[length], entries as `add_patches` writes them.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    use = i < length
    entry = tl.load(patches + i, mask=use, other=0)
    fields = parts + (entry >> 42) * f.PART_COLUMNS
    address = tl.load(fields + f.ADDRESS, mask=use, other=0)
    use = use & (address != 0) & (tl.load(fields + f.WORD_BITS, mask=use, other=0) == WIDTH)
    elem = ((entry >> 16) & ((1 << 26) - 1)).to(tl.int32)
    shift = tl.load(fields + f.TOP_SHIFT, mask=use, other=0)
    mask = tl.load(fields + f.TOP_MASK, mask=use, other=0)
    pointer = word_pointer(address, WIDTH) + elem
    word = tl.load(pointer, mask=use, other=0).to(tl.int64)
    word = (word & ~(mask << shift)) | ((entry & 0xFFFF) << shift)
    tl.store(pointer, word.to(pointer.dtype.element_ty), mask=use)
