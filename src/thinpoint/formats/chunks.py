"""Boxes of a tensor that is stored in rectangles, one or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thinpoint.formats.leaves import Box, as_integers

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]
Chunk = tuple[Sizes, Sizes, "Callable[[Box], torch.Tensor]"]
"""Offsets in the whole tensor, sizes, and what reads a box of the chunk."""


def assemble(chunks: Sequence[Chunk], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a box of the whole tensor, from the chunks that it meets.

    Args:
        chunks: cover the whole tensor, without overlap.

    Returns:
        A new contiguous tensor on the CPU.
    """
    import torch

    shape = tuple(part.stop - part.start for part in box)
    parts = [
        (inside, where, read)
        for (o, n, read) in chunks
        if (met := _meeting(o, n, box))
        for inside, where in [met]
    ]
    if len(parts) == 1:
        inside, where, read = parts[0]
        if all(part.stop - part.start == size for part, size in zip(where, shape, strict=True)):
            return read(inside)
    out = torch.empty(shape, dtype=dtype)
    integers = as_integers(out)
    for inside, where, read in parts:
        integers[where] = as_integers(read(inside))
    return out


def _meeting(offsets: Sizes, sizes: Sizes, box: Box) -> tuple[Box, Box] | None:
    """Where a chunk and a box of the whole tensor meet: in the chunk, and in the box; None if they do not."""
    inside, where = [], []
    for offset, size, part in zip(offsets, sizes, box, strict=True):
        start, stop = max(offset, part.start), min(offset + size, part.stop)
        if start >= stop:
            return None
        inside.append(slice(start - offset, stop - offset))
        where.append(slice(start - part.start, stop - part.start))
    return tuple(inside), tuple(where)
