"""Numba kernels of the rANS codec for one CPU core. They release the GIL; threads are started elsewhere.

Written for LLVM's vectoriser: slices are taken before loops, so that indices are the loop variable and need no wraparound
check; arithmetic stays in the width of the words where it can. `parallel=True` is not used: it aborts on concurrent callers and
after a fork.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from thinpoint.codec.rans.spec import LANES, PROB_SCALE, STATE_LOW
from thinpoint.codec.transforms.predict import GROUP_ELEMS, NO_MEAN

_jit = nb.njit(nogil=True, cache=True, boundscheck=False)

_LOW_STATE = np.uint32(STATE_LOW)
_U16 = np.uint32(16)
_U32 = np.uint64(32)
_SCALE = np.uint32(PROB_SCALE)
_PROB_MASK = np.uint32(PROB_SCALE - 1)


@_jit
def scan_groups(words, kept):
    """OR and AND of the words; kept[g] is set where group g has any bit set."""
    all_or = words[0] ^ words[0]
    all_and = words[0]
    for g in range(kept.size):
        group = words[g * GROUP_ELEMS : min((g + 1) * GROUP_ELEMS, words.size)]
        group_or = words[0] ^ words[0]
        for i in range(group.size):
            group_or |= group[i]
            all_and &= group[i]
        all_or |= group_or
        kept[g] = group_or != 0
    return all_or, all_and


@_jit
def group_means(words, groups, top_shift, top_mask, means):
    """means[k] = rounded mean of the non-zero tops of group groups[k]."""
    for k in range(groups.size):
        start = groups[k] * GROUP_ELEMS
        group = words[start : min(start + GROUP_ELEMS, words.size)]
        total = np.uint32(0)
        count = np.uint32(0)
        for i in range(group.size):
            top = np.uint32((group[i] >> top_shift) & top_mask)
            total += top
            count += np.uint32(top != 0)
        wide_total = np.int64(total)
        wide_count = np.int64(count)
        means[k] = (2 * wide_total + wide_count) // (2 * wide_count) if wide_count else NO_MEAN


@_jit
def column_sums(words, rows, row_elems, top_shift, top_mask, means, total, count):
    """Add top - group mean, and 1, to the columns of the non-zero tops of these rows (int32 sums; at most 512 rows)."""
    for r in range(rows.size):
        start = rows[r] * row_elems
        column = 0
        while column < row_elems:
            elem = start + column
            run = min(GROUP_ELEMS - elem % GROUP_ELEMS, row_elems - column)
            mean = np.int32(means[elem // GROUP_ELEMS])
            piece = words[elem : elem + run]
            sums = total[column : column + run]
            counts = count[column : column + run]
            for i in range(run):
                top = np.int32((piece[i] >> top_shift) & top_mask)
                sums[i] += top - mean if top != 0 else np.int32(0)
                counts[i] += np.int32(top != 0)
            column += run


@_jit
def differences(words, groups, top_shift, top_mask, means, profile, bins):
    """Histogram of top - prediction; bins is int64[2, HISTOGRAM_BINS + 2]: below, the bins, above. Returns zeros."""
    num_zero = 0
    # From the array, not the constant: a compiled kernel is cached by this file alone and would keep an old value.
    last = bins.shape[1] - 1
    first = (last + 1) // 2
    diff = np.empty(GROUP_ELEMS, np.int32)
    for k in range(groups.size):
        start = groups[k] * GROUP_ELEMS
        group = words[start : min(start + GROUP_ELEMS, words.size)]
        mean = np.int32(means[k] if means.size > 1 else means[0])
        if profile.size:
            column = start % profile.size
            done = 0
            while done < group.size:
                run = min(group.size - done, profile.size - column)
                piece = group[done : done + run]
                columns = profile[column : column + run]
                target = diff[done : done + run]
                for i in range(run):
                    top = np.int32((piece[i] >> top_shift) & top_mask)
                    target[i] = top - mean - columns[i] if top != 0 else np.int32(1 << 30)
                done += run
                column = 0
        else:
            for i in range(group.size):
                top = np.int32((group[i] >> top_shift) & top_mask)
                diff[i] = top - mean if top != 0 else np.int32(1 << 30)
        for i in range(group.size):
            d = diff[i]
            if d == 1 << 30:
                num_zero += 1
            else:
                b = min(max(np.int64(d) + first, 0), last)
                bins[i & 1, b] += 1
    return num_zero


@_jit
def make_symbols(
    words,
    kept,
    means,
    profile,
    first_elem,
    fields,
    window_base,
    lowest,
    highest,
    zero_present,
    fill,
    symbols,
    raws,
    patches,
):
    """Symbols and raw bits of the coded values of consecutive groups, end to end.

    Args:
        words: the groups' words.
        kept: bool for each of its groups, or empty for all.
        means: int32 for each of its groups, or one.
        first_elem: index of words[0] in the part.
        fields: (top_shift, top_mask, trailing_zeros, low_mask, low_bits, sign_shift) in the words' type; low_bits is the bit
            that the sign goes to, sign_shift the word's width if no sign is stored.
        patches: int64[n] positions in words, to be filled.

    Returns:
        (values, patches, OR and AND of the coded words, OR of the others).
    """
    top_shift, top_mask, trailing_zeros, low_mask, low_bits, sign_shift, sign_mask = fields
    num_groups = (words.size + GROUP_ELEMS - 1) // GROUP_ELEMS
    zero = words[0] ^ words[0]
    all_or, all_and, left_out = zero, ~zero, zero
    done = 0
    num_patches = 0
    base = np.int32(window_base)
    low = np.int32(lowest)
    high = np.int32(highest)
    filler = np.int32(fill)
    zero_bad = np.int32(0 if zero_present else 1)
    bad = np.empty(GROUP_ELEMS, np.uint8)
    for g in range(num_groups):
        start = g * GROUP_ELEMS
        group = words[start : min(start + GROUP_ELEMS, words.size)]
        size = group.size
        if kept.size and not kept[g]:
            for i in range(size):
                left_out |= group[i]
            continue
        mean = np.int32(means[g] if means.size > 1 else means[0]) + base
        symbol = symbols[done : done + size]
        raw = raws[done : done + size]
        any_bad = np.int32(0)
        if profile.size:
            column = (first_elem + start) % profile.size
            at = 0
            while at < size:
                run = min(size - at, profile.size - column)
                piece = group[at : at + run]
                columns = profile[column : column + run]
                symbol_run = symbol[at : at + run]
                bad_run = bad[at : at + run]
                for i in range(run):
                    top = np.int32((piece[i] >> top_shift) & top_mask)
                    s = top - mean - columns[i]
                    s = np.int32(0) if top == 0 else s
                    out = zero_bad if top == 0 else np.int32((s < low) | (s > high))
                    any_bad |= out
                    bad_run[i] = np.uint8(out)
                    symbol_run[i] = np.uint8(filler if out else s)
                at += run
                column = 0
        else:
            for i in range(np.uint64(size)):
                top = np.int32((group[i] >> top_shift) & top_mask)
                s = np.int32(top - mean)
                s = np.int32(0) if top == 0 else s
                out = zero_bad if top == 0 else np.int32((s < low) | (s > high))
                any_bad |= out
                bad[i] = np.uint8(out)
                symbol[i] = np.uint8(filler if out else s)
        for i in range(np.uint64(size)):
            word = group[i]
            all_or |= word
            all_and &= word
            raw[i] = ((word >> trailing_zeros) & low_mask) | (((word >> sign_shift) & sign_mask) << low_bits)
        if any_bad:
            for i in range(size):
                if bad[i]:
                    patches[num_patches] = start + i
                    num_patches += 1
        done += size
    return done, num_patches, all_or, all_and, left_out


@_jit
def encode_lanes(symbols, freq, bias, reciprocal, shift, words, states):
    """Entropy-code one segment; returns the number of uint16 words. states: uint32[32], overwritten."""
    num_values = symbols.size
    position = 0
    for lane in range(LANES):
        states[lane] = _LOW_STATE
    for t in range((num_values + LANES - 1) // LANES - 1, -1, -1):
        step = symbols[t * LANES : min((t + 1) * LANES, num_values)]
        for lane in range(step.size):
            s = step[lane]
            x = states[lane]
            f = freq[s]
            emit = np.uint32(1) if x >= np.uint32(f << np.uint32(19)) else np.uint32(0)
            words[position] = np.uint16(x)
            position += emit
            x = x >> (emit << np.uint32(4))
            q = np.uint32((np.uint64(x) * np.uint64(reciprocal[s])) >> _U32) >> shift[s]
            states[lane] = x + bias[s] + q * np.uint32(_SCALE - f)
    return position


@_jit
def encode_stream(symbols, values, freq, bias, reciprocal, shift, words, counts, states):
    """Entropy-code segments of `values` symbols each, end to end; returns the number of uint16 words in all."""
    at = 0
    total = 0
    for s in range(values.size):
        piece = symbols[at : at + values[s]]
        count = encode_lanes(piece, freq, bias, reciprocal, shift, words[total:], states[s])
        counts[s] = count
        total += count
        at += values[s]
    return total


@_jit
def decode_lanes(words, start, end, states, table, symbols):
    """Decode one segment's symbols from words[start:end], read backwards; returns whether all ended as it should.

    Up to 32 words before `start` may be read (they must exist) but are not used: a stream that runs dry is refused.
    """
    num_values = symbols.size
    position = end
    for t in range((num_values + LANES - 1) // LANES):
        step = symbols[t * LANES : min((t + 1) * LANES, num_values)]
        for lane in range(step.size - 1, -1, -1):
            x = states[lane]
            entry = table[x & _PROB_MASK]
            step[lane] = np.uint8(entry)
            x = ((entry >> np.uint32(8)) & np.uint32(4095)) * (x >> np.uint32(12)) + (entry >> np.uint32(20))
            needs = np.int64(1) if x < _LOW_STATE else np.int64(0)
            refilled = (x << _U16) | np.uint32(words[position - 1])
            x = refilled if needs == 1 else x
            position -= needs
            states[lane] = x
        if position < start:
            return False
    clean = position == start
    for lane in range(LANES):
        clean &= states[lane] == _LOW_STATE
    return clean


@_jit
def decode_stream(words, start, ends, values, states, table, symbols):
    """Decode segments of `values` symbols each, whose words end at `ends`; returns whether all ended as they should."""
    at = 0
    clean = True
    for s in range(values.size):
        clean &= decode_lanes(words, start, ends[s], states[s], table, symbols[at : at + values[s]])
        start = ends[s]
        at += values[s]
    return clean


@_jit
def join_words(symbols, raws, kept, means, profile, first_elem, fields, window_base, sign_constant, out):
    """Words of consecutive groups from symbols and raw bits; groups that are not kept become zero."""
    top_shift, top_mask, trailing_zeros, low_mask, low_bits, sign_shift, sign_mask = fields
    num_groups = (out.size + GROUP_ELEMS - 1) // GROUP_ELEMS
    zero = out[0] ^ out[0]
    done = 0
    base = np.int32(window_base)
    for g in range(num_groups):
        start = g * GROUP_ELEMS
        group = out[start : min(start + GROUP_ELEMS, out.size)]
        size = group.size
        if kept.size and not kept[g]:
            for i in range(size):
                group[i] = zero
            continue
        mean = np.int32(means[g] if means.size > 1 else means[0]) + base
        symbol = symbols[done : done + size]
        raw = raws[done : done + size]
        column = (first_elem + start) % profile.size if profile.size else 0
        at = 0
        while at < size:
            run = min(size - at, profile.size - column) if profile.size else size
            symbol_run = symbol[at : at + run]
            raw_run = raw[at : at + run]
            target = group[at : at + run]
            if profile.size:
                columns = profile[column : column + run]
                for i in range(run):
                    s = np.int32(symbol_run[i])
                    top = s + mean + columns[i] if s != 0 else np.int32(0)
                    r = raw_run[i]
                    word = ((zero + np.uint32(top)) & top_mask) << top_shift
                    word |= (r & low_mask) << trailing_zeros
                    word |= ((r >> low_bits) & sign_mask) << sign_shift
                    target[i] = word | sign_constant
            else:
                for i in range(run):
                    s = np.int32(symbol_run[i])
                    top = s + mean if s != 0 else np.int32(0)
                    r = raw_run[i]
                    word = ((zero + np.uint32(top)) & top_mask) << top_shift
                    word |= (r & low_mask) << trailing_zeros
                    word |= ((r >> low_bits) & sign_mask) << sign_shift
                    target[i] = word | sign_constant
            at += run
            column = 0
        done += size
