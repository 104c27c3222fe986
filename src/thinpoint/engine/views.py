"""Strided views of stored tensors into torch tensors, touching only the blocks that hold their elements."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.engine.restore import Restorer, Target

if TYPE_CHECKING:
    import torch

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

SPAN_BYTES = 16 << 20
"""Bytes of a storage that are decoded at a time for a view that is not dense, or whose target is not plain host memory."""


@dataclass(frozen=True, kw_only=True)
class StridedView:
    """Elements of a storage. Offset and strides in elements, strides not negative."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def index(self, index: Any) -> StridedView:
        """The view that basic indexing gives; `index` as for a tensor.

        Raises:
            IndexError, TypeError: as torch raises them.
        """
        import torch

        keys = index if isinstance(index, tuple) else (index,)
        for key in keys:
            if isinstance(key, bool) or not (
                key is None or key is Ellipsis or isinstance(key, slice) or hasattr(key, "__index__")
            ):
                raise TypeError(
                    f"a stored tensor is indexed with integers, slices, ... and None, not with {type(key).__name__}"
                )
        whole = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        part = whole[tuple(operator.index(key) if hasattr(key, "__index__") else key for key in keys)]
        return StridedView(
            storage=self.storage,
            dtype=self.dtype,
            shape=tuple(part.shape),
            stride=part.stride(),
            offset=self.offset + int(part.storage_offset()),
        )


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a dense CPU tensor, from its first to its last element, as flat uint8; no copy."""
    import torch

    extent = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), start, (extent,), (1,))
    return flat.numpy()


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their extent exactly, in some order of the dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def direct_target(view: StridedView, out: torch.Tensor) -> Target | None:
    """The target that fills `out` in place, or None if its memory is not laid out as the stored elements are."""
    if (
        out.device.type != "cpu"
        or out.dtype != view.dtype
        or tuple(out.shape) != view.shape
        or not is_dense(view.shape, view.stride)
        or out.is_conj()
        or out.is_neg()
        or any(n > 1 and a != b for n, a, b in zip(view.shape, out.stride(), view.stride, strict=True))
    ):
        return None
    return Target(storage=view.storage, start=view.offset * view.dtype.itemsize, out=host_bytes(out))


def read_view(restorer: Restorer, view: StridedView, out: torch.Tensor) -> None:
    """Copy a view into `out`: same shape, any strides, device and dtype (copied as `Tensor.copy_` does).

    Holds SPAN_BYTES, or one element of the outermost dimensions' extent if that is less than the gap to the next.
    """
    target = direct_target(view, out)
    if target is not None:
        restorer.fill([target])
        return
    _read_piece(restorer, view, out)


def _read_piece(restorer: Restorer, view: StridedView, out: torch.Tensor) -> None:
    if 0 in view.shape:
        return
    item = view.dtype.itemsize
    largest = max(range(len(view.shape)), key=lambda d: (view.shape[d] > 1, view.stride[d]), default=None)
    if largest is None or view.shape[largest] == 1:
        _read_span(restorer, view, out)
        return
    step = view.stride[largest]
    inner = view.extent - (view.shape[largest] - 1) * step
    has_gap = (step - inner) >= BLOCK_ELEMS
    if not has_gap and view.extent * item <= SPAN_BYTES:
        _read_span(restorer, view, out)
        return
    at_once = 1 if has_gap else max(1, min(SPAN_BYTES // (step * item), view.shape[largest] - 1))
    for start in range(0, view.shape[largest], at_once):
        count = min(at_once, view.shape[largest] - start)
        piece = StridedView(
            storage=view.storage,
            dtype=view.dtype,
            shape=(*view.shape[:largest], count, *view.shape[largest + 1 :]),
            stride=view.stride,
            offset=view.offset + start * step,
        )
        _read_piece(restorer, piece, out.narrow(largest, start, count))


def _read_span(restorer: Restorer, view: StridedView, out: torch.Tensor) -> None:
    """Decode the extent of a view and copy its elements."""
    import torch

    item = view.dtype.itemsize
    memory = np.empty(view.extent * item, np.uint8)
    restorer.fill([Target(storage=view.storage, start=view.offset * item, out=memory)])
    span = torch.from_numpy(memory).view(view.dtype).as_strided(view.shape, view.stride)
    as_integers = _INTEGERS.get(item)
    if out.dtype == view.dtype and as_integers and not (out.is_conj() or out.is_neg()):
        # As integers: torch copies bits, also of dtypes that it can only store.
        integers = getattr(torch, as_integers)
        out.view(integers).copy_(span.view(integers))
    else:
        out.copy_(span)
