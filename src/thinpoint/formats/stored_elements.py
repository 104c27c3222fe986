"""Elements that lie uncompressed in a file, read a box at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinpoint.formats.leaves import Box, as_integers
from thinpoint.store.contract import Source

if TYPE_CHECKING:
    import torch

_MAX_GAP_BYTES = 1 << 16
"""Bytes between the elements of a box that are read along with them, rather than asking the source again."""


@dataclass(frozen=True, kw_only=True)
class StoredElements:
    """A strided tensor in a file; a call reads a box of it. May be shared between threads.

    Attributes:
        source: the file; must be open when a box is read.
        offset_bytes: of the first element.
        dtype, shape, stride: of the tensor, strides in elements and not negative.
    """

    source: Source
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __call__(self, box: Box) -> torch.Tensor:
        import torch

        shape = tuple(part.stop - part.start for part in box)
        first = sum(part.start * step for part, step in zip(box, self.stride, strict=True))
        out = torch.empty(shape, dtype=self.dtype)
        if out.numel():
            self._fill(as_integers(out), shape, self.stride, first)
        return out

    def _fill(self, out: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], first: int) -> None:
        import torch

        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        item = self.dtype.itemsize
        if (extent - math.prod(shape)) * item > _MAX_GAP_BYTES:
            outer = max(range(len(shape)), key=lambda d: (shape[d] > 1, stride[d]))
            for i in range(shape[outer]):
                self._fill(
                    out.select(outer, i),
                    (*shape[:outer], *shape[outer + 1 :]),
                    (*stride[:outer], *stride[outer + 1 :]),
                    first + i * stride[outer],
                )
            return
        data = self.source.read_at(self.offset_bytes + first * item, extent * item)
        out.copy_(torch.from_numpy(data).view(out.dtype).as_strided(shape, stride))
