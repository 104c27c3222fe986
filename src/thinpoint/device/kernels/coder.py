"""One step of the entropy coder in 32 lanes, both ways."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f

BALLOT = tl.constexpr(not triton.knobs.runtime.interpret)


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
