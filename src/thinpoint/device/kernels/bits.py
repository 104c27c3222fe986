"""Raw bits of a few steps, put together in words of 32 bits and taken apart again."""

import triton
import triton.language as tl

UNROLL = tl.constexpr(4)
"""Steps in the body of a loop. Triton's time to compile grows with the square."""


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
