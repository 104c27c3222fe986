"""Which bytes of the live storages are kept, and how they are cut into regions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinpoint.state.leaves import Region, StorageSource
from thinpoint.state.tree import Path

if TYPE_CHECKING:
    import torch

_MIN_ROW_ELEMS = 64
MAX_ITEM_BYTES = 16
_COMPONENTS = {"complex32": 2, "complex64": 2, "complex128": 2}
_START = attrgetter("start_bytes")


class View(NamedTuple):
    """A tensor as the bytes it covers.

    Attributes:
        start_bytes, end_bytes: from the beginning of the live storage; equal if it has no elements.
        item_bytes: bytes of an element; 1 for dtypes whose elements share a byte.
        row_elems, more: as in `Region`.
    """

    start_bytes: int
    end_bytes: int
    dtype: str
    item_bytes: int
    row_elems: int
    role: str
    name: Path
    shape: tuple[int, ...]
    more: dict[str, Any]


def strided_view(
    *,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: str,
    item_bytes: int,
    role: str,
    name: Path,
    lazy: Iterable[str] = (),
) -> View:
    """The `View` of a strided tensor; `offset` and `stride` in elements, `lazy` any of `conj` and `neg`."""
    empty = 0 in shape
    more: dict[str, Any] = {}
    if is_contiguous(shape, stride):
        extent = math.prod(shape)
        ordered = tuple([size for size in shape if size != 1])
    else:
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        ordered = storage_order(shape, stride)[1]
        more["stride"] = list(stride)
    for flag in lazy:
        more[flag] = True
    return View(
        start_bytes=0 if empty else offset * item_bytes,
        end_bytes=0 if empty else (offset + extent) * item_bytes,
        dtype=dtype,
        item_bytes=item_bytes,
        row_elems=row_elems(ordered) * _COMPONENTS.get(dtype, 1),
        role=role,
        name=name,
        shape=shape,
        more=more,
    )


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of the row-major order; a dimension of size 1 may have any."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def contiguous_view(*, shape: tuple[int, ...], dtype: str, item_bytes: int, role: str, name: Path) -> View:
    """The `View` of row-major elements from the beginning of a storage."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return strided_view(
        shape=shape,
        stride=tuple(reversed(stride[: len(shape)])),
        offset=0,
        dtype=dtype,
        item_bytes=item_bytes,
        role=role,
        name=name,
    )


def storage_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
    """Whether the elements lie without gaps or overlap, and the sizes above 1, outermost in memory first."""
    dims = sorted(((step, size) for size, step in zip(shape, stride, strict=True) if size != 1), reverse=True)
    expected = 1
    for step, size in reversed(dims):
        if step != expected:
            return False, ()
        expected *= size
    return True, tuple(size for _, size in dims)


def row_elems(ordered: tuple[int, ...]) -> int:
    """Elements of a row: the innermost sizes multiplied until there are 64; 0 if that leaves one row."""
    elems = 1
    for i in range(len(ordered) - 1, 0, -1):
        elems *= ordered[i]
        if elems >= _MIN_ROW_ELEMS:
            return elems
    return 0


def cut_regions(views: list[View], shift: int) -> tuple[Region, ...]:
    """Sorted disjoint regions that cover all views of one storage; `shift` bytes are dropped in front.

    Views whose ranges overlap share a region, with the dtype, role and name of the largest.
    """
    regions: list[Region] = []
    group: list[View] = []
    end = 0
    for view in sorted([v for v in views if v.end_bytes > v.start_bytes], key=_START):
        if group and view.start_bytes >= end:
            regions.append(_merge(group, end, shift))
            group = []
        end = view.end_bytes if not group else max(end, view.end_bytes)
        group.append(view)
    if group:
        regions.append(_merge(group, end, shift))
    return tuple(regions)


def _merge(group: list[View], end: int, shift: int) -> Region:
    largest = group[0] if len(group) == 1 else max(group, key=lambda v: v.end_bytes - v.start_bytes)
    start = group[0].start_bytes
    whole = largest.start_bytes == start and largest.end_bytes == end
    aligned = (start - shift) % largest.item_bytes == 0 and (end - start) % largest.item_bytes == 0
    return Region(
        start_bytes=start - shift,
        num_bytes=end - start,
        dtype=largest.dtype if aligned else "bytes",
        role=largest.role,
        row_elems=largest.row_elems if whole and aligned else 0,
        name=largest.name,
        shape=largest.shape,
        more=largest.more,
    )


@dataclass(kw_only=True)
class _Entry:
    device: str
    storage: Any = None
    data: np.ndarray | None = None
    views: list[View] = field(default_factory=list)


class StorageTable:
    """The storages met so far, in order, with their views; turned into `StorageSource`s at the end."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._by_impl: dict[int, int] = {}

    def index_of(self, storage: Any, device: str) -> int:
        """The id of a `torch.UntypedStorage`, the same for every Python object that stands for it."""
        index = self._by_impl.setdefault(storage._cdata, len(self._entries))
        if index == len(self._entries):
            self._entries.append(_Entry(device=device, storage=storage))
        return index

    def add_view(self, index: int, view: View) -> None:
        """Keep the bytes that `view` covers."""
        self._entries[index].views.append(view)

    def add_blob(self, data: np.ndarray, view: View) -> int:
        """The id of a new storage that holds `data` (flat uint8, host memory), described by `view`."""
        self._entries.append(_Entry(device="cpu", data=data, views=[view]))
        return len(self._entries) - 1

    def finish(self) -> tuple[list[StorageSource], list[int]]:
        """The sources, and for each the bytes that were dropped in front of it, a multiple of 16."""
        sources = []
        shifts = []
        for entry in self._entries:
            start = min([v.start_bytes for v in entry.views if v.end_bytes > v.start_bytes], default=0)
            # Every itemsize divides 16, so offsets stay whole numbers of elements.
            shift = start // MAX_ITEM_BYTES * MAX_ITEM_BYTES
            regions = cut_regions(entry.views, shift)
            live = None if entry.storage is None else _StorageBytes(entry.storage, shift)
            sources.append(
                StorageSource(
                    num_bytes=regions[-1].end_bytes if regions else 0,
                    device=entry.device,
                    regions=regions,
                    read=live.read if live is not None else _HostBytes(entry.data),
                    view=None if live is None else live.view,
                )
            )
            shifts.append(shift)
        return sources, shifts


class _HostBytes:
    def __init__(self, data: Any) -> None:
        self._data = data

    def __call__(self, start: int, end: int) -> np.ndarray:
        data: np.ndarray = self._data[start:end]
        return data


class _StorageBytes:
    """Ranges of a live torch storage, relative to the first byte that is kept."""

    def __init__(self, storage: Any, shift: int) -> None:
        self._storage = storage
        self._shift = shift

    def view(self, start: int, end: int) -> torch.Tensor:
        torch: Any = sys.modules["torch"]
        flat = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return flat.set_(self._storage, self._shift + start, (end - start,), (1,))

    def read(self, start: int, end: int) -> np.ndarray:
        # A shared or pinned CPU storage is read in place too; only other devices copy.
        return self.view(start, end).cpu().numpy()
