"""Planes and plain bytes: sizes and compaction of the entropy plane, opening it again, tables, digests, comparison, reports."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f


@triton.jit(do_not_specialize=["num_words"])
def report(source, host, num_words, WORDS: tl.constexpr):
    """Copy int64 words to page-locked host memory. A program copies WORDS of them."""
    k = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    use = k < num_words
    tl.store(host + k, tl.load(source + k, mask=use, other=0), mask=use)


@triton.jit(do_not_specialize=["num_blocks"])
def place_blocks(
    template, blocks, segments, parts, counts, sizes, num_blocks, BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr
):
    """Size and place of each block of the entropy plane; blocks of parts of a single symbol are empty. One program.

    template: the table of blocks without places; blocks: the same with them. sizes: int64. SEGMENTS: at least those of a block.
    """
    start = tl.zeros([], tl.int64)
    done = num_blocks * 0
    while done < num_blocks:
        block = done + tl.arange(0, BLOCKS)
        real = block < num_blocks
        row = block * f.BLOCK_COLUMNS
        first = tl.load(template + row + f.BLOCK_SEGMENT, mask=real, other=0)
        num = tl.load(template + row + f.BLOCK_SEGMENTS, mask=real, other=0)
        i = tl.arange(0, SEGMENTS)
        count = tl.load(counts + first[:, None] + i[None, :], mask=i[None, :] < num[:, None], other=0)
        size = 4 * num * (1 + f.LANES) + 2 * tl.sum(count.to(tl.int64), 1)
        part = tl.load(segments + first * f.SEGMENT_COLUMNS + f.SEG_PART, mask=real, other=0)
        single = tl.load(parts + part * f.PART_COLUMNS + f.SINGLE, mask=real, other=0)
        size = tl.where((single >= 0) | ~real, 0, (size + 7) // 8 * 8)
        tl.store(sizes + block, size, mask=real)
        tl.store(blocks + row + f.BLOCK_SEGMENT, first, mask=real)
        tl.store(blocks + row + f.BLOCK_SEGMENTS, num, mask=real)
        tl.store(blocks + row + f.BLOCK_AT, start + tl.cumsum(size, 0) - size, mask=real)
        tl.store(blocks + row + f.BLOCK_BYTES, size, mask=real)
        start += tl.sum(size, 0)
        done += BLOCKS


@triton.jit
def compact(
    block_of_segment, blocks, counts, states, scratch, segments, plane16, plane32, CHUNK: tl.constexpr
):
    """Counts, states and words of a segment to their place in the entropy plane. One program a segment.

    block_of_segment: int32. plane16, plane32: the plane as uint16 and uint32.
    """
    segment = tl.program_id(0).to(tl.int64)
    row = blocks + tl.load(block_of_segment + segment).to(tl.int64) * f.BLOCK_COLUMNS
    size = tl.load(row + f.BLOCK_BYTES)
    if size == 0:
        return
    at = tl.load(row + f.BLOCK_AT)
    first = tl.load(row + f.BLOCK_SEGMENT)
    num = tl.load(row + f.BLOCK_SEGMENTS)
    own = segment - first
    before = tl.zeros([], tl.int64)
    i = own * 0
    while i < own:
        before += tl.load(counts + first + i)
        i += 1
    count = tl.load(counts + segment)
    tl.store(plane32 + at // 4 + own, count.to(tl.uint32))
    lane = tl.arange(0, 32)
    tl.store(plane32 + at // 4 + num + own * f.LANES + lane, tl.load(states + segment * f.LANES + lane))
    target = plane16 + at // 2 + 2 * num * (1 + f.LANES) + before
    source = scratch + tl.load(segments + segment * f.SEGMENT_COLUMNS + f.SEG_SCRATCH_AT)
    done = count * 0
    while done < count:
        k = done + tl.arange(0, CHUNK)
        tl.store(target + k, tl.load(source + k, mask=k < count, other=0), mask=k < count)
        done += CHUNK
    if own == num - 1:
        end = 2 * num * (1 + f.LANES) + before + count
        k = tl.arange(0, 4)
        tl.store(plane16 + at // 2 + end + k, tl.zeros([4], tl.uint16), mask=end + k < size // 2)


@triton.jit
def open_blocks(blocks, segments, parts, plane32, counts, errors, SEGMENTS: tl.constexpr):
    """Word counts of a block's segments, checked, and where their words and states lie. One program a block.

    A block whose counts do not fit its size gets counts of zero, so that nothing outside of it is read.
    """
    row = blocks + tl.program_id(0).to(tl.int64) * f.BLOCK_COLUMNS
    first = tl.load(row + f.BLOCK_SEGMENT)
    num = tl.load(row + f.BLOCK_SEGMENTS)
    at = tl.load(row + f.BLOCK_AT)
    size = tl.load(row + f.BLOCK_BYTES)
    part = tl.load(segments + first * f.SEGMENT_COLUMNS + f.SEG_PART)
    i = tl.arange(0, SEGMENTS)
    inside = i < num
    rows = segments + (first + i) * f.SEGMENT_COLUMNS
    stored = tl.load(parts + part * f.PART_COLUMNS + f.SINGLE) < 0
    count = tl.load(plane32 + at // 4 + i, mask=inside & stored, other=0).to(tl.int64)
    values = tl.load(rows + f.SEG_VALUES, mask=inside, other=0)
    total = tl.sum(count, 0)
    fits = (4 * num * (1 + f.LANES) + 2 * total + 7) // 8 * 8 == size
    good = (fits & (tl.sum((count > values).to(tl.int32), 0) == 0)) | ~stored
    if ~good:
        tl.atomic_or(errors + part, f.BAD_COUNTS)
        count = tl.zeros([SEGMENTS], tl.int64)
    words_at = at // 2 + 2 * num * (1 + f.LANES) + tl.cumsum(count, 0) - count
    tl.store(rows + f.SEG_WORDS_AT, words_at, mask=inside)
    tl.store(rows + f.SEG_STATES_AT, at // 4 + num + i * f.LANES, mask=inside)
    tl.store(counts + first + i, count.to(tl.int32), mask=inside)


@triton.jit
def symbol_of(slot, start, end):
    """The symbol that each slot belongs to; start, end: int32[256], slots of the symbols."""
    covers = (slot[:, None] >= start[None, :]) & (slot[:, None] < end[None, :])
    return tl.sum(tl.where(covers, tl.arange(0, 256)[None, :], 0), 1)


@triton.jit
def decode_tables(freqs, tables, slots, SLOTS: tl.constexpr):
    """Tables for the decoder, see `fields.TABLE_WORDS`, from int32[parts, 256]. slots: the same memory as uint8.

    The second grid dimension takes SLOTS slots; its first programs make the buckets and symbols too.
    """
    part = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, 256)
    freq = tl.load(freqs + part * f.SYMBOLS + s)
    end = tl.cumsum(freq, 0)
    start = end - freq
    table = tables + part * f.TABLE_WORDS
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    symbol = symbol_of(slot, start, end)
    tl.store(slots + (part * f.TABLE_WORDS + f.TABLE_SLOTS_AT) * 4 + slot, symbol.to(tl.uint8))
    if tl.program_id(1) == 0:
        tl.store(table + f.TABLE_SYMBOLS_AT + s, (freq | start << 16).to(tl.uint32, bitcast=True))
    if tl.program_id(1) * SLOTS < f.TABLE_SYMBOLS_AT:
        bucket = slot
        opening = bucket * f.BUCKET_SLOTS
        closing = opening + f.BUCKET_SLOTS
        one = symbol_of(opening, start, end)
        one_ends = tl.sum(tl.where(one[:, None] == s[None, :], end[None, :], 0), 1)
        other = symbol_of(tl.minimum(one_ends, closing - 1), start, end)
        other_ends = tl.sum(tl.where(other[:, None] == s[None, :], end[None, :], 0), 1)
        own = tl.minimum(one_ends, closing) - opening
        more = (other_ends < closing).to(tl.int32)
        entry = one | other << 8 | own << 16 | more << 31
        tl.store(table + bucket, entry.to(tl.uint32, bitcast=True))


@triton.jit
def mixed(word, index):
    """One term of the digest; `thinpoint.digest`."""
    t = word + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    t = t ^ (t >> 32)
    t = t * 0xD6E8FEB86659FD93
    t = t ^ (t >> 29)
    t = t * 0xCA5A826395121157
    return t ^ (t >> 32)


@triton.jit
def digest_ranges(chunks, sums, WORDS: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Add digests of byte ranges. A program takes up to WORDS x ROUNDS words of 8 bytes.

    chunks: int64[programs, 4]: address, bytes, index of the first word, row in sums. sums: int64.
    ALIGNED: addresses are multiples of 8 and sizes too; otherwise bytes are loaded one by one.
    """
    row = chunks + tl.program_id(0) * 4
    address = tl.load(row)
    size = tl.load(row + 1)
    index = tl.load(row + 2)
    total = tl.zeros([WORDS], tl.uint64)
    for round in range(ROUNDS):
        k = round * WORDS + tl.arange(0, WORDS).to(tl.int64)
        use = k * 8 < size
        if ALIGNED:
            word = tl.load(address.to(tl.pointer_type(tl.uint64)) + k, mask=use, other=0)
        else:
            word = tl.zeros([WORDS], tl.uint64)
            for b in tl.static_range(8):
                byte = tl.load(
                    address.to(tl.pointer_type(tl.uint8)) + 8 * k + b, mask=8 * k + b < size, other=0
                )
                word |= byte.to(tl.uint64) << (8 * b)
        total += tl.where(use, mixed(word, index + k), 0)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def compare_ranges(chunks, differences, BYTES: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """Count differing words of two byte ranges. A program takes up to BYTES x ROUNDS bytes.

    chunks: int64[programs, 4]: address, other address, bytes, row in differences. differences: int32. WIDTH: bits of a
    word, 8 or 64; addresses and sizes are multiples of it.
    """
    row = chunks + tl.program_id(0) * 4
    size = tl.load(row + 2) * 8 // WIDTH
    if WIDTH == 64:
        one = tl.load(row).to(tl.pointer_type(tl.uint64))
        other = tl.load(row + 1).to(tl.pointer_type(tl.uint64))
    else:
        one = tl.load(row).to(tl.pointer_type(tl.uint8))
        other = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    wrong = tl.zeros([BYTES * 8 // WIDTH], tl.int32)
    for round in range(ROUNDS):
        k = round * (BYTES * 8 // WIDTH) + tl.arange(0, BYTES * 8 // WIDTH).to(tl.int64)
        use = k < size
        wrong += (tl.load(one + k, mask=use, other=0) != tl.load(other + k, mask=use, other=0)).to(tl.int32)
    total = tl.sum(wrong, 0)
    if total > 0:
        tl.atomic_add(differences + tl.load(row + 3), total)
