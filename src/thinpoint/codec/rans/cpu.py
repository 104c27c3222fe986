"""The rANS codec on CPU cores: Numba kernels behind the primitives of `kernels.py`, byte-identical to `reference.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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

_CHUNK_GROUPS = 1 << 11
"""Groups that one task takes in a pass over a part: 2 MiB of FP32."""
_SAMPLE_CHUNK_GROUPS = 1 << 9
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
    for piece, zeros in map(one, _chunks(groups.size, _SAMPLE_CHUNK_GROUPS)):
        bins += piece
        num_zero += zeros
    return Differences(bins=bins[1:-1], num_zero=num_zero, num_outside=int(bins[0] + bins[-1]))


def encode_block(block: BlockInput) -> BlockOutput:
    """One block from a private copy of its words.

    A few kernel calls serve all its segments, so that threads seldom wait for the interpreter's lock.
    """
    prefix, num_elems = block.prefix, block.words.size
    split = prefix.split
    dtype = block.words.dtype
    words = _scratch("words", num_elems, dtype)
    words[...] = block.words
    fields = _fields(split, dtype)
    values = _coded_values(block.kept, num_elems, prefix.segment_elems())
    symbols = _scratch("symbols", num_elems, np.uint8)
    raws = _scratch("raws", num_elems, dtype)
    patches = _scratch("patches", num_elems, np.int64)
    done, num_patches, or_mask, and_mask, left_out = cpu_kernels.make_symbols(
        words,
        _ALL_KEPT if block.kept is None else block.kept,
        block.means,
        _NO_PROFILE if prefix.profile is None else prefix.profile,
        block.first_elem,
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
    sizes = raw_words(values, split.raw_bits)
    raw = np.zeros(-(-int(sizes.sum()) // 2) * 2, np.uint32)
    for lines, piece in _raw_pieces(raw, raws[:done], values, sizes, prefix):
        cpu_bits.pack(piece, split.raw_bits, lines)
    entropy = np.zeros(0, np.uint8)
    if prefix.single_symbol < 0:
        entropy = _encode_entropy(symbols[:done], values, prefix)
    place = patches[:num_patches].copy()
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
        or_mask=int(or_mask),
        and_mask=int(and_mask),
        left_out=int(left_out),
    )


def _coded_values(kept: np.ndarray | None, num_elems: int, segment_elems: int) -> np.ndarray:
    """int64: coded values of each segment of a block."""
    num_segments = -(-num_elems // segment_elems)
    if kept is None:
        return np.minimum(segment_elems, num_elems - np.arange(num_segments) * segment_elems)
    sizes = np.full(kept.size, GROUP_ELEMS)
    sizes[-1] = num_elems - (kept.size - 1) * GROUP_ELEMS
    return np.add.reduceat(np.where(kept, sizes, 0), np.arange(0, kept.size, segment_elems // GROUP_ELEMS))


def _raw_pieces(
    raw: np.ndarray, raws: np.ndarray, values: np.ndarray, sizes: np.ndarray, prefix: RansPrefix
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(raw words as rows of 32, values) of each segment, or of all at once where every segment but the last is whole.

    A whole segment is then a whole number of rows and of periods, and the rows of a block lie end to end.
    """
    whole = prefix.kept_groups is None and prefix.steps % cpu_bits.PERIOD_STEPS == 0
    if whole and (prefix.steps * prefix.split.raw_bits) % 32 == 0:
        yield raw[: int(sizes.sum())].reshape(-1, LANES), raws
        return
    row = first = 0
    for count, size in zip(values.tolist(), sizes.tolist(), strict=True):
        yield raw[row : row + size].reshape(-1, LANES), raws[first : first + count]
        row, first = row + size, first + count


def _encode_entropy(symbols: np.ndarray, values: np.ndarray, prefix: RansPrefix) -> np.ndarray:
    """The entropy plane of a block: counts, states, words, padded to 8 bytes."""
    counts, states = np.empty(values.size, np.uint32), np.empty((values.size, LANES), np.uint32)
    # The kernel writes a word before it knows whether it counts.
    stream = _scratch("stream", symbols.size + 1, np.uint16)
    num_words = cpu_kernels.encode_stream(symbols, values, *prefix.encode_tables, stream, counts, states)
    fixed = counts.nbytes + states.nbytes
    entropy = np.zeros(-(-(fixed + 2 * num_words) // 8) * 8, np.uint8)
    entropy[: counts.nbytes] = counts.view(np.uint8)
    entropy[counts.nbytes : fixed] = states.reshape(-1).view(np.uint8)
    entropy[fixed : fixed + 2 * num_words] = stream[:num_words].view(np.uint8)
    return entropy


def decode_block(
    prefix: RansPrefix,
    first_elem: int,
    values: np.ndarray,
    raw: np.ndarray,
    entropy: np.ndarray,
    out: np.ndarray,
) -> None:
    """One block into its words; patches are left to the caller."""
    split = prefix.split
    sizes = raw_words(values, split.raw_bits)
    expected = -(-int(sizes.sum()) * 4 // 8) * 8
    if raw.size != expected:
        raise MalformedFileError("a raw block has the wrong size", expected=expected, actual=raw.size)
    num_values = int(values.sum())
    symbols = _scratch("symbols", num_values, np.uint8)
    if prefix.single_symbol >= 0:
        if entropy.size:
            raise MalformedFileError(
                "a block of a single symbol has entropy-coded bytes", expected=0, actual=entropy.size
            )
        symbols[...] = prefix.single_symbol
    else:
        _, states, _, ends = open_entropy(entropy, values)
        start = 2 * values.size * (1 + LANES)
        check_final(
            cpu_kernels.decode_stream(
                entropy.view(np.uint16),
                start,
                start + ends,
                values,
                states.copy(),
                prefix.decode_table,
                symbols,
            )
        )
    raws = _scratch("raws", num_values, out.dtype)
    for lines, piece in _raw_pieces(raw.view(np.uint32), raws, values, sizes, prefix):
        cpu_bits.unpack(lines, split.raw_bits, piece)
    groups = slice(first_elem // GROUP_ELEMS, -(-(first_elem + out.size) // GROUP_ELEMS))
    cpu_kernels.join_words(
        symbols,
        raws,
        _ALL_KEPT if prefix.kept_groups is None else prefix.kept_groups[groups],
        prefix.means if prefix.means.size == 1 else prefix.means[groups],
        _NO_PROFILE if prefix.profile is None else prefix.profile,
        first_elem,
        _fields(split, out.dtype),
        prefix.window_base,
        out.dtype.type((1 << (split.word_bits - 1)) if split.sign_mode == SIGN_ONE else 0),
        out,
    )
