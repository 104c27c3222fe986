"""Strided views of stored tensors into torch tensors, touching only the blocks that hold their elements."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.engine.restore import DeviceTarget, Restorer, Target

if TYPE_CHECKING:
    import numpy as np
    import torch

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

SPAN_BYTES = 16 << 20
"""Bytes that are decoded at a time for views that are not laid out as their targets are."""

DEVICE_SPAN_BYTES = 128 << 20
"""The same, decoded on a device: fewer rounds of launches."""


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


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, from its first to its last element, as a flat uint8 tensor; no copy."""
    import torch

    extent = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (extent,), (1,))


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """As `flat_bytes`, of a CPU tensor, as an array."""
    return flat_bytes(tensor).numpy()


def target_of(restorer: Restorer, storage: int, start: int, memory: torch.Tensor) -> Target | DeviceTarget:
    """The target for a flat uint8 tensor, on the CPU or on a device with a backend."""
    if restorer.devices.get(memory.device) is not None:
        return DeviceTarget(storage=storage, start=start, out=memory)
    return Target(storage=storage, start=start, out=memory.numpy())


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


def direct_target(restorer: Restorer, view: StridedView, out: torch.Tensor) -> Target | DeviceTarget | None:
    """The target that fills `out` in place, or None if its memory is not laid out as the stored elements are."""
    if (
        (out.device.type != "cpu" and restorer.devices.get(out.device) is None)
        or out.dtype != view.dtype
        or tuple(out.shape) != view.shape
        or not is_dense(view.shape, view.stride)
        or out.is_conj()
        or out.is_neg()
        or any(n > 1 and a != b for n, a, b in zip(view.shape, out.stride(), view.stride, strict=True))
    ):
        return None
    return target_of(restorer, view.storage, view.offset * view.dtype.itemsize, flat_bytes(out))


def read_view(restorer: Restorer, view: StridedView, out: torch.Tensor) -> None:
    """As `read_views`, for one."""
    read_views(restorer, [(view, out)])


def read_views(restorer: Restorer, pairs: Iterable[tuple[StridedView, torch.Tensor]]) -> None:
    """Copy each view into its tensor: same shape, any strides, device and dtype (copied as `Tensor.copy_` does).

    What is laid out as stored is decoded in place. For all else holds SPAN_BYTES (DEVICE_SPAN_BYTES on a device), or one
    element of the outermost dimensions' extent if that is less than the gap to the next.
    """
    direct: list[Target | DeviceTarget] = []
    filled: list[torch.Tensor] = []
    others: list[tuple[StridedView, torch.Tensor]] = []
    for view, out in pairs:
        target = direct_target(restorer, view, out) if out.numel() else None
        if target is not None:
            direct.append(target)
            filled.append(out)
        elif out.numel():
            others.append((view, out))
    restorer.fill(direct)
    for out in filled:
        _mark_written(out)
    batch: list[tuple[StridedView, torch.Tensor]] = []
    batch_bytes = 0
    for view, out in others:
        most = span_bytes(restorer, out.device)
        for span, part in spans(view, out, most):
            size = span.extent * span.dtype.itemsize
            if batch and (batch_bytes + size > most or part.device != batch[-1][1].device):
                _read_spans(restorer, batch)
                batch, batch_bytes = [], 0
            batch.append((span, part))
            batch_bytes += size
    _read_spans(restorer, batch)


def span_bytes(restorer: Restorer, device: torch.device) -> int:
    """Bytes that are decoded at a time for tensors on this device."""
    return SPAN_BYTES if restorer.devices.get(device) is None else DEVICE_SPAN_BYTES


def spans(view: StridedView, out: torch.Tensor, most: int) -> Iterator[tuple[StridedView, torch.Tensor]]:
    """The view and its target, cut along the largest stride into such of at most about `most` bytes, without large gaps."""
    item = view.dtype.itemsize
    largest = max(range(len(view.shape)), key=lambda d: (view.shape[d] > 1, view.stride[d]), default=None)
    if largest is None or view.shape[largest] == 1:
        yield view, out
        return
    step = view.stride[largest]
    inner = view.extent - (view.shape[largest] - 1) * step
    has_gap = (step - inner) >= BLOCK_ELEMS
    if not has_gap and view.extent * item <= most:
        yield view, out
        return
    at_once = 1 if has_gap else max(1, min(most // (step * item), view.shape[largest] - 1))
    for start in range(0, view.shape[largest], at_once):
        count = min(at_once, view.shape[largest] - start)
        piece = StridedView(
            storage=view.storage,
            dtype=view.dtype,
            shape=(*view.shape[:largest], count, *view.shape[largest + 1 :]),
            stride=view.stride,
            offset=view.offset + start * step,
        )
        yield from spans(piece, out.narrow(largest, start, count), most)


def _read_spans(restorer: Restorer, batch: list[tuple[StridedView, torch.Tensor]]) -> None:
    """Decode the extents of views, each on its target's device if that can, and copy their elements."""
    import torch

    targets: list[Target | DeviceTarget] = []
    memories: list[torch.Tensor] = []
    for view, out in batch:
        item = view.dtype.itemsize
        decodes = restorer.devices.get(out.device) is not None
        device = out.device if decodes else torch.device("cpu")
        memories.append(torch.empty(view.extent * item, dtype=torch.uint8, device=device))
        targets.append(target_of(restorer, view.storage, view.offset * item, memories[-1]))
    restorer.fill(targets)
    for (view, out), memory in zip(batch, memories, strict=True):
        span = memory.view(view.dtype).as_strided(view.shape, view.stride)
        as_integers = _INTEGERS.get(view.dtype.itemsize)
        if out.dtype == view.dtype and as_integers and not (out.is_conj() or out.is_neg()):
            # As integers: torch copies bits, also of dtypes that it can only store.
            integers = getattr(torch, as_integers)
            out.view(integers).copy_(span.view(integers))
        else:
            out.copy_(span)


def _mark_written(tensor: torch.Tensor) -> None:
    """Tell autograd, which would otherwise not see a write past torch."""
    import torch

    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:
        increment(tensor)
