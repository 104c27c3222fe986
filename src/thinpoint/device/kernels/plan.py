"""Planning on the device: samples, histograms, windows, frequencies, costs. The arithmetic of `codec/plan.py`, bit for bit."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.scan import widened, word_pointer


@triton.jit
def floor_div(value, divisor):
    """Floor of a division by a positive number; `//` rounds towards zero here."""
    quotient = value // divisor
    return tl.where((value % divisor != 0) & (value < 0), quotient - 1, quotient)


@triton.jit
def sampled_group(fields, order, count, i):
    """(the i-th sampled group of `count`, whether there is one), as `codec.plan.sample_groups` draws them."""
    num = tl.load(fields + f.NUM_CANDIDATES)
    num_elems = tl.load(fields + f.NUM_ELEMS)
    order_at = tl.load(fields + f.ORDER_AT)
    drawn = num
    if num > count:
        if num_elems % f.GROUP != 0:
            last = num - 1
            if order_at >= 0:
                last = tl.load(order + order_at + num - 1).to(tl.int64)
            drawn = tl.where(last == num_elems // f.GROUP, num - 1, num)
    wide = i.to(tl.int64)
    jitter = ((wide * 2654435761 + 0x9E3779B9) & 0xFFFFFFFF) * drawn >> 32
    candidate = tl.where(num <= count, wide, (wide * drawn + jitter) // count)
    there = wide < tl.minimum(num, count)
    group = candidate
    if order_at >= 0:
        group = tl.load(order + order_at + candidate, mask=there, other=0).to(tl.int64)
    return group.to(tl.int32), there


@triton.jit
def part_means(parts, order, means):
    """The single mean of each part and the range of its sampled group means. One program a part."""
    fields = parts + tl.program_id(0).to(tl.int64) * f.PART_COLUMNS
    group, there = sampled_group(fields, order, 256, tl.arange(0, 256))
    means_at = tl.load(fields + f.GROUP_MEANS_AT)
    mean = tl.load(means + means_at + group, mask=there, other=f.NO_MEAN)
    valid = mean != f.NO_MEAN
    count = tl.sum(valid.to(tl.int32), 0)
    total = tl.sum(tl.where(valid, mean, 0), 0)
    single = tl.where(count > 0, (2 * total + count) // (2 * tl.maximum(count, 1)), 0)
    num_elems = tl.load(fields + f.NUM_ELEMS)
    num_groups = (num_elems + f.GROUP - 1) // f.GROUP
    single = tl.where(tl.load(fields + f.WORD_BITS) == 8, 0, single)
    tl.store(means + means_at + num_groups, single)
    high = tl.max(tl.where(valid, mean, -1), 0)
    low = tl.min(tl.where(valid, mean, 1 << 30), 0)
    tl.store(fields + f.SAMPLE_RANGE, tl.where(count > 0, high - low, 0).to(tl.int64))


@triton.jit
def column_sums(tiles, parts, means, profiles, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Rounded mean of top - group mean for each column of sampled rows, UNSEEN where every top is 0.

    A program takes COLUMNS columns; tiles: int64[programs, 2], part and first column.
    """
    row = tiles + tl.program_id(0) * 2
    fields = parts + tl.load(row) * f.PART_COLUMNS
    row_elems = tl.load(fields + f.ROW_ELEMS)
    column = tl.load(row + 1).to(tl.int32) + tl.arange(0, COLUMNS)
    inside = column < row_elems
    rows = tl.load(fields + f.NUM_ELEMS) // row_elems
    fitted = tl.minimum(rows, f.MAX_PROFILE_ROWS)
    word_bits = tl.load(fields + f.WORD_BITS)
    means_at = tl.load(fields + f.GROUP_MEANS_AT)
    total = tl.zeros([COLUMNS], tl.int32)
    count = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, 512, ROWS):
        i = first + tl.arange(0, ROWS).to(tl.int64)
        # i x rows // fitted: a division of 64 bits would take longer than all the rest.
        sampled = tl.where(rows > f.MAX_PROFILE_ROWS, i * rows // f.MAX_PROFILE_ROWS, i)
        elem = sampled.to(tl.int32)[:, None] * row_elems.to(tl.int32) + column[None, :]
        use = (i < fitted)[:, None] & inside[None, :]
        top = load_tops(fields, elem, use, word_bits)
        mean = tl.load(means + means_at + elem // f.GROUP, mask=use, other=0)
        total += tl.sum(tl.where(top != 0, top - mean, 0), 0)
        count += tl.sum((top != 0).to(tl.int32), 0)
    value = floor_div(2 * total + count, 2 * tl.maximum(count, 1))
    profile_at = tl.load(fields + f.PROFILE_AT)
    tl.store(profiles + profile_at + column, tl.where(count > 0, value, f.UNSEEN), mask=inside)


@triton.jit
def load_tops(fields, elem, use, word_bits):
    """Tops (int32) of elements of a part of any width; 0 where not `use`."""
    shift = tl.load(fields + f.TOP_SHIFT)
    mask = tl.load(fields + f.TOP_MASK)
    address = tl.load(fields + f.ADDRESS)
    if word_bits == 32:
        words = tl.load(word_pointer(address, 32) + elem, mask=use, other=0).to(tl.uint64)
    elif word_bits == 16:
        words = tl.load(word_pointer(address, 16) + elem, mask=use, other=0).to(tl.uint64)
    elif word_bits == 64:
        words = tl.load(word_pointer(address, 64) + elem, mask=use, other=0)
    else:
        words = tl.load(word_pointer(address, 8) + elem, mask=use, other=0).to(tl.uint64)
    return ((words >> shift.to(tl.uint64)) & mask.to(tl.uint64)).to(tl.int32)


@triton.jit
def finish_profiles(profile_parts, parts, profiles, TILE: tl.constexpr):
    """Columns without any value get the lowest; the range is noted. One program a part that has a profile."""
    fields = parts + tl.load(profile_parts + tl.program_id(0)) * f.PART_COLUMNS
    row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
    at = tl.load(fields + f.PROFILE_AT)
    low = tl.full([TILE], 1 << 30, tl.int32)
    high = tl.full([TILE], f.UNSEEN, tl.int32)
    start = row_elems * 0
    while start < row_elems:
        column = start + tl.arange(0, TILE)
        value = tl.load(profiles + at + column, mask=column < row_elems, other=f.UNSEEN)
        low = tl.minimum(low, tl.where(value == f.UNSEEN, 1 << 30, value))
        high = tl.maximum(high, value)
        start += TILE
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    unseen = highest == f.UNSEEN
    lowest = tl.where(unseen, 0, lowest)
    highest = tl.where(unseen, 0, highest)
    tl.store(fields + f.PROFILE_RANGE, (highest - lowest).to(tl.int64))
    start = row_elems * 0
    while start < row_elems:
        column = start + tl.arange(0, TILE)
        value = tl.load(profiles + at + column, mask=column < row_elems, other=0)
        tl.store(profiles + at + column, lowest, mask=(column < row_elems) & (value == f.UNSEEN))
        start += TILE


@triton.jit
def differences_of(
    fields,
    means,
    profiles,
    means_at,
    means_stride,
    has_profile,
    group,
    there,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """(top - prediction, which tops are not 0, which are) of the values of some groups, each [GROUPS, 256]."""
    num_elems = tl.load(fields + f.NUM_ELEMS).to(tl.int32)
    elem = (group * f.GROUP)[:, None] + tl.arange(0, 256)[None, :]
    use = there[:, None] & (elem < num_elems)
    shift = tl.load(fields + f.TOP_SHIFT)
    mask = tl.load(fields + f.TOP_MASK)
    words = widened(
        tl.load(word_pointer(tl.load(fields + f.ADDRESS), WIDTH) + elem, mask=use, other=0), WIDTH
    )
    top = ((words >> shift.to(words.dtype)) & mask.to(words.dtype)).to(tl.int32)
    mean = tl.load(means + means_at + means_stride * group, mask=there, other=0)
    prediction = tl.broadcast_to(mean[:, None], (GROUPS, 256))
    if has_profile != 0:
        row_elems = tl.load(fields + f.ROW_ELEMS).to(tl.int32)
        prediction += tl.load(profiles + tl.load(fields + f.PROFILE_AT) + elem % row_elems, mask=use, other=0)
    return top - prediction, use & (top != 0), use & (top == 0)


@triton.jit
def sample_histograms(
    rows, parts, order, means, profiles, histograms, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):
    """Histograms of all candidates of all parts over 256 groups.

    rows: int64[programs, 2], part and candidate. The second grid dimension takes GROUPS of the sampled groups.
    """
    row = rows + tl.program_id(0) * 2
    part = tl.load(row)
    candidate = tl.load(row + 1)
    fields = parts + part * f.PART_COLUMNS
    means_at = tl.load(fields + f.GROUP_MEANS_AT)
    stride = (candidate > 0).to(tl.int32)
    if candidate == 0:
        means_at += (tl.load(fields + f.NUM_ELEMS) + f.GROUP - 1) // f.GROUP
    group, there = sampled_group(fields, order, 256, tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))
    difference, coded, zero = differences_of(
        fields, means, profiles, means_at, stride, candidate == 2, group, there, WIDTH, GROUPS
    )
    histogram = histograms + (part * f.CANDIDATES + candidate) * f.HIST_COLUMNS
    bin = difference + f.BIN_OF_ZERO
    counted = coded & (bin >= 0) & (bin < f.BINS)
    flat = tl.reshape(tl.where(counted, bin, 0), [GROUPS * 256])
    counts = tl.histogram(flat, 512, mask=tl.reshape(counted, [GROUPS * 256]))
    tl.atomic_add(histogram + tl.arange(0, 512), counts, mask=counts > 0)
    tl.atomic_add(histogram + f.BINS, tl.sum(tl.sum(zero.to(tl.int32), 1), 0))
    tl.atomic_add(histogram + f.BINS + 1, tl.sum(tl.sum((coded & ~counted).to(tl.int32), 1), 0))


@triton.jit
def table_histograms(
    chunks,
    parts,
    order,
    means,
    profiles,
    histograms,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Counts of the symbols of the chosen window over one group in 32: int32[rows, 256].

    chunks: int64[programs, 3]: part, first of the GROUPS x ROUNDS sampled groups, row of the histogram.
    """
    row = chunks + tl.program_id(0) * 3
    fields = parts + tl.load(row) * f.PART_COLUMNS
    first = tl.load(row + 1).to(tl.int32)
    count = tl.load(fields + f.NUM_CANDIDATES) // f.SAMPLE_DIVISOR
    means_at = tl.load(fields + f.MEANS_AT)
    stride = tl.load(fields + f.MEANS_STRIDE).to(tl.int32)
    has_profile = tl.load(fields + f.HAS_PROFILE)
    base = tl.load(fields + f.WINDOW_BASE).to(tl.int32)
    total = tl.zeros([256], tl.int32)
    for round in range(ROUNDS):
        group, there = sampled_group(fields, order, count, first + round * GROUPS + tl.arange(0, GROUPS))
        difference, coded, zero = differences_of(
            fields, means, profiles, means_at, stride, has_profile, group, there, WIDTH, GROUPS
        )
        symbol = tl.where(zero, 0, difference - base)
        counted = zero | (coded & (symbol >= 1) & (symbol <= f.WINDOW))
        flat = tl.reshape(tl.where(counted, symbol, 0), [GROUPS * 256])
        total += tl.histogram(flat, 256, mask=tl.reshape(counted, [GROUPS * 256]))
    tl.atomic_add(histograms + tl.load(row + 2) * f.SYMBOLS + tl.arange(0, 256), total, mask=total > 0)


@triton.jit
def best_window(bins, histogram):
    """(first bin of the window with the most mass, that mass); `codec.plan.best_window`. bins: int32[512]."""
    i = tl.arange(0, 512)
    ahead = tl.load(histogram + i + (f.WINDOW - 1), mask=i + (f.WINDOW - 1) < f.BINS, other=0).to(tl.int32)
    before = tl.sum(tl.where(i < f.WINDOW - 1, bins, 0), 0)
    mass = before + tl.cumsum(ahead, 0) - (tl.cumsum(bins, 0) - bins)
    mass = tl.where(i + f.WINDOW <= f.BINS, mass, -1)
    most = tl.max(mass, 0)
    lowest = tl.min(tl.where(mass == most, i, 1 << 30), 0)
    middle = (lowest + tl.max(tl.where(mass == most, i, 0), 0)) // 2
    is_best = tl.sum(((i == middle) & (mass == most)).to(tl.int32), 0) > 0
    return tl.where(is_best, middle, lowest), most


@triton.jit
def frequencies(counts, exact):
    """(frequencies, present, lowest, highest, fill) for counts of symbols (int32[256]), as `codec.plan.make_coding`."""
    s = tl.arange(0, 256)
    present = counts > 0
    seen = present & (s > 0)
    lowest = tl.min(tl.where(seen, s, f.SYMBOLS), 0)
    highest = tl.max(tl.where(seen, s, 0), 0)
    if exact != 0:
        lowest = 1
        highest = f.WINDOW + 0
    else:
        present = present | (s == 0) | ((s >= lowest) & (s <= highest))
    present = present | ((s == 0) & (tl.sum(present.to(tl.int32), 0) == 0))
    num_present = tl.sum(present.to(tl.int32), 0)
    total = tl.maximum(tl.sum(counts, 0), 1).to(tl.int64)
    freqs = 1 + (counts.to(tl.int64) * (-num_present + f.PROB_SCALE).to(tl.int64) // total).to(tl.int32)
    freqs = tl.where(present, freqs, 0)
    ranked = tl.where(present, counts, -1)
    fill = tl.min(tl.where(ranked == tl.max(ranked, 0), s, f.SYMBOLS), 0)
    freqs += tl.where(s == fill, -tl.sum(freqs, 0) + f.PROB_SCALE, 0)
    return freqs, present, lowest, highest, fill


@triton.jit
def window_counts(histogram, start):
    """Counts of the 256 symbols of a window."""
    s = tl.arange(0, 256)
    counts = tl.load(histogram + start + s - 1, mask=s > 0, other=0).to(tl.int32)
    return tl.where(s == 0, tl.load(histogram + f.BINS).to(tl.int32), counts)


@triton.jit
def table_bytes(freqs):
    """Length of the stored frequencies."""
    s = tl.arange(0, 256)
    seen = (freqs > 0) & (s > 0)
    span = tl.max(tl.where(seen, s, 0), 0) - tl.min(tl.where(seen, s, f.SYMBOLS), 0) + 1
    span = tl.where(tl.sum(seen.to(tl.int32), 0) > 0, span, 0)
    return 3 + span + tl.sum((freqs >= 128).to(tl.int32), 0)


@triton.jit
def estimate(fields, histogram, side_bits, exact, log2):
    """(bits that a part takes if its symbols have this histogram in a sample, first bin of the best window)."""
    s = tl.arange(0, 256)
    bins = tl.load(histogram + tl.arange(0, 512)).to(tl.int32)
    num_outside = tl.load(histogram + f.BINS + 1).to(tl.int32)
    start, most = best_window(bins, histogram)
    counts = window_counts(histogram, start)
    freqs, present, _low, _high, fill = frequencies(counts, exact)
    bits = -tl.load(log2 + freqs) + (f.PROB_BITS << f.COST_SCALE_BITS)
    cost = tl.sum(tl.where(present, counts.to(tl.int64) * bits.to(tl.int64), 0), 0)
    fill_bits = tl.sum(tl.where(s == fill, bits, 0), 0)
    num_patches = num_outside + tl.sum(bins, 0) - most
    cost += num_patches.to(tl.int64) * (fill_bits + (f.PATCH_BITS << f.COST_SCALE_BITS)).to(tl.int64)
    num_values = tl.load(histogram + f.BINS).to(tl.int32) + num_outside + tl.sum(bins, 0)
    coded = tl.load(fields + f.NUM_CODED)
    scale = num_values.to(tl.int64) << f.COST_SCALE_BITS
    # floor(cost x coded / scale) without a product beyond 2^63.
    entropy = cost // scale * coded + cost % scale * coded // scale
    return tl.load(fields + f.FIXED_BITS) + side_bits + 8 * table_bytes(freqs) + entropy, start


@triton.jit
def choose_candidates(parts, histograms, log2):
    """The cheapest way to predict each part, ties to the simpler. One program a part."""
    part = tl.program_id(0).to(tl.int64)
    fields = parts + part * f.PART_COLUMNS
    histogram = histograms + part * f.CANDIDATES * f.HIST_COLUMNS
    num_groups = (tl.load(fields + f.NUM_ELEMS) + f.GROUP - 1) // f.GROUP
    exact = (tl.load(fields + f.NUM_CANDIDATES) <= f.SAMPLE_GROUPS).to(tl.int32)
    best, start = estimate(fields, histogram, tl.zeros([], tl.int64), exact, log2)
    stride = tl.zeros([], tl.int64)
    profiled = tl.zeros([], tl.int64)
    if (tl.load(fields + f.WORD_BITS) > 8) & (num_groups > 1):
        mean_bits = tl.where(tl.load(fields + f.SAMPLE_RANGE) > 255, 16, 8) * num_groups
        grouped, grouped_start = estimate(fields, histogram + f.HIST_COLUMNS, mean_bits, exact, log2)
        pays = grouped < best
        best = tl.where(pays, grouped, best)
        start = tl.where(pays, grouped_start, start)
        stride = pays.to(tl.int64)
        row_elems = tl.load(fields + f.ROW_ELEMS)
        if (row_elems > 0) & (pays | (tl.load(fields + f.PROFILE_ALONE) != 0)):
            side = mean_bits + tl.where(tl.load(fields + f.PROFILE_RANGE) > 255, 16, 8) * row_elems
            with_profile, profile_start = estimate(fields, histogram + 2 * f.HIST_COLUMNS, side, exact, log2)
            profiled = (with_profile < best).to(tl.int64)
            best = tl.minimum(best, with_profile)
            start = tl.where(profiled != 0, profile_start, start)
            stride = tl.maximum(stride, profiled)
    means_at = tl.load(fields + f.GROUP_MEANS_AT)
    tl.store(fields + f.MEANS_AT, tl.where(stride == 0, means_at + num_groups, means_at))
    tl.store(fields + f.MEANS_STRIDE, stride)
    tl.store(fields + f.HAS_PROFILE, profiled)
    tl.store(fields + f.WINDOW_BASE, (start - f.BIN_OF_ZERO - 1).to(tl.int64))
    tl.store(fields + f.ESTIMATED_BITS, best)


@triton.jit
def make_tables(parts, histograms, table_rows, table_histograms, freqs_out, entries):
    """Frequencies and the encoder's table of each part. One program a part.

    table_rows: int64, for each part its row in table_histograms (int32[rows, 256]), or -1: then the sample that chose
    the plan serves.
    freqs_out: int32[parts, 256]; entries: int64[parts, 256]: reciprocal | freq << 32 | bias << 45 | shift << 58.
    """
    part = tl.program_id(0).to(tl.int64)
    fields = parts + part * f.PART_COLUMNS
    row = tl.load(table_rows + part)
    exact = (tl.load(fields + f.NUM_CANDIDATES) <= f.SAMPLE_GROUPS).to(tl.int32)
    if row >= 0:
        exact = 0
        counts = tl.load(table_histograms + row * f.SYMBOLS + tl.arange(0, 256))
    else:
        candidate = tl.load(fields + f.MEANS_STRIDE) + tl.load(fields + f.HAS_PROFILE)
        start = tl.load(fields + f.WINDOW_BASE) + f.BIN_OF_ZERO + 1
        counts = window_counts(histograms + (part * f.CANDIDATES + candidate) * f.HIST_COLUMNS, start)
    freqs, _present, lowest, highest, fill = frequencies(counts, exact)
    s = tl.arange(0, 256)
    tl.store(fields + f.LOWEST, lowest.to(tl.int64))
    tl.store(fields + f.HIGHEST, highest.to(tl.int64))
    tl.store(fields + f.ZERO_PRESENT, tl.sum(tl.where((s == 0) & (freqs > 0), 1, 0), 0).to(tl.int64))
    tl.store(fields + f.FILL, fill.to(tl.int64))
    tl.store(fields + f.SINGLE, tl.where(tl.max(freqs, 0) == f.PROB_SCALE, fill, -1).to(tl.int64))
    tl.store(fields + f.TABLE_BYTES, table_bytes(freqs).to(tl.int64))
    tl.store(freqs_out + part * f.SYMBOLS + s, freqs)

    bias = tl.cumsum(freqs, 0) - freqs
    log = tl.zeros([256], tl.int32)
    for k in tl.static_range(12):
        log += (freqs - 1 >= (1 << k)).to(tl.int32)
    divisor = tl.maximum(freqs, 1).to(tl.int64)
    one = tl.full([256], 1, tl.int64)
    reciprocal = ((one << (log + 31).to(tl.int64)) + divisor - 1) // divisor
    whole = (freqs == f.PROB_SCALE) | (freqs == 0)
    reciprocal = tl.where(freqs == 1, 0xFFFFFFFF, tl.where(whole, 0, reciprocal))
    bias += tl.where(freqs == 1, f.PROB_SCALE - 1, 0)
    shift = tl.where((freqs == 1) | whole, 0, log - 1)
    entry = reciprocal | freqs.to(tl.int64) << 32 | bias.to(tl.int64) << 45 | shift.to(tl.int64) << 58
    tl.store(entries + part * f.SYMBOLS + s, entry)
