"""The rANS codec in plain NumPy, in the order of the specification: the truth, and able to decode everything without Numba."""

from __future__ import annotations

import numpy as np

from thinpoint.codec.contract import Mapper
from thinpoint.codec.rans.kernels import (
    HISTOGRAM_BINS,
    HISTOGRAM_ZERO,
    BlockInput,
    BlockOutput,
    Differences,
    Scan,
)
from thinpoint.codec.rans.spec import LANES, PROB_BITS, PROB_SCALE, STATE_LOW, RansPrefix, raw_words
from thinpoint.codec.transforms import predict
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.codec.transforms.split import Split, join_words, split_words
from thinpoint.digest import reference as digest
from thinpoint.errors import MalformedFileError

name = "reference"

_U16, _U32, _U64 = np.uint64(16), np.uint64(32), np.uint64


def scan(words: np.ndarray, map: Mapper) -> Scan:
    """OR, AND and the groups with any bit set."""
    padded = np.zeros(-(-words.size // GROUP_ELEMS) * GROUP_ELEMS, words.dtype)
    padded[: words.size] = words
    kept = padded.reshape(-1, GROUP_ELEMS).max(axis=1) != 0
    return Scan(
        or_mask=int(np.bitwise_or.reduce(words)), and_mask=int(np.bitwise_and.reduce(words)), kept=kept
    )


def _group_indices(groups: np.ndarray, num_elems: int) -> tuple[np.ndarray, np.ndarray]:
    """(element indices, which of the groups each belongs to), groups one after the other."""
    index = (groups[:, None] * GROUP_ELEMS + np.arange(GROUP_ELEMS, dtype=np.int64)).reshape(-1)
    owner = np.repeat(np.arange(groups.size), GROUP_ELEMS)
    inside = index < num_elems
    return index[inside], owner[inside]


def group_means(words: np.ndarray, groups: np.ndarray, split: Split, map: Mapper) -> np.ndarray:
    """Mean top of each group."""
    index, owner = _group_indices(groups, words.size)
    top = np.zeros(groups.size * GROUP_ELEMS, np.int32)
    top[owner * GROUP_ELEMS + index % GROUP_ELEMS] = split_words(words[index], split)[0]
    return predict.group_means(top, groups.size)


def column_sums(
    words: np.ndarray, split: Split, means: np.ndarray, rows: np.ndarray, row_elems: int, map: Mapper
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of top - mean, and counts, for each column."""
    total, count = np.zeros(row_elems, np.int64), np.zeros(row_elems, np.int64)
    for row in rows:
        index = np.arange(row * row_elems, (row + 1) * row_elems)
        top, _ = split_words(words[index], split)
        total += np.where(top != 0, top - means[index // GROUP_ELEMS], 0)
        count += top != 0
    return total, count


def _predictions(index: np.ndarray, means_of: np.ndarray, profile: np.ndarray | None) -> np.ndarray:
    return means_of if profile is None else means_of + profile[index % profile.size]


def differences(
    words: np.ndarray,
    groups: np.ndarray,
    split: Split,
    means: np.ndarray,
    profile: np.ndarray | None,
    map: Mapper,
) -> Differences:
    """Histogram of top - prediction over the groups."""
    index, owner = _group_indices(groups, words.size)
    top, _ = split_words(words[index], split)
    means_of = means[owner] if means.size > 1 else np.broadcast_to(means, owner.shape)
    bins = (top - _predictions(index, means_of, profile) + HISTOGRAM_ZERO)[top != 0]
    inside = (bins >= 0) & (bins < HISTOGRAM_BINS)
    return Differences(
        bins=np.bincount(bins[inside], minlength=HISTOGRAM_BINS).astype(np.int64),
        num_zero=int((top == 0).sum()),
        num_outside=int((~inside).sum()),
    )


def pad8(data: np.ndarray) -> np.ndarray:
    """The bytes of an array, zero-padded to a multiple of 8."""
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])


def _kept_elems(kept: np.ndarray | None, num_elems: int) -> np.ndarray:
    """Element indices (in the block) of the groups that are coded."""
    if kept is None:
        return np.arange(num_elems, dtype=np.int64)
    return np.flatnonzero(np.repeat(kept, GROUP_ELEMS)[:num_elems])


def _segment_rows(elems: np.ndarray, num_segments: int, segment_elems: int) -> tuple[np.ndarray, np.ndarray]:
    """(segment, position in the segment's coded values) of each coded element of a block."""
    segment = elems // segment_elems
    first = np.searchsorted(segment, np.arange(num_segments))
    return segment, np.arange(elems.size) - first[segment]


def encode_block(block: BlockInput) -> BlockOutput:
    """One block, all its segments side by side."""
    prefix, words = block.prefix, np.array(block.words)
    split, segment_elems = prefix.split, prefix.segment_elems()
    num_segments = -(-words.size // segment_elems)
    elems = _kept_elems(block.kept, words.size)
    coded = words[elems]
    top, raw = split_words(coded, split)
    means_of = (
        block.means[elems // GROUP_ELEMS]
        if block.means.size > 1
        else np.broadcast_to(block.means, elems.shape)
    )
    symbol = top - _predictions(block.first_elem + elems, means_of, prefix.profile) - prefix.window_base
    symbol[top == 0] = 0
    patched = np.where(top == 0, not block.zero_present, (symbol < block.lowest) | (symbol > block.highest))
    symbol[patched] = block.fill

    segment, place = _segment_rows(elems, num_segments, segment_elems)
    values = np.bincount(segment, minlength=num_segments)
    steps = int(-(-values.max(initial=0) // LANES))
    shape = (num_segments, steps * LANES)
    symbols, raws, valid = np.zeros(shape, np.int64), np.zeros(shape, np.uint64), np.zeros(shape, bool)
    symbols[segment, place], raws[segment, place], valid[segment, place] = symbol, raw, True
    shape3 = (num_segments, steps, LANES)
    raw_plane = _pack_raw(raws.reshape(shape3), values, split.raw_bits)
    raw_bytes = pad8(raw_plane)
    if prefix.single_symbol >= 0:
        entropy = np.zeros(0, np.uint8)
    else:
        entropy = _encode_lanes(symbols.reshape(shape3), valid.reshape(shape3), prefix)
    left_out = np.delete(words, elems)
    return BlockOutput(
        raw=raw_bytes,
        entropy=entropy,
        raw_digest=digest(raw_bytes),
        entropy_digest=digest(entropy),
        words_digest=digest(words, block.first_elem * words.itemsize // 8),
        patch_positions=block.first_elem + elems[patched],
        patch_tops=top[patched].astype(np.int32),
        or_mask=int(np.bitwise_or.reduce(coded)) if coded.size else 0,
        and_mask=int(np.bitwise_and.reduce(coded)) if coded.size else (1 << split.word_bits) - 1,
        left_out=int(np.bitwise_or.reduce(left_out)) if left_out.size else 0,
    )


def _pack_raw(raws: np.ndarray, values: np.ndarray, raw_bits: int) -> np.ndarray:
    """uint32 words of the raw plane: each lane of a segment concatenates its values in step order, lowest bit first."""
    planes = []
    for s, num_words in enumerate(raw_words(values, raw_bits) // LANES):
        words = np.zeros((int(num_words) + 3, LANES), np.uint64)
        for t in range(-(-int(values[s]) // LANES)):
            word, shift = divmod(t * raw_bits, 32)
            low, high = raws[s, t] & _U64(0xFFFFFFFF), raws[s, t] >> _U32
            words[word] |= low << _U64(shift)
            words[word + 1] |= (words[word] >> _U32) | (high << _U64(shift))
            words[word + 2] |= words[word + 1] >> _U32
            words[word : word + 2] &= _U64(0xFFFFFFFF)
        planes.append(words[: int(num_words)].astype("<u4").reshape(-1))
    return np.concatenate(planes) if planes else np.zeros(0, "<u4")


def _encode_lanes(symbols: np.ndarray, valid: np.ndarray, prefix: RansPrefix) -> np.ndarray:
    """The entropy plane of a block: word counts, lane states, words, padded to 8 bytes."""
    num_segments, steps, _ = symbols.shape
    freq, bias, reciprocal, shift = (a.astype(np.uint64) for a in prefix.encode_tables)
    state = np.full((num_segments, LANES), STATE_LOW, np.uint64)
    words = np.zeros((num_segments, steps * LANES), "<u2")
    count = np.zeros(num_segments, np.int64)
    for t in range(steps - 1, -1, -1):
        symbol, use = symbols[:, t], valid[:, t]
        f = freq[symbol]
        emit = use & (state >= f << _U64(31 - PROB_BITS))
        place = count[:, None] + np.cumsum(emit, 1) - 1
        segment, _ = np.nonzero(emit)
        words[segment, place[emit]] = (state[emit] & _U64(0xFFFF)).astype(np.uint16)
        count += emit.sum(1)
        state = np.where(emit, state >> _U16, state)
        quotient = ((state * reciprocal[symbol]) >> _U32) >> shift[symbol]
        state = np.where(use, state + bias[symbol] + quotient * (_U64(PROB_SCALE) - f), state)
    stream = [words[s, : count[s]] for s in range(num_segments)]
    parts = [count.astype("<u4"), state.astype("<u4"), *stream]
    return pad8(np.concatenate([p.reshape(-1).view(np.uint8) for p in parts]))


def decode_block(
    prefix: RansPrefix,
    first_elem: int,
    values: np.ndarray,
    raw: np.ndarray,
    entropy: np.ndarray,
    out: np.ndarray,
) -> None:
    """One block into its words; patches are left to the caller."""
    split, segment_elems = prefix.split, prefix.segment_elems()
    num_segments = values.size
    first_group = first_elem // GROUP_ELEMS
    num_groups = -(-out.size // GROUP_ELEMS)
    kept = None if prefix.kept_groups is None else prefix.kept_groups[first_group : first_group + num_groups]
    elems = _kept_elems(kept, out.size)
    segment, place = _segment_rows(elems, num_segments, segment_elems)
    raws = _unpack_raw(raw, values, split.raw_bits)
    if prefix.single_symbol >= 0:
        if entropy.size:
            raise MalformedFileError(
                "a block of a single symbol has entropy-coded bytes", expected=0, actual=entropy.size
            )
        symbol = np.full(elems.size, prefix.single_symbol)
    else:
        symbol = _decode_lanes(entropy, values, prefix.decode_table)[segment, place]
    means = prefix.means
    means_of = (
        means[first_group + elems // GROUP_ELEMS] if means.size > 1 else np.broadcast_to(means, elems.shape)
    )
    top = symbol + _predictions(first_elem + elems, means_of, prefix.profile) + prefix.window_base
    top[symbol == 0] = 0
    out[...] = 0
    out[elems] = join_words(top, raws[segment, place], split)


def _unpack_raw(raw: np.ndarray, values: np.ndarray, raw_bits: int) -> np.ndarray:
    """uint64[segment, place] raw bits; the inverse of `_pack_raw`."""
    sizes = raw_words(values, raw_bits)
    expected = -(-int(sizes.sum()) * 4 // 8) * 8
    if raw.size != expected:
        raise MalformedFileError("a raw block has the wrong size", expected=expected, actual=raw.size)
    steps = int(-(-values.max(initial=0) // LANES))
    raws = np.zeros((values.size, steps, LANES), np.uint64)
    offset = 0
    for s, size in enumerate(sizes):
        words = np.zeros((int(size) // LANES + 2, LANES), np.uint64)
        words[: int(size) // LANES] = raw[offset : offset + 4 * int(size)].view("<u4").reshape(-1, LANES)
        offset += 4 * int(size)
        for t in range(-(-int(values[s]) // LANES)):
            word, shift = divmod(t * raw_bits, 32)
            low = words[word] | (words[word + 1] << _U32)
            value = low >> _U64(shift)
            if shift:
                value |= words[word + 2] << _U64(64 - shift)
            raws[s, t] = value & _U64((1 << raw_bits) - 1)
    return raws.reshape(values.size, -1)


def _decode_lanes(entropy: np.ndarray, values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """int64[segment, place] symbols of a block."""
    num_segments = values.size
    count, state, words, ends = open_entropy(entropy, values)
    pointer = ends.copy()
    starts = ends - count
    steps = int(-(-values.max(initial=0) // LANES))
    symbols = np.zeros((num_segments, steps, LANES), np.int64)
    state = state.astype(np.uint64)
    lane = np.arange(LANES)
    for t in range(steps):
        use = t * LANES + lane[None, :] < values[:, None]
        entry = table[(state & _U64(PROB_SCALE - 1)).astype(np.int64)].astype(np.uint64)
        symbols[:, t] = np.where(use, entry & _U64(255), 0)
        moved = ((entry >> _U64(8)) & _U64(4095)) * (state >> _U64(PROB_BITS)) + (entry >> _U64(20))
        state = np.where(use, moved, state)
        needs = use & (state < STATE_LOW)
        pointer -= needs.sum(1)
        if (pointer < starts).any():
            raise MalformedFileError("a segment's words end before its values do")
        place = pointer[:, None] + np.cumsum(needs, 1) - 1
        state[needs] = (state[needs] << _U16) | words[place[needs]].astype(np.uint64)
    check_final(bool((pointer == starts).all() and (state == STATE_LOW).all()))
    return symbols.reshape(num_segments, -1)


def check_final(clean: bool) -> None:
    """Every word used, every lane back at its start state: a free integrity check."""
    if not clean:
        raise MalformedFileError("a segment's lanes did not end in their start states")


def open_entropy(
    entropy: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(word counts int64, states uint32[segment, lane], words uint16, end of each segment's words), all checked."""
    num_segments = values.size
    fixed = 4 * num_segments * (1 + LANES)
    if entropy.size < fixed:
        raise MalformedFileError(
            "an entropy block is shorter than its header", expected=fixed, actual=entropy.size
        )
    count = entropy[: 4 * num_segments].view("<u4").astype(np.int64)
    state = entropy[4 * num_segments : fixed].view("<u4").reshape(num_segments, LANES)
    words = entropy[fixed:].view("<u2")
    if (count > values).any() or -(-(fixed + 2 * int(count.sum())) // 8) * 8 != entropy.size:
        raise MalformedFileError("the word counts of an entropy block do not fit its size")
    if ((state < STATE_LOW) | (state >= 1 << 31)).any():
        raise MalformedFileError("a lane state is out of range")
    return count, state, words, np.cumsum(count)
