"""Tensor objects to records, one each, and the storages behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.byte_writer import RoleAt
from thinpoint.state.classes import reference
from thinpoint.state.storages import StorageTable, contiguous_view, strided_view
from thinpoint.state.tree import MAX_TENSOR_NESTING, Path, display

DeviceOf = Callable[[Any], "str | None"]

Defer = Callable[["dict[str, Any]", str, Any, Path, int], None]
"""Puts the tree of an object into a field of a record, later; path of the object, nesting of tensors inside it."""


class TensorWriter:
    """Makes the records of tensors. Nothing is copied.

    Args:
        storages: where the elements go.
        role_at: of a tensor.
        defer: takes attributes, objects and contexts of tensors.
        device_of: the device to record for a `torch.UntypedStorage`, or None for its own.
    """

    def __init__(
        self, storages: StorageTable, role_at: RoleAt, defer: Defer, device_of: DeviceOf | None
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self._item_bytes: list[int] = []
        self._ids: dict[int, int] = {}
        # Objects are known by address, so each must live until the end.
        self._kept: list[Any] = []
        self._storages = storages
        self._role_at = role_at
        self._defer = defer
        self._device_of = device_of

    @cached_property
    def _torch_records(self) -> ModuleType:
        """`tensor_records`, which imports torch: only for a state that has tensors."""
        from thinpoint.state import tensor_records

        return tensor_records

    def take(
        self, obj: Any, path: Path, nesting: int, *, only_without_pickle: bool = False
    ) -> tuple[str, int] | None:
        """Tag and tensor id if `obj` is a tensor or a storage, else None; also if only pickle can take it.

        The record is made when the object is first met.

        Args:
            nesting: how many tensors it is inside of.
            only_without_pickle: leave tensors whose rebuilding may need a pickle. So it is for what stands in a
                pickle, since reading that cannot wait for one that comes later in the stream.

        Raises:
            UnsupportedObjectError: it has no values, is nested too deeply, or its values cannot be reached.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(obj, torch.Tensor):
            tensor_records = self._torch_records
            tensor_records.refuse_unreal(obj, path)
            if not tensor_records.is_describable(obj):
                return None
            if only_without_pickle and not tensor_records.needs_no_pickle(obj):
                return None
            return "tensor", self._tensor(obj, path, nesting)
        if isinstance(obj, torch.UntypedStorage):
            return "untyped_storage", self._storage(obj, obj, torch.uint8, path)
        if isinstance(obj, torch.storage.TypedStorage):
            return "typed_storage", self._storage(obj, obj._untyped_storage, obj.dtype, path)
        return None

    def move(self, shifts_bytes: list[int]) -> None:
        """Make the offsets of all records relative to storages that lost that many bytes in front."""
        for record, item_bytes in zip(self.records, self._item_bytes, strict=True):
            if record["storage"] is not None and 0 not in record["shape"]:
                record["offset"] -= shifts_bytes[record["storage"]] // item_bytes

    def _tensor(self, tensor: Any, path: Path, nesting: int) -> int:
        """The id of the record of a describable tensor."""
        known = self._ids.get(id(tensor))
        if known is not None:
            return known
        if nesting >= MAX_TENSOR_NESTING:
            raise UnsupportedObjectError(
                f"{display(path)} is a tensor inside more than {MAX_TENSOR_NESTING} others",
                hint="Nest less, or save the object in a flatter form",
            )
        description = self._torch_records.describe(tensor, path)
        record = description.record
        tensor_id = self._add(tensor, record)
        if description.storage is not None:
            self._keep_view(record, description.storage, tensor.element_size(), path)
        if description.inner:
            record["inner"] = {
                name: self._inner(part, (*path, name), path, nesting + 1)
                for name, part in description.inner.items()
            }
        if description.subclass is not None:
            subclass = record["subclass"] = _subclass(description.subclass, tensor, path)
            if description.objects:
                self._defer(subclass, "objects", description.objects, path, nesting + 1)
            self._defer(subclass, "context", description.context, (*path, "context"), nesting + 1)
        if description.attrs:
            self._defer(record, "attrs", description.attrs, path, 0)
        return tensor_id

    def _storage(self, obj: Any, storage: Any, dtype: Any, path: Path) -> int:
        """The id of a record of a tensor that covers all of a storage."""
        from thinpoint.state.torch_values import dtype_name

        known = self._ids.get(id(obj))
        if known is not None:
            return known
        item_bytes = dtype.itemsize
        shape = [storage.nbytes() // item_bytes]
        record = {"storage": None, "dtype": dtype_name(dtype), "shape": shape, "stride": [1], "offset": 0}
        tensor_id = self._add(obj, record)
        self._keep_view(record, storage, item_bytes, path)
        return tensor_id

    def _inner(self, part: Any, path: Path, outer: Path, nesting: int) -> int:
        self._torch_records.refuse_unreal(part, path)
        if not self._torch_records.is_describable(part):
            raise UnsupportedObjectError(
                f"{display(outer)} contains a {type(part).__name__}, which cannot be stored"
            )
        return self._tensor(part, path, nesting)

    def _add(self, tensor: Any, record: dict[str, Any]) -> int:
        tensor_id = len(self.records)
        self.records.append(record)
        self._item_bytes.append(1)
        self._ids[id(tensor)] = tensor_id
        self._kept.append(tensor)
        return tensor_id

    def _keep_view(self, record: dict[str, Any], storage: Any, item_bytes: int, path: Path) -> None:
        dtype, shape = record["dtype"], tuple(record["shape"])
        device = self._device_of(storage) if self._device_of is not None else None
        index = self._storages.index_of(storage, device or str(storage.device))
        role = self._role_at(path, dtype)
        if dtype in self._torch_records.PACKED_DTYPES:
            num_bytes = self._torch_records.packed_bytes(dtype, shape)
            view = contiguous_view(shape=(num_bytes,), dtype=dtype, item_bytes=1, role=role, name=path)
        else:
            view = strided_view(
                shape=shape,
                stride=tuple(record["stride"]),
                offset=record["offset"],
                dtype=dtype,
                item_bytes=item_bytes,
                role=role,
                name=path,
                lazy=[flag for flag in ("conj", "neg") if record.get(flag)],
            )
        if 0 in shape:
            record["offset"] = 0
        self._storages.add_view(index, view)
        record["storage"] = index
        record["role"] = role
        self._item_bytes[-1] = item_bytes


def _subclass(cls: type, tensor: Any, path: Path) -> dict[str, Any]:
    found = reference(cls)
    if found is None:
        raise UnsupportedObjectError(
            f"{display(path)} is a {cls.__module__}.{cls.__qualname__}, which cannot be found by that name",
            hint="Define the class at the top level of a module",
        )
    return {
        "class": list(found),
        "context": None,
        "outer_size": list(tensor.shape),
        "outer_stride": list(tensor.stride()),
    }
