"""Constants, tables and the prefix of the rANS codec (`spec/CODECS.md`, codec 2): one stream for every backend.

The coder is a range variant of asymmetric numeral systems (J. Duda, arXiv:1311.2540) with interleaved states as in F. Giesen,
arXiv:1402.3392: 32 lanes share one stream of 16-bit words; states live in [2^15, 2^31).
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.codec.transforms.split import SIGN_ONE, Split
from thinpoint.errors import MalformedFileError

CODEC_ID = 2
LANES = 32
PROB_BITS = 12
PROB_SCALE = 1 << PROB_BITS
STATE_LOW = 1 << 15
NUM_SYMBOLS = 256
MAX_STEPS = 4096
MAX_BASE = 1 << 20
STEPS_PER_GROUP = GROUP_ELEMS // LANES

FLAG_ZERO_GROUPS, FLAG_MEANS, FLAG_PROFILE, FLAG_MEANS16, FLAG_PROFILE16, FLAG_SINGLE = 1, 2, 4, 8, 16, 32
_FLAGS_KNOWN = 63

_HEADER = struct.Struct("<BBBBHBBiiiIII")
assert _HEADER.size == 32


@dataclass(frozen=True, kw_only=True)
class RansPrefix:
    """The decoded prefix of a part.

    Attributes:
        split: fields of a word.
        steps: steps of a whole segment; a segment covers LANES x steps elements.
        window_base: top = prediction + window_base + symbol, for symbols 1..255; symbol 0 is top = 0.
        freqs: int64 array of 256 frequencies that sum to 4096; 4096 at one symbol means that nothing is entropy coded.
        kept_groups: bool array, one for each group of 256 elements, False where all its words are zero; None if all kept.
        means: int32 array, a mean for each group, or a single one for the whole part.
        profile: int32 array of row_elems columns, or None.
        patch_positions: int64 array, ascending element indices in the part.
        patch_tops: int32 array, the top of each patched element.
    """

    split: Split
    steps: int
    window_base: int
    freqs: np.ndarray
    kept_groups: np.ndarray | None
    means: np.ndarray
    profile: np.ndarray | None
    patch_positions: np.ndarray
    patch_tops: np.ndarray

    @cached_property
    def single_symbol(self) -> int:
        """The only symbol, or -1 if there are several."""
        likeliest = int(self.freqs.argmax())
        return likeliest if self.freqs[likeliest] == PROB_SCALE else -1

    @cached_property
    def decode_table(self) -> np.ndarray:
        """uint32[4096]: symbol | frequency << 8 | offset in the symbol's range << 20; zeros for a single symbol."""
        if self.single_symbol >= 0:
            return np.zeros(PROB_SCALE, np.uint32)
        symbols = np.repeat(np.arange(NUM_SYMBOLS, dtype=np.int64), self.freqs)
        starts = np.cumsum(self.freqs) - self.freqs
        offset = np.arange(PROB_SCALE, dtype=np.int64) - starts[symbols]
        return (symbols | (self.freqs[symbols] << 8) | (offset << 20)).astype(np.uint32)

    @cached_property
    def encode_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(freq, bias, reciprocal, shift) of `encode_tables`."""
        return encode_tables(self.freqs)

    def segment_elems(self) -> int:
        return LANES * self.steps

    def values_in_segments(self, num_elems: int) -> np.ndarray:
        """int64: how many values each segment codes, zero groups left out."""
        if self.kept_groups is None:
            starts = np.arange(0, num_elems, self.segment_elems(), dtype=np.int64)
            return np.minimum(self.segment_elems(), num_elems - starts)
        num_groups = self.kept_groups.size
        in_group = np.full(num_groups, GROUP_ELEMS, np.int64)
        in_group[-1] = num_elems - (num_groups - 1) * GROUP_ELEMS
        in_group[~self.kept_groups] = 0
        per_segment = self.segment_elems() // GROUP_ELEMS
        return np.add.reduceat(in_group, np.arange(0, num_groups, per_segment))


def raw_words(values: np.ndarray, raw_bits: int | np.ndarray) -> np.ndarray:
    """uint32 words that the raw bits of segments of `values` values take: 32 x ceil(steps x raw_bits / 32)."""
    steps = -(-values // LANES)
    return LANES * (-(-(steps * raw_bits) // 32))


def normalise(histogram: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Frequencies (int64[256], sum 4096) for a histogram: f = 1 + h (4096 - m) // n, the rest to the most frequent.

    Args:
        histogram: int64[256] counts; symbols that are not present count nothing.
        present: bool[256], the symbols that get a frequency, at least one.
    """
    counts = np.where(present, histogram, 0).astype(np.int64)
    num_present = int(present.sum())
    total = max(int(counts.sum()), 1)
    freqs = np.where(present, 1 + counts * (PROB_SCALE - num_present) // total, 0).astype(np.int64)
    top = int(np.where(present, counts, -1).argmax())
    freqs[top] += PROB_SCALE - int(freqs.sum())
    return freqs


def encode_tables(freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(freq, bias, reciprocal, shift), uint32[256] each: x div freq = mulhi(x, reciprocal) >> shift, exact below 2^31.

    The step is x <- x + bias + (x div freq) (4096 - freq); frequency 1 uses the reciprocal 2^32 - 1, which gives x - 1.
    """
    freq = freqs.astype(np.int64)
    start = np.cumsum(freq) - freq
    reciprocal, shift, bias = np.zeros(256, np.int64), np.zeros(256, np.int64), start.copy()
    for symbol in np.flatnonzero(freq):
        value = int(freq[symbol])
        if value == 1:
            reciprocal[symbol] = 0xFFFFFFFF
            bias[symbol] += PROB_SCALE - 1
        elif value < PROB_SCALE:
            log = (value - 1).bit_length()
            reciprocal[symbol] = ((1 << (log + 31)) + value - 1) // value
            shift[symbol] = log - 1
    return tuple(a.astype(np.uint32) for a in (freq, bias, reciprocal, shift))  # type: ignore[return-value]


def pack_prefix(prefix: RansPrefix) -> bytes:
    """The prefix as stored."""
    split, single = prefix.split, prefix.single_symbol
    flags, mean_base, profile_base, columns = 0, 0, 0, 0
    sections = [b""]
    if prefix.patch_positions.size:
        sections += [
            prefix.patch_positions.astype("<u4").tobytes(),
            prefix.patch_tops.astype("<u2").tobytes(),
        ]
    if single < 0:
        sections.append(pack_table(prefix.freqs))
    else:
        flags |= FLAG_SINGLE
    if prefix.profile is not None:
        profile_base, is_wide, data = _above_lowest(prefix.profile)
        flags |= FLAG_PROFILE | (FLAG_PROFILE16 if is_wide else 0)
        columns = prefix.profile.size
        sections.append(data)
    if prefix.means.size == 1:
        mean_base = int(prefix.means[0])
    else:
        mean_base, is_wide, data = _above_lowest(prefix.means)
        flags |= FLAG_MEANS | (FLAG_MEANS16 if is_wide else 0)
        sections.append(data)
    if prefix.kept_groups is not None:
        flags |= FLAG_ZERO_GROUPS
        sections.append(np.packbits(~prefix.kept_groups, bitorder="little").tobytes())
    sections[0] = _HEADER.pack(
        flags,
        split.sign_mode,
        split.trailing_zeros,
        split.low_bits,
        prefix.steps,
        max(single, 0),
        0,
        prefix.window_base,
        mean_base,
        profile_base,
        columns,
        prefix.patch_positions.size,
        0,
    )
    return b"".join([section + bytes(-len(section) % 4) for section in sections])


def _above_lowest(values: np.ndarray) -> tuple[int, bool, bytes]:
    """(the lowest value, whether others are more than 255 above it, how much each is above it as stored)."""
    lowest = int(values.min())
    is_wide = int(values.max()) - lowest > 255
    return lowest, is_wide, (values - lowest).astype("<u2" if is_wide else "u1").tobytes()


class _Cursor:
    """Takes typed sections off the prefix, each starting at a multiple of 4 bytes."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data = data
        self.offset = offset

    def take(self, dtype: str, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        end = self.offset + size + (-size % 4)
        if end > len(self.data):
            raise MalformedFileError(
                "the prefix of a part is too short for its sections", expected=end, actual=len(self.data)
            )
        array = np.frombuffer(self.data, dtype, count, self.offset)
        if any(self.data[self.offset + size : end]):
            raise MalformedFileError("padding in the prefix of a part is not zero")
        self.offset = end
        return array

    def take_table(self) -> np.ndarray:
        """The frequencies (int64[256]) that `pack_table` wrote."""
        (zero,), at = _numbers(self.data, self.offset, 1)
        _check(at + 2 <= len(self.data), _CUT_OFF)
        first, last = self.data[at : at + 2]
        values, end = _numbers(self.data, at + 2, max(last + 1 - first, 0))
        _check(
            first > 0 and (first > last or bool(values[0] and values[-1])),
            "the symbol range of a part is not valid",
        )
        freqs = np.zeros(NUM_SYMBOLS, np.int64)
        freqs[0] = zero
        freqs[first : last + 1] = values
        self.take("u1", end - self.offset)
        _check(
            zero + sum(values) == PROB_SCALE and max([zero, *values]) < PROB_SCALE,
            "the frequencies of a part do not sum to 4096",
        )
        return freqs


_CUT_OFF = "the frequencies of a part are cut off"


_LEB128 = np.array([n if n < 128 else n & 127 | 128 | n >> 7 << 8 for n in range(PROB_SCALE + 1)], "<u2")
"""Each frequency as stored, in one byte or two; the second of a short one is 0."""


def pack_table(freqs: np.ndarray) -> bytes:
    """Frequency of symbol 0, the lowest and highest other symbol, the frequencies from one to the other.

    A frequency below 128 takes one byte, any other two, low 7 bits first with the high bit set (LEB128).
    """
    pairs = _LEB128[freqs].view(np.uint8)
    is_stored = pairs != 0
    is_stored[::2] = True
    numbers = pairs[is_stored].tobytes()
    size = 1 + (numbers[0] >> 7)
    # Neither the first nor the last byte of a frequency that is not zero is zero.
    from_first = numbers[size:].lstrip(b"\0")
    to_last = from_first.rstrip(b"\0")
    first, last = 1, 0
    if to_last:
        first += len(numbers) - size - len(from_first)
        last = NUM_SYMBOLS - 1 - (len(from_first) - len(to_last))
    return numbers[:size] + bytes((first, last)) + to_last


def _numbers(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    """(`count` numbers from `at` on, where they end)."""
    rest = iter(data[at : at + 2 * count])
    end = at + count

    def of_two_bytes(first: int) -> int:
        nonlocal end
        end += 1
        second = next(rest, -1)
        _check(second >= 0, _CUT_OFF)
        _check(0 < second < 128, "a frequency of a part is not valid")
        return first & 127 | second << 7

    values = [value if value < 128 else of_two_bytes(value) for value in itertools.islice(rest, count)]
    _check(len(values) == count, _CUT_OFF)
    return values, end


def table_bytes(freqs: np.ndarray) -> int:
    """Length of `pack_table`, without the work."""
    seen = np.flatnonzero(freqs[1:])
    span = int(seen[-1] - seen[0]) + 1 if seen.size else 0
    return 3 + span + int((freqs >= 128).sum())


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise MalformedFileError(what)


def parse_prefix(data: bytes, num_elems: int, word_bytes: int, block_elems: int) -> RansPrefix:
    """The prefix of a part, every value checked.

    Raises:
        MalformedFileError: a size, count, sum or range is not as the specification demands.
    """
    _check(len(data) >= _HEADER.size, "the prefix of a part is shorter than its header")
    (
        flags,
        sign_mode,
        zeros,
        low,
        steps,
        single,
        reserved,
        base,
        mean_base,
        profile_base,
        columns,
        patches,
        reserved2,
    ) = _HEADER.unpack_from(data)
    _check(
        not flags & ~_FLAGS_KNOWN and not reserved and not reserved2,
        "reserved bits of a part's prefix are set",
    )
    split = Split(word_bits=8 * word_bytes, sign_mode=sign_mode, trailing_zeros=zeros, low_bits=low)
    _check(sign_mode <= SIGN_ONE and split.is_valid, "the bit fields of a part do not fit its words")
    _check(
        0 < steps <= MAX_STEPS and steps % STEPS_PER_GROUP == 0 and block_elems % (LANES * steps) == 0,
        "the segment length of a part is not valid",
    )
    _check(
        max(abs(base), abs(mean_base), abs(profile_base)) <= MAX_BASE,
        "a base in a part's prefix is out of range",
    )
    _check(patches <= num_elems and columns <= num_elems, "a part has more patches or columns than elements")
    _check(bool(flags & FLAG_PROFILE) == (columns > 0), "a part's profile flag and column count disagree")
    _check(bool(flags & FLAG_SINGLE) or single == 0, "reserved bits of a part's prefix are set")
    cursor = _Cursor(data, _HEADER.size)
    positions = cursor.take("<u4", patches).astype(np.int64)
    tops = cursor.take("<u2", patches).astype(np.int32)
    _check(
        patches == 0 or (int(positions[-1]) < num_elems and bool((positions[1:] > positions[:-1]).all())),
        "patch positions are not ascending or lie outside of the part",
    )
    _check(patches == 0 or int(tops.max()) < 1 << split.top_bits, "a patch does not fit the symbol part")
    freqs = np.zeros(NUM_SYMBOLS, np.int64)
    if flags & FLAG_SINGLE:
        freqs[single] = PROB_SCALE
    else:
        freqs = cursor.take_table()
    num_groups = -(-num_elems // GROUP_ELEMS)
    profile = None
    if flags & FLAG_PROFILE:
        profile = (
            cursor.take("<u2" if flags & FLAG_PROFILE16 else "u1", columns).astype(np.int32) + profile_base
        )
    means = np.array([mean_base], np.int32)
    if flags & FLAG_MEANS:
        means = cursor.take("<u2" if flags & FLAG_MEANS16 else "u1", num_groups).astype(np.int32) + mean_base
    kept = None
    if flags & FLAG_ZERO_GROUPS:
        bits = np.unpackbits(cursor.take("u1", -(-num_groups // 8)), bitorder="little")
        _check(not bits[num_groups:].any(), "padding of a part's zero-group bitmap is not zero")
        kept = bits[:num_groups] == 0
    _check(cursor.offset == len(data), "the prefix of a part is longer than its sections")
    return RansPrefix(
        split=split,
        steps=steps,
        window_base=base,
        freqs=freqs,
        kept_groups=kept,
        means=means,
        profile=profile,
        patch_positions=positions,
        patch_tops=tops,
    )
