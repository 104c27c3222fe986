"""The rANS codec on CPU cores: Numba kernels behind the primitives of `kernels.py`, byte-identical to `reference.py`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from thinpoint.codec.contract import Mapper
from thinpoint.codec.rans import cpu_bits, cpu_kernels
from thinpoint.codec.rans.kernels import HISTOGRAM_BINS, BlockInput, BlockOutput, Differences, Scan
from thinpoint.codec.rans.reference import check_final, open_entropy
from thinpoint.codec.rans.spec import LANES, RansPrefix, raw_words
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.codec.transforms.split import SIGN_ONE, SIGN_STORED, Split
from thinpoint.digest import digest
from thinpoint.errors import MalformedFileError

name = "cpu"

_CHUNK_GROUPS = 1 << 13
_NO_PROFILE = np.zeros(0, np.int32)
_ALL_KEPT = np.zeros(0, bool)
_local = threading.local()


def _scratch(key: str, size: int, dtype: Any) -> np.ndarray:
    """A reused array of this thread, at least `size` long, contents undefined."""
    arrays = _local.__dict__.setdefault("arrays", {})
    array = arrays.get((key, dtype))
    if array is None or array.size < size:
        array = arrays[(key, dtype)] = np.empty(size, dtype)
    return array[:size]


def _fields(split: Split, dtype: np.dtype) -> tuple[Any, ...]:
    """The split in the words' own type, as the kernels take it."""
    stored = split.sign_mode == SIGN_STORED
    values = (
        split.top_shift,
        (1 << split.top_bits) - 1,
        split.trailing_zeros,
        (1 << split.low_bits) - 1,
        split.low_bits,
        split.word_bits - 1,
        1 if stored else 0,
    )
    return tuple(dtype.type(value) for value in values)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def scan(words: np.ndarray, map: Mapper) -> Scan:
    """OR, AND and the groups with any bit set."""
    num_groups = -(-words.size // GROUP_ELEMS)
    kept = np.empty(num_groups, bool)

    def one(chunk: slice) -> tuple[int, int]:
        piece = words[chunk.start * GROUP_ELEMS : chunk.stop * GROUP_ELEMS]
        both = cpu_kernels.scan_groups(piece, kept[chunk])
        return int(both[0]), int(both[1])

    or_mask, and_mask = 0, (1 << (8 * words.itemsize)) - 1
    for piece_or, piece_and in map(one, _chunks(num_groups, _CHUNK_GROUPS)):
        or_mask |= piece_or
        and_mask &= piece_and
    return Scan(or_mask=or_mask, and_mask=and_mask, kept=kept)


def group_means(words: np.ndarray, groups: np.ndarray, split: Split, map: Mapper) -> np.ndarray:
    """Mean top of each group."""
    means = np.empty(groups.size, np.int32)
    top_shift, top_mask = _fields(split, words.dtype)[:2]

    def one(chunk: slice) -> None:
        cpu_kernels.group_means(words, groups[chunk], top_shift, top_mask, means[chunk])

    list(map(one, _chunks(groups.size, _CHUNK_GROUPS)))
    return means


def column_sums(
    words: np.ndarray, split: Split, means: np.ndarray, rows: np.ndarray, row_elems: int, map: Mapper
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of top - mean, and counts, for each column."""
    top_shift, top_mask = _fields(split, words.dtype)[:2]

    def one(chunk: slice) -> tuple[np.ndarray, np.ndarray]:
        total, count = np.zeros(row_elems, np.int32), np.zeros(row_elems, np.int32)
        cpu_kernels.column_sums(words, rows[chunk], row_elems, top_shift, top_mask, means, total, count)
        return total, count

    total, count = np.zeros(row_elems, np.int64), np.zeros(row_elems, np.int64)
    for piece_total, piece_count in map(one, _chunks(rows.size, 64)):
        total += piece_total
        count += piece_count
    return total, count


def differences(
    words: np.ndarray,
    groups: np.ndarray,
    split: Split,
    means: np.ndarray,
    profile: np.ndarray | None,
    map: Mapper,
) -> Differences:
    """Histogram of top - prediction over the groups."""
    top_shift, top_mask = _fields(split, words.dtype)[:2]
    columns = _NO_PROFILE if profile is None else profile

    def one(chunk: slice) -> tuple[np.ndarray, int]:
        bins = np.zeros((2, HISTOGRAM_BINS + 2), np.int64)
        own = means[chunk] if means.size > 1 else means
        zeros = cpu_kernels.differences(words, groups[chunk], top_shift, top_mask, own, columns, bins)
        return bins.sum(0), int(zeros)

    bins, num_zero = np.zeros(HISTOGRAM_BINS + 2, np.int64), 0
    for piece, zeros in map(one, _chunks(groups.size, _CHUNK_GROUPS)):
        bins += piece
        num_zero += zeros
    return Differences(bins=bins[1:-1], num_zero=num_zero, num_outside=int(bins[0] + bins[-1]))


def encode_block(block: BlockInput) -> BlockOutput:
    """One block, segment by segment, from a private copy of its words."""
    prefix, num_elems = block.prefix, block.words.size
    split, segment_elems = prefix.split, prefix.segment_elems()
    dtype = block.words.dtype
    words = _scratch("words", num_elems, dtype)
    words[...] = block.words
    fields = _fields(split, dtype)
    profile = _NO_PROFILE if prefix.profile is None else prefix.profile
    num_segments = -(-num_elems // segment_elems)
    values = np.minimum(segment_elems, num_elems - np.arange(num_segments) * segment_elems)
    if block.kept is not None:
        sizes = np.full(block.kept.size, GROUP_ELEMS)
        sizes[-1] = num_elems - (block.kept.size - 1) * GROUP_ELEMS
        values = np.add.reduceat(
            np.where(block.kept, sizes, 0), np.arange(0, block.kept.size, segment_elems // GROUP_ELEMS)
        )
    raw_sizes = raw_words(values, split.raw_bits)
    raw = np.zeros(-(-int(raw_sizes.sum()) // 2) * 2, np.uint32)
    single = prefix.single_symbol >= 0
    tables = prefix.encode_tables
    symbols = _scratch("symbols", segment_elems, np.uint8)
    raws = _scratch("raws", segment_elems, dtype)
    stream = _scratch("stream", int(values.sum()) + 1, np.uint16)
    patches = _scratch("patches", segment_elems, np.int64)
    counts, states = np.zeros(num_segments, np.uint32), np.zeros((num_segments, LANES), np.uint32)
    positions, or_mask, and_mask, left_out = [], 0, (1 << split.word_bits) - 1, 0
    raw_at = words_at = 0
    groups_per_segment = segment_elems // GROUP_ELEMS
    for s in range(num_segments):
        start = s * segment_elems
        groups = slice(s * groups_per_segment, (s + 1) * groups_per_segment)
        done, num_patches, piece_or, piece_and, piece_left = cpu_kernels.make_symbols(
            words[start : start + segment_elems],
            _ALL_KEPT if block.kept is None else block.kept[groups],
            block.means if block.means.size == 1 else block.means[groups],
            profile,
            block.first_elem + start,
            fields,
            prefix.window_base,
            block.lowest,
            block.highest,
            block.zero_present,
            block.fill,
            symbols,
            raws,
            patches,
        )
        or_mask, and_mask, left_out = (
            or_mask | int(piece_or),
            and_mask & int(piece_and),
            left_out | int(piece_left),
        )
        if num_patches:
            positions.append(start + patches[:num_patches].copy())
        end = raw_at + int(raw_sizes[s])
        cpu_bits.pack(raws[:done], split.raw_bits, raw[raw_at:end].reshape(-1, LANES))
        raw_at = end
        if not single:
            count = cpu_kernels.encode_lanes(symbols[:done], *tables, stream[words_at:], states[s])
            counts[s] = count
            words_at += int(count)
    entropy = np.zeros(0, np.uint8)
    if not single:
        fixed = 4 * num_segments * (1 + LANES)
        entropy = np.zeros(-(-(fixed + 2 * words_at) // 8) * 8, np.uint8)
        entropy[: 4 * num_segments] = counts.view(np.uint8)
        entropy[4 * num_segments : fixed] = states.reshape(-1).view(np.uint8)
        entropy[fixed : fixed + 2 * words_at] = stream[:words_at].view(np.uint8)
    place = np.concatenate(positions) if positions else np.zeros(0, np.int64)
    tops = (words[place] >> fields[0]) & fields[1]
    raw_bytes = raw.view(np.uint8)
    return BlockOutput(
        raw=raw_bytes,
        entropy=entropy,
        raw_digest=digest(raw_bytes),
        entropy_digest=digest(entropy),
        words_digest=digest(words, block.first_elem * words.itemsize // 8),
        patch_positions=block.first_elem + place,
        patch_tops=tops.astype(np.int32),
        or_mask=or_mask,
        and_mask=and_mask,
        left_out=left_out,
    )


def decode_block(
    prefix: RansPrefix,
    first_elem: int,
    values: np.ndarray,
    raw: np.ndarray,
    entropy: np.ndarray,
    out: np.ndarray,
) -> int:
    """One block into its words; patches are left to the caller."""
    split, segment_elems = prefix.split, prefix.segment_elems()
    sizes = raw_words(values, split.raw_bits)
    expected = -(-int(sizes.sum()) * 4 // 8) * 8
    if raw.size != expected:
        raise MalformedFileError("a raw block has the wrong size", expected=expected, actual=raw.size)
    lines = raw.view(np.uint32)
    single = prefix.single_symbol
    symbols = _scratch("symbols", segment_elems, np.uint8)
    if single >= 0:
        if entropy.size:
            raise MalformedFileError(
                "a block of a single symbol has entropy-coded bytes", expected=0, actual=entropy.size
            )
        symbols[...] = single
    else:
        _, states, _, ends = open_entropy(entropy, values)
        states = states.copy()
        header_words = 2 * values.size * (1 + LANES)
        stream = entropy.view(np.uint16)
        ends = ends + header_words
    fields = _fields(split, out.dtype)
    sign_constant = out.dtype.type((1 << (split.word_bits - 1)) if split.sign_mode == SIGN_ONE else 0)
    profile = _NO_PROFILE if prefix.profile is None else prefix.profile
    raws = _scratch("raws", segment_elems, out.dtype)
    raw_at = 0
    for s in range(values.size):
        start = s * segment_elems
        count = int(values[s])
        end = raw_at + int(sizes[s])
        cpu_bits.unpack(lines[raw_at:end].reshape(-1, LANES), split.raw_bits, raws[:count])
        raw_at = end
        if single < 0:
            begin = header_words if s == 0 else int(ends[s - 1])
            check_final(
                cpu_kernels.decode_lanes(
                    stream, begin, int(ends[s]), states[s], prefix.decode_table, symbols[:count]
                )
            )
        target = out[start : start + segment_elems]
        first_group = (first_elem + start) // GROUP_ELEMS
        groups = slice(first_group, first_group + -(-target.size // GROUP_ELEMS))
        cpu_kernels.join_words(
            symbols[:count],
            raws[:count],
            _ALL_KEPT if prefix.kept_groups is None else prefix.kept_groups[groups],
            prefix.means if prefix.means.size == 1 else prefix.means[groups],
            profile,
            first_elem + start,
            fields,
            prefix.window_base,
            sign_constant,
            target,
        )
    return 0
