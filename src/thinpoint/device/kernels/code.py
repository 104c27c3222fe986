"""Whole segments, two to a program: symbols, raw bits and rANS in one pass, compiled for a fixed width of the raw bits."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.scan import word_pointer

BALLOT = tl.constexpr(not triton.knobs.runtime.interpret)
UNROLL = tl.constexpr(4)
"""Steps in the body of a loop. Triton's time to compile grows with the square."""


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
def num_ones(bits):
    """Set bits of each uint32, in the form that compilers know as a population count."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ranks(flags, lane, BALLOT: tl.constexpr):
    """(inclusive rank of each set flag, how many are set) of 32 flags.

    lane: int32[32], 0 to 31. BALLOT: by one reduction and a population count, which devices do in few instructions, instead of a
    prefix sum, which is one in the interpreter.
    """
    if BALLOT:
        ballot = tl.sum(flags.to(tl.uint32) << lane, 0)
        return num_ones(ballot & ((2 << lane) - 1).to(tl.uint32)), num_ones(ballot)
    return tl.cumsum(flags.to(tl.int32), 0), tl.sum(flags.to(tl.int32), 0)


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
def put_bits(held, bits, AT: tl.constexpr, RAW_BITS: tl.constexpr):
    """Three words with bits put in from bit AT on."""
    first, second, third = held
    if AT < 32:
        first |= bits << AT
        if AT + RAW_BITS > 32:
            second |= bits >> (32 - AT)
    elif AT < 64:
        second |= bits << (AT - 32)
        if AT + RAW_BITS > 64:
            third |= bits >> (64 - AT)
    else:
        third |= bits << (AT - 64)
    return first, second, third


@triton.jit
def store_bits(raw_at, held, carry, step, LAST_WORD: tl.constexpr, RAW_BITS: tl.constexpr):
    """Store the raw bits of UNROLL steps from `step` on, of which `held` has the lowest 96; later steps are stored already.

    raw_at: pointers to the lanes' first words. carry: the word that the later steps begin in.

    Returns:
        The word that these steps begin in, not stored yet.
    """
    first, second, third = held
    at = (step * RAW_BITS % 32).to(tl.uint32)
    word = step * RAW_BITS // 32
    low_end: tl.constexpr = UNROLL * RAW_BITS // 32
    high_end: tl.constexpr = (31 + UNROLL * RAW_BITS) // 32
    end = (at.to(tl.int32) + UNROLL * RAW_BITS) // 32
    to = raw_at + word * 32
    for i in tl.static_range(1, high_end + 1):
        # Shifted twice: a shift by 32 is undefined.
        if i == 1:
            full = (second << at) | ((first >> 1) >> (31 - at))
        elif i == 2:
            full = (third << at) | ((second >> 1) >> (31 - at))
        else:
            full = (third >> 1) >> (31 - at)
        if i == low_end:
            full |= tl.where(end == i, carry, 0)
        elif i == high_end:
            full |= carry
        tl.store(to + i * 32, full, mask=(i <= end) & (word + i <= LAST_WORD))
    if low_end == 0:
        return (first << at) | tl.where(end == 0, carry, 0)
    return first << at


@triton.jit
def next_columns(column, row_elems, STEP: tl.constexpr):
    """Columns of the values one step further, STEP = 32, or one step back, STEP = -32."""
    column += STEP
    if STEP < 0:
        return tl.where(column < 0, column + row_elems, column)
    return tl.where(column >= row_elems, column - row_elems, column)


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
):
    """Encode two consecutive whole segments of one part, all of whose groups are coded.

    The two, a and b, are independent chains that hide each other's latency.

    programs: int64, first segment of each program. raw: uint32; scratch: uint16; counts: int32, words of each segment;
    states: uint32[segments, 32]; patches: int64, see `add_patches`. SHIFT: trailing zeros.
    STEPS x RAW_BITS is a multiple of 32. A program leaves at once if its part is planned otherwise than PROFILE says.
    """
    segment = tl.load(programs + tl.program_id(0))
    row_a = segments + segment * f.SEGMENT_COLUMNS
    row_b = row_a + f.SEGMENT_COLUMNS
    part = tl.load(row_a + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    if (tl.load(fields + f.HAS_PROFILE) != 0) != PROFILE:
        return
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
def read_ahead(words, left, lane):
    """Read a word of each of the next 32 sectors of 32 bytes, so that they are near when steps ask for their words.

    A step takes about 20 bytes and cannot know which before the one before it is done.
    """
    at = left - 16 * lane
    return tl.load(words + at, mask=at > 0, other=0).to(tl.uint32)


@triton.jit
def load_bits(raw_at, step, LAST_WORD: tl.constexpr, RAW_BITS: tl.constexpr):
    """The four words of each lane from that on which a step begins in."""
    word = step * RAW_BITS // 32
    more: tl.constexpr = (31 + UNROLL * RAW_BITS) // 32
    first = tl.load(raw_at + tl.minimum(word, LAST_WORD) * 32)
    second = tl.load(raw_at + tl.minimum(word + 1, LAST_WORD) * 32)
    third = second
    fourth = second
    if more > 1:
        third = tl.load(raw_at + tl.minimum(word + 2, LAST_WORD) * 32)
    if more > 2:
        fourth = tl.load(raw_at + tl.minimum(word + 3, LAST_WORD) * 32)
    return first, second, third, fourth


@triton.jit
def align_bits(loaded, step, RAW_BITS: tl.constexpr):
    """Three words that begin with the bits of a step, from the four that `load_bits` found."""
    first, second, third, fourth = loaded
    at = (step * RAW_BITS % 32).to(tl.uint32)
    # Shifted twice: a shift by 32 is undefined.
    return (
        (first >> at) | ((second << 1) << (31 - at)),
        (second >> at) | ((third << 1) << (31 - at)),
        (third >> at) | ((fourth << 1) << (31 - at)),
    )


@triton.jit
def get_bits(held, AT: tl.constexpr, RAW_BITS: tl.constexpr):
    """Bits from bit AT of three words on."""
    first, second, third = held
    if AT < 32:
        bits = first >> AT
        if AT + RAW_BITS > 32:
            bits |= second << (32 - AT)
    elif AT < 64:
        bits = second >> (AT - 32)
        if AT + RAW_BITS > 64:
            bits |= third << (64 - AT)
    else:
        bits = third >> (AT - 64)
    return bits & ((1 << RAW_BITS) - 1)


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
):
    """Decode what `encode_whole` made into the words at the part's address; patches are left to `apply_patches`.

    tables: uint32[parts, TABLE_WORDS]. entropy_words, entropy_states: the same bytes as uint16 and uint32. counts: int32, checked
    by `open_blocks`; overwritten. errors: int32, or-ed for each part. Whatever the bytes say, reads and writes stay inside of
    the segments.
    """
    segment = tl.load(programs + tl.program_id(0))
    row_a = segments + segment * f.SEGMENT_COLUMNS
    row_b = row_a + f.SEGMENT_COLUMNS
    part = tl.load(row_a + f.SEG_PART)
    fields = parts + part * f.PART_COLUMNS
    if ((tl.load(fields + f.HAS_PROFILE) != 0) != PROFILE) | (tl.load(fields + f.SINGLE) >= 0):
        return
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
