"""Values whose top no symbol stands for: noted while encoding, put right after decoding."""

import triton
import triton.language as tl

from thinpoint.device.kernels import fields as f
from thinpoint.device.kernels.scan import word_pointer


@triton.jit
def add_patches(patches, num_patches, capacity, part, fields, elem, top, bad, num):
    """Append `num` patches in any order: part << 42 | element << 16 | top. Beyond the capacity they are only counted."""
    tl.atomic_add(fields + f.NUM_PATCHES, num.to(tl.int64))
    at = tl.atomic_add(num_patches + tl.zeros_like(elem), 1, mask=bad)
    entry = part << 42 | elem.to(tl.int64) << 16 | top.to(tl.int64)
    tl.store(patches + at, entry, mask=bad & (at < capacity))


@triton.jit(do_not_specialize=["length"])
def apply_patches(patches, length, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Put the top of patched elements right, in parts of that width that have an address.

    patches: int64[length], entries as `add_patches` writes them.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    use = i < length
    entry = tl.load(patches + i, mask=use, other=0)
    fields = parts + (entry >> 42) * f.PART_COLUMNS
    address = tl.load(fields + f.ADDRESS, mask=use, other=0)
    use = use & (address != 0) & (tl.load(fields + f.WORD_BITS, mask=use, other=0) == WIDTH)
    elem = ((entry >> 16) & ((1 << 26) - 1)).to(tl.int32)
    shift = tl.load(fields + f.TOP_SHIFT, mask=use, other=0)
    mask = tl.load(fields + f.TOP_MASK, mask=use, other=0)
    pointer = word_pointer(address, WIDTH) + elem
    word = tl.load(pointer, mask=use, other=0).to(tl.int64)
    word = (word & ~(mask << shift)) | ((entry & 0xFFFF) << shift)
    tl.store(pointer, word.to(pointer.dtype.element_ty), mask=use)
