"""Raw bits, lane by lane, on a CPU core: each lane concatenates its values in step order into 32-bit words.

Word w of lane l of a segment lies at 32 w + l. Whole periods of 16 steps go through kernels made for one width (all shifts
constants, one vector over the lanes: 0.06 ns a value against 0.5 and 0.9 for the general loop, FP32 on a Zen 5 core); the rest,
odd widths and widths over 32 through the general loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from thinpoint.codec.rans.spec import LANES

_jit = nb.njit(nogil=True, cache=True, boundscheck=False)
_U32 = np.uint64(32)
_u64 = np.uint64

PERIOD_STEPS = 16
_PERIOD = PERIOD_STEPS * LANES


def pack(raws: np.ndarray, raw_bits: int, out: np.ndarray) -> None:
    """Pack one segment.

    Args:
        raws: flat unsigned array of the segment's values, none above raw_bits bits.
        raw_bits: 0 to 63.
        out: uint32[words, 32], overwritten.
    """
    done = _whole_periods(raws.size, raw_bits)
    if done:
        _period_kernels(raw_bits)[0](raws[:done], out.reshape(-1)[: done // 32 * raw_bits])
    if done < raws.size and raw_bits:
        _pack_rest(raws[done:], raw_bits, out[done // _PERIOD * (raw_bits // 2) :])


def unpack(lines: np.ndarray, raw_bits: int, raws: np.ndarray) -> None:
    """The inverse of `pack`; raws is overwritten."""
    if raw_bits == 0:
        raws[...] = 0
        return
    done = _whole_periods(raws.size, raw_bits)
    if done:
        _period_kernels(raw_bits)[1](lines.reshape(-1)[: done // 32 * raw_bits], raws[:done])
    if done < raws.size:
        _unpack_rest(lines[done // _PERIOD * (raw_bits // 2) :], raw_bits, raws[done:])


def _whole_periods(num_values: int, raw_bits: int) -> int:
    """Values that the period kernels take; a period of an even width is a whole number of words."""
    return num_values // _PERIOD * _PERIOD if raw_bits % 2 == 0 and 0 < raw_bits <= 32 else 0


@cache
def _period_kernels(raw_bits: int) -> tuple[Any, Any]:
    """(pack, unpack) of whole periods for one width. Unsigned indices: signed ones stop the vectoriser."""
    mask = np.uint32((1 << raw_bits) - 1)
    words_per_period = raw_bits * PERIOD_STEPS

    @_jit
    def pack_periods(raws, out):
        for p in range(raws.size // _PERIOD):
            values = raws[p * _PERIOD : (p + 1) * _PERIOD]
            words = out[p * words_per_period : (p + 1) * words_per_period]
            for lane in range(_u64(LANES)):
                bits = _u64(0)
                filled = 0
                row = 0
                for step in range(PERIOD_STEPS):
                    bits |= _u64(values[step * LANES + lane]) << _u64(filled)
                    filled += raw_bits
                    if filled >= 32:
                        words[row * LANES + lane] = np.uint32(bits)
                        bits = bits >> _U32
                        filled -= 32
                        row += 1

    @_jit
    def unpack_periods(lines, raws):
        for p in range(raws.size // _PERIOD):
            values = raws[p * _PERIOD : (p + 1) * _PERIOD]
            words = lines[p * words_per_period : (p + 1) * words_per_period]
            for lane in range(_u64(LANES)):
                for step in range(_u64(PERIOD_STEPS)):
                    row = (step * _u64(raw_bits)) >> _u64(5)
                    offset = (step * _u64(raw_bits)) & _u64(31)
                    value = _u64(words[row * _u64(LANES) + lane]) >> offset
                    if offset + _u64(raw_bits) > _u64(32):
                        value |= _u64(words[row * _u64(LANES) + _u64(LANES) + lane]) << (_u64(32) - offset)
                    values[step * _u64(LANES) + lane] = np.uint32(value) & mask

    return pack_periods, unpack_periods


@_jit
def _pack_rest(raws, raw_bits, out):
    """Any width and number of values, from a word boundary."""
    num_values = raws.size
    steps = (num_values + LANES - 1) // LANES
    current = np.zeros(LANES, np.uint64)
    filled = 0
    row = 0
    for t in range(steps):
        values = raws[t * LANES : min((t + 1) * LANES, num_values)]
        remaining = raw_bits
        taken = 0
        while remaining:
            width = min(remaining, 32)
            mask = np.uint64((1 << width) - 1)
            shift = np.uint64(filled)
            skip = np.uint64(taken)
            if values.size == LANES:
                for lane in range(LANES):
                    current[lane] |= ((np.uint64(values[lane]) >> skip) & mask) << shift
            else:
                for lane in range(values.size):
                    current[lane] |= ((np.uint64(values[lane]) >> skip) & mask) << shift
            filled += width
            if filled >= 32:
                line = out[row]
                for lane in range(LANES):
                    line[lane] = np.uint32(current[lane])
                    current[lane] >>= _U32
                row += 1
                filled -= 32
            remaining -= width
            taken += width
    if filled:
        line = out[row]
        for lane in range(LANES):
            line[lane] = np.uint32(current[lane])


@_jit
def _unpack_rest(lines, raw_bits, raws):
    """The inverse of `_pack_rest`."""
    num_values = raws.size
    steps = (num_values + LANES - 1) // LANES
    mask = np.uint64((1 << raw_bits) - 1)
    for t in range(steps):
        values = raws[t * LANES : min((t + 1) * LANES, num_values)]
        bit = t * raw_bits
        row = bit >> 5
        offset = bit & 31
        shift = np.uint64(offset)
        first = lines[row]
        if offset + raw_bits <= 32:
            for lane in range(values.size):
                values[lane] = (np.uint64(first[lane]) >> shift) & mask
        elif offset + raw_bits <= 64:
            second = lines[row + 1]
            for lane in range(values.size):
                values[lane] = ((np.uint64(first[lane]) | (np.uint64(second[lane]) << _U32)) >> shift) & mask
        else:
            second = lines[row + 1]
            third = lines[row + 2]
            for lane in range(values.size):
                wide = (np.uint64(first[lane]) | (np.uint64(second[lane]) << _U32)) >> shift
                values[lane] = (wide | (np.uint64(third[lane]) << (np.uint64(64) - shift))) & mask
