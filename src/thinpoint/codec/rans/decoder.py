"""Decoding consecutive blocks of a part: the flow that all backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thinpoint.codec.contract import CodedPart, Mapper
from thinpoint.codec.rans.kernels import Kernels
from thinpoint.codec.rans.spec import RansPrefix, parse_prefix
from thinpoint.digest import MASK, digest
from thinpoint.errors import MalformedFileError


def decode(
    part: CodedPart,
    first_block: int,
    blocks: Sequence[Sequence[Any]],
    out: np.ndarray,
    kernels: Kernels,
    map: Mapper,
) -> int:
    """Decode into `out`; returns the partial raw digest of what was decoded. See `contract.Backend.decode`."""
    if part.num_planes != 2:
        raise MalformedFileError(
            "a part coded by symbols has the wrong number of planes", expected=2, actual=part.num_planes
        )
    prefix = parse_prefix(part.prefix, part.num_elems, part.word_bytes, part.block_elems)
    values = prefix.values_in_segments(part.num_elems)
    segments_per_block = part.block_elems // prefix.segment_elems()
    origin = first_block * part.block_elems

    def decode_one(i: int) -> int:
        block = first_block + i
        start, end = part.block_range(block)
        target = out[start - origin : end - origin]
        in_block = values[block * segments_per_block : (block + 1) * segments_per_block]
        kernels.decode_block(prefix, start, in_block, blocks[0][i], blocks[1][i], target)
        apply_patches(prefix, start, target)
        return digest(target, start * part.word_bytes // 8)

    return sum(map(decode_one, range(len(blocks[0])))) & MASK


def apply_patches(prefix: RansPrefix, first_elem: int, out: np.ndarray) -> None:
    """Put the top of patched elements right; low bits and sign are already there."""
    low, high = np.searchsorted(prefix.patch_positions, [first_elem, first_elem + out.size])
    if low == high:
        return
    place = prefix.patch_positions[low:high] - first_elem
    split = prefix.split
    clear = ~(((1 << split.top_bits) - 1) << split.top_shift) & ((1 << split.word_bits) - 1)
    tops = prefix.patch_tops[low:high].astype(out.dtype) << out.dtype.type(split.top_shift)
    out[place] = (out[place] & out.dtype.type(clear)) | tops
