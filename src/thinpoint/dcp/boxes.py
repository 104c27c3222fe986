"""Boxes of tensors: what an index selects, and what chunks give to it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from thinpoint.engine.load import physical_memory_bytes
from thinpoint.errors import NotEnoughMemoryError, UnsupportedError, UsageError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.folder.layout import Chunk, TensorLayout

if TYPE_CHECKING:
    import torch

Place = tuple[int, ...]


def box_of(tensor: TensorLayout, index: Any) -> tuple[Place, Place]:
    """Start and end, along each dimension, of what an index selects.

    Raises:
        UsageError: it holds anything but slices without a step.
    """
    keys = index if isinstance(index, tuple) else (index,)
    if len(keys) > len(tensor.shape) or not all(
        isinstance(key, slice) and key.step in (None, 1) for key in keys
    ):
        raise UsageError(
            "a tensor in a folder is read in boxes",
            expected=f"at most {len(tensor.shape)} slices without a step",
            actual=repr(index),
        )
    keys += (slice(None),) * (len(tensor.shape) - len(keys))
    ranges = [key.indices(size) for key, size in zip(keys, tensor.shape, strict=True)]
    return tuple(low for low, _, _ in ranges), tuple(max(low, high) for low, high, _ in ranges)


def empty_box(
    tensor: TensorLayout, start: Place, end: Place, *, tensor_name: str, where: object
) -> torch.Tensor:
    """A new contiguous CPU tensor for the box from `start` to `end`.

    Raises:
        NotEnoughMemoryError: there is not enough memory.
        UnsupportedError: this version of torch does not know its dtype.
    """
    import torch

    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"this version of torch has no dtype {tensor.dtype}", tensor=tensor_name, where=where
        )
    shape = [high - low for low, high in zip(start, end, strict=True)]
    num_bytes = prod(shape) * ITEM_BYTES.get(tensor.dtype, 1)
    try:
        if num_bytes > physical_memory_bytes():
            raise MemoryError
        return torch.empty(shape, dtype=dtype)
    except (MemoryError, RuntimeError) as error:
        raise NotEnoughMemoryError(
            "there is not enough memory for the tensor",
            where=where,
            tensor=tensor_name,
            actual=f"{num_bytes:,} bytes",
            hint="Read a part of it: `read(name, (slice(0, 1000),))`",
        ) from error


def meeting(chunk: Chunk, start: Place, out: torch.Tensor) -> tuple[tuple[slice, ...], torch.Tensor]:
    """What of a chunk lies in a box, as an index of the chunk, and the part of the box that it fills.

    Args:
        chunk: has elements in the box.
        start: of the box.
        out: the box.
    """
    inside = []
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        low = max(offset, start[dim])
        high = min(offset + size, start[dim] + out.shape[dim])
        inside.append(slice(low - offset, high - offset))
    target = out
    for dim, part in enumerate(inside):
        target = target.narrow(dim, chunk.offsets[dim] + part.start - start[dim], part.stop - part.start)
    return tuple(inside), target
