"""An object to its tree, tensor records and storages."""

from __future__ import annotations

import argparse
import collections
import enum
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state import arrays, scalars
from thinpoint.state.classes import (
    get_fields,
    instance_dict,
    is_plain_dataclass,
    is_plain_namedtuple,
    reference,
)
from thinpoint.state.leaves import FlatState
from thinpoint.state.pickles import PICKLE_ERRORS, StatePickler
from thinpoint.state.roles import is_optimizer_state, role_of
from thinpoint.state.storages import StorageTable, View, strided_view
from thinpoint.state.tree import MAX_NESTING, MAX_TENSOR_NESTING, Node, Path, display, key_of

MAX_INLINE_BYTES = 1 << 10
MAX_INLINE_TEXT = 1 << 16
MIN_LIST_BLOB = 257
"""Shorter lists of numbers are spelled out; longer ones would bloat the index (think of a sampler's permutation)."""

MAX_CLASS_NAMES = 64
_SORTABLE = frozenset({str, bytes, int, bool})
FACTORIES: dict[str, type] = {
    cls.__name__: cls for cls in (list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes)
}
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_DEEP_HINT = "Nest less, or save the object in a flatter form"

DeviceOf = Callable[[Any], "str | None"]


def flatten(obj: Any, *, allow_pickle: bool = True, device_of: DeviceOf | None = None) -> FlatState:
    """The object taken apart; its tensors are not copied, so it must not change while the result is read.

    Args:
        obj: whatever `torch.save` takes.
        allow_pickle: store objects that have no plain form by pickle, instead of refusing them.
        device_of: the device to record for a `torch.UntypedStorage`, or None for its own.

    Raises:
        UnsupportedObjectError: something in the object cannot be stored; the message names its path and type.
    """
    flattener = _Flattener(allow_pickle, device_of)
    try:
        tree = flattener.tree(obj, (), 0)
        flattener.finish_tensors()
    except RecursionError as error:
        raise UnsupportedObjectError(
            "the state is nested too deeply for Python's stack", hint=_DEEP_HINT
        ) from error
    sources, shifts = flattener.storages.finish()
    for record, shift_bytes in zip(flattener.tensors, flattener.shifts_of(shifts), strict=True):
        record["offset"] -= shift_bytes
    return FlatState(tree=tree, tensors=flattener.tensors, storages=sources)


def key_step(key: Any) -> Any:
    """What stands for a dict's key in the paths of a tree that holds it.

    Raises:
        UnsupportedObjectError: the key cannot be stored.
    """
    return key_of(_Flattener(True, None).tree(key, (), 0), ())


@dataclass(frozen=True)
class _Pending:
    record: dict[str, Any]
    field: str
    obj: Any
    path: Path
    nesting: int
    in_optimizer: bool


class _Flattener:
    def __init__(self, allow_pickle: bool, device_of: DeviceOf | None) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.storages = StorageTable()
        self._item_bytes: list[int] = []
        self._allow_pickle = allow_pickle
        self._device_of = device_of
        self._tensor_ids: dict[int, int] = {}
        # Objects are known by address, so each must live until the end.
        self._kept: list[Any] = []
        # Numbers of the tree under way: dict keys, attributes and contexts of tensors are trees of their own.
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._count = 0
        self._in_optimizer = False
        self._pickler: StatePickler | None = None
        self._num_pickles = 0
        self._pickle_path: Path = ()
        # Attributes and contexts wait until the end: a pickler cannot be entered again from within itself.
        self._pending: collections.deque[_Pending] = collections.deque()
        self._tensor_nesting = 0
        torch = sys.modules.get("torch")
        self._torch = torch
        self._encoders: dict[type, Callable[[Any], Node]] = dict(scalars.ENCODERS)
        if torch is not None:
            from thinpoint.state import torch_values

            self._encoders.update(torch_values.ENCODERS)

    def shifts_of(self, shifts: list[int]) -> list[int]:
        """For each tensor the elements by which trimming its storage moves it."""
        return [
            0
            if record["storage"] is None or 0 in record["shape"]
            else shifts[record["storage"]] // item_bytes
            for record, item_bytes in zip(self.tensors, self._item_bytes, strict=True)
        ]

    # ---- trees ----

    def tree(self, obj: Any, path: Path, depth: int) -> Node:
        """The node of an object that begins a tree of its own, with its own numbering."""
        saved = self._numbers, self._open, self._count
        self._numbers, self._open, self._count = {}, set(), 0
        try:
            return self.node(obj, path, depth)
        finally:
            self._numbers, self._open, self._count = saved

    def node(self, obj: Any, path: Path, depth: int) -> Node:
        """The node of any object."""
        cls = type(obj)
        if cls is str and len(obj) <= MAX_INLINE_TEXT:
            return obj
        encode = self._encoders.get(cls)
        if encode is not None:
            try:
                return encode(obj)
            except scalars.NotPlainError:
                return self._pickle(obj, path, depth)
        container = _CONTAINERS.get(cls)
        if container is not None:
            return self._numbered(container, obj, path, depth)
        torch = self._torch
        if torch is not None:
            if isinstance(obj, torch.Tensor):
                return self._tensor(obj, path, depth)
            if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
                kind, tensor_id = self._storage(obj, path)
                return {kind: tensor_id}
        if isinstance(obj, np.generic):
            return self._numpy_scalar(obj, path, depth)
        if isinstance(obj, np.dtype):
            try:
                return {"numpy_dtype": arrays.encode_dtype(obj)}
            except scalars.NotPlainError:
                return self._pickle(obj, path, depth)
        if isinstance(obj, enum.Enum):
            node = _enum(obj)
            return node if node is not None else self._pickle(obj, path, depth)
        if reference(cls) is not None:
            if is_plain_namedtuple(cls) and not instance_dict(obj):
                return self._numbered(_Flattener._namedtuple, obj, path, depth)
            if is_plain_dataclass(cls):
                return self._numbered(_Flattener._dataclass, obj, path, depth)
        return self._pickle(obj, path, depth)

    def _numbered(
        self, encode: Callable[[_Flattener, Any, Path, int], Node], obj: Any, path: Path, depth: int
    ) -> Node:
        """The node of an object that may be met again, then as a `ref`."""
        number = self._numbers.get(id(obj))
        if number is not None:
            if number in self._open:
                raise UnsupportedObjectError(
                    f"{display(path)} is a {type(obj).__name__} that contains itself",
                    hint="Only lists, dicts and objects with attributes may be part of a cycle",
                )
            return {"ref": number}
        if depth >= MAX_NESTING:
            raise UnsupportedObjectError(
                f"{display(path)} is nested more than {MAX_NESTING} deep", hint=_DEEP_HINT
            )
        number = self._count
        self._numbers[id(obj)] = number
        self._kept.append(obj)
        self._count += 1
        if isinstance(obj, (tuple, frozenset, slice)):
            self._open.add(number)
        node = encode(self, obj, path, depth)
        self._open.discard(number)
        return node

    def _items(self, items: Iterable[Any], path: Path, depth: int) -> list[Node]:
        return [self.node(item, (*path, i), depth + 1) for i, item in enumerate(items)]

    def _pairs(self, mapping: Any, path: Path, depth: int) -> list[Node]:
        was_in_optimizer = self._in_optimizer
        self._in_optimizer = was_in_optimizer or is_optimizer_state(mapping)
        flat = []
        for key, value in mapping.items():
            key_node = key if type(key) is str else self.tree(key, (*path, type(key).__name__), depth + 1)
            flat += [key_node, self.node(value, (*path, key_of(key_node, path)), depth + 1)]
        self._in_optimizer = was_in_optimizer
        return flat

    def _named(self, fields: dict[str, Any], path: Path, depth: int) -> list[Node]:
        flat = []
        for name, value in fields.items():
            if type(name) is not str:
                raise UnsupportedObjectError(
                    f"{display(path)} has an attribute whose name is no string: {name!r}"
                )
            flat += [name, self.node(value, (*path, name), depth + 1)]
        return flat

    # ---- containers, by exact type ----

    def _list(self, obj: list[Any], path: Path, depth: int) -> Node:
        if len(obj) >= MIN_LIST_BLOB:
            kinds = set(map(type, obj))
            if kinds == {int} and _INT64_MIN <= min(obj) and max(obj) <= _INT64_MAX:
                return {"int_list": self._number_blob(np.array(obj, "<i8"), path)}
            if kinds == {float}:
                return {"float_list": self._number_blob(np.array(obj, "<f8"), path)}
        return self._items(obj, path, depth)

    def _dict(self, obj: dict[Any, Any], path: Path, depth: int) -> Node:
        return {"dict": self._pairs(obj, path, depth)}

    def _ordered_dict(self, obj: Any, path: Path, depth: int) -> Node:
        tag = "counter" if type(obj) is collections.Counter else "ordered_dict"
        # The attributes hold `_metadata`, the versions in the state_dict of a module.
        return {tag: [self._pairs(obj, path, depth), self._named(instance_dict(obj), path, depth)]}

    def _default_dict(self, obj: Any, path: Path, depth: int) -> Node:
        factory = obj.default_factory
        names = [name for name, known in FACTORIES.items() if known is factory]
        if factory is not None and not names:
            return self._pickle_body(obj, path, depth)
        return {"default_dict": [names[0] if names else None, self._pairs(obj, path, depth)]}

    def _tuple(self, obj: tuple[Any, ...], path: Path, depth: int) -> Node:
        return {"tuple": self._items(obj, path, depth)}

    def _set(self, obj: Any, path: Path, depth: int) -> Node:
        # The order of a set of strings changes from process to process; the bytes of a file should not.
        items = sorted(obj, key=_type_and_value) if _SORTABLE.issuperset(map(type, obj)) else obj
        return {type(obj).__name__: self._items(items, path, depth)}

    def _slice(self, obj: slice, path: Path, depth: int) -> Node:
        return {"slice": self._items((obj.start, obj.stop, obj.step), path, depth)}

    def _deque(self, obj: Any, path: Path, depth: int) -> Node:
        return {"deque": [obj.maxlen, self._items(obj, path, depth)]}

    def _namespace(self, obj: Any, path: Path, depth: int) -> Node:
        tag = "namespace" if type(obj) is types.SimpleNamespace else "arg_namespace"
        return {tag: self._named(vars(obj), path, depth)}

    def _dataclass(self, obj: Any, path: Path, depth: int) -> Node:
        cls = type(obj)
        return {"dataclass": [cls.__module__, cls.__qualname__, self._named(get_fields(obj), path, depth)]}

    def _namedtuple(self, obj: Any, path: Path, depth: int) -> Node:
        cls = type(obj)
        fields = dict(zip(cls._fields, obj, strict=True))
        return {"namedtuple": [cls.__module__, cls.__qualname__, self._named(fields, path, depth)]}

    # ---- bytes ----

    def _data(self, flat: np.ndarray, view: View) -> str | int:
        """The bytes themselves if few, else the id of their storage."""
        if flat.size <= MAX_INLINE_BYTES:
            return scalars.encode_base64(flat.tobytes())
        return self.storages.add_blob(flat, view)

    def _byte_data(self, data: bytes | bytearray, path: Path) -> str | int:
        flat = np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)
        return self._data(flat, _blob_view((flat.size,), "bytes", 1, path, self._role(path, "bytes")))

    def _bytes(self, obj: Any, path: Path, depth: int) -> Node:
        return {type(obj).__name__: self._byte_data(obj, path)}

    def _text(self, obj: str, path: Path, depth: int) -> Node:
        return {"text": self._byte_data(obj.encode("utf-8", "surrogatepass"), path)}

    def _number_blob(self, values: np.ndarray, path: Path) -> str | int:
        dtype = arrays.region_dtype(values.dtype)
        return self._data(values.view(np.uint8), _blob_view(values.shape, dtype, 8, path, "other"))

    def _array(self, obj: np.ndarray, path: Path, depth: int) -> Node:
        try:
            dtype = arrays.encode_dtype(obj.dtype)
        except scalars.NotPlainError:
            return self._pickle_body(obj, path, depth)
        flat, order = arrays.array_bytes(obj)
        torch_dtype = arrays.region_dtype(obj.dtype)
        shape = obj.shape[::-1] if order == "F" else obj.shape
        item_bytes = obj.dtype.itemsize if torch_dtype != "bytes" else 1
        view_shape = shape if torch_dtype != "bytes" else (flat.size,)
        view = _blob_view(view_shape, torch_dtype, item_bytes, path, self._role(path, torch_dtype))
        return {"array": [dtype, list(obj.shape), order, self._data(flat, view)]}

    def _numpy_scalar(self, obj: np.generic, path: Path, depth: int) -> Node:
        # `dtype` and `tobytes` of a string scalar disagree about trailing zeros and the empty string.
        if type(obj) is np.str_:
            return {"numpy_str": str(obj)}
        if type(obj) is np.bytes_:
            return {"numpy_bytes": scalars.encode_base64(bytes(obj))}
        try:
            dtype, data = arrays.encode_scalar(obj)
        except scalars.NotPlainError:
            return self._pickle(obj, path, depth)
        return {"numpy_scalar": [dtype, scalars.encode_base64(data)]}

    def _role(self, path: Path, dtype: str) -> str:
        return role_of(path, dtype, in_optimizer=self._in_optimizer)

    # ---- tensors ----

    def _tensor(self, tensor: Any, path: Path, depth: int) -> Node:
        from thinpoint.state import tensor_records

        tensor_records.refuse_unreal(tensor, path)
        if not tensor_records.is_describable(tensor):
            return self._pickle(tensor, path, depth)
        return {"tensor": self._tensor_id(tensor, path, self._tensor_nesting)}

    def _tensor_id(self, tensor: Any, path: Path, nesting: int) -> int:
        """The id of the record of a describable tensor; made when the object is first met."""
        from thinpoint.state import tensor_records

        known = self._tensor_ids.get(id(tensor))
        if known is not None:
            return known
        if nesting >= MAX_TENSOR_NESTING:
            raise UnsupportedObjectError(
                f"{display(path)} is a tensor inside more than {MAX_TENSOR_NESTING} others", hint=_DEEP_HINT
            )
        description = tensor_records.describe(tensor, path)
        record = description.record
        tensor_id = self._add_record(tensor, record)
        if description.storage is not None:
            self._keep_view(record, description.storage, tensor.element_size(), path)
        inner = {}
        for name, part in description.inner.items():
            tensor_records.refuse_unreal(part, path)
            if not tensor_records.is_describable(part):
                raise UnsupportedObjectError(
                    f"{display(path)} contains a {type(part).__name__}, which cannot be stored"
                )
            inner[name] = self._tensor_id(part, (*path, name), nesting + 1)
        if inner:
            record["inner"] = inner
        if description.subclass is not None:
            record["subclass"] = self._subclass(description.subclass, tensor, path)
            self._defer(record["subclass"], "context", description.context, (*path, "context"), nesting + 1)
        if description.attrs:
            self._defer(record, "attrs", description.attrs, path, 0)
        return tensor_id

    def _defer(self, record: dict[str, Any], field: str, obj: Any, path: Path, nesting: int) -> None:
        self._kept.append(obj)
        self._pending.append(_Pending(record, field, obj, path, nesting, self._in_optimizer))

    def finish_tensors(self) -> None:
        """Fill in the attributes and contexts of all tensors met so far, and of those met by that."""
        while self._pending:
            item = self._pending.popleft()
            self._in_optimizer, self._tensor_nesting = item.in_optimizer, item.nesting
            item.record[item.field] = self.tree(item.obj, item.path, 0)

    def _add_record(self, tensor: Any, record: dict[str, Any]) -> int:
        tensor_id = len(self.tensors)
        self.tensors.append(record)
        self._item_bytes.append(1)
        self._tensor_ids[id(tensor)] = tensor_id
        self._kept.append(tensor)
        return tensor_id

    def _keep_view(self, record: dict[str, Any], storage: Any, item_bytes: int, path: Path) -> None:
        from thinpoint.state.tensor_records import PACKED_DTYPES, packed_bytes

        dtype, shape = record["dtype"], tuple(record["shape"])
        device = self._device_of(storage) if self._device_of is not None else None
        index = self.storages.index_of(storage, device or str(storage.device))
        role = self._role(path, dtype)
        if dtype in PACKED_DTYPES:
            view = _blob_view((packed_bytes(dtype, shape),), dtype, 1, path, role)
        else:
            view = strided_view(
                shape=shape,
                stride=tuple(record["stride"]),
                offset=record["offset"],
                dtype=dtype,
                item_bytes=item_bytes,
                role=role,
                name=path,
            )
        if 0 in shape:
            record["offset"] = 0
        self.storages.add_view(index, view)
        record["storage"] = index
        record["role"] = role
        self._item_bytes[-1] = item_bytes

    def _subclass(self, cls: type, tensor: Any, path: Path) -> dict[str, Any]:
        if reference(cls) is None:
            raise UnsupportedObjectError(
                f"{display(path)} is a {cls.__module__}.{cls.__qualname__}, which cannot be found by that name",
                hint="Define the class at the top level of a module",
            )
        return {
            "class": [cls.__module__, cls.__qualname__],
            "context": None,
            "outer_size": list(tensor.shape),
            "outer_stride": list(tensor.stride()),
        }

    def _storage(self, obj: Any, path: Path) -> tuple[str, int]:
        """Kind and tensor id of a bare storage, recorded as a tensor that covers it."""
        from thinpoint.state.torch_values import dtype_name

        typed = not isinstance(obj, self._torch.UntypedStorage)  # type: ignore[union-attr]
        kind = "typed_storage" if typed else "untyped_storage"
        known = self._tensor_ids.get(id(obj))
        if known is not None:
            return kind, known
        untyped = obj._untyped_storage if typed else obj
        dtype = obj.dtype if typed else self._torch.uint8  # type: ignore[union-attr]
        item_bytes = dtype.itemsize
        shape = [untyped.nbytes() // item_bytes]
        record = {"storage": None, "dtype": dtype_name(dtype), "shape": shape, "stride": [1], "offset": 0}
        tensor_id = self._add_record(obj, record)
        self._keep_view(record, untyped, item_bytes, path)
        return kind, tensor_id

    # ---- everything else ----

    def _pickle(self, obj: Any, path: Path, depth: int) -> Node:
        return self._numbered(_Flattener._pickle_body, obj, path, depth)

    def _pickle_body(self, obj: Any, path: Path, depth: int) -> Node:
        type_name = f"{type(obj).__module__}.{type(obj).__qualname__}"
        if not self._allow_pickle:
            raise UnsupportedObjectError(
                f"{display(path) or 'the state'} is a {type_name}, which can only be stored by pickle",
                hint="Convert it to plain data or a dataclass, or allow pickle",
            )
        if self._pickler is None:
            self._pickler = StatePickler(self._take_out)
        self._pickle_path = path
        try:
            data, tensor_ids, classes = self._pickler.piece(obj)
        except PICKLE_ERRORS as error:
            raise UnsupportedObjectError(
                f"{display(path) or 'the state'} is a {type_name}, which cannot be pickled: {error}",
                hint="Leave it out, or save its state_dict() or its plain data instead",
            ) from error
        index = self._num_pickles
        self._num_pickles += 1
        return {
            "pickle": {
                "index": index,
                "type": type_name[:256],
                "classes": [name[:256] for name in classes[:MAX_CLASS_NAMES]],
                "tensors": tensor_ids,
                "data": self._byte_data(data, path),
            }
        }

    def _take_out(self, obj: Any) -> tuple[str, int] | None:
        torch = self._torch
        if torch is None or self._pickler is None:
            return None
        path = (*self._pickle_path, self._pickler.num_taken)
        if isinstance(obj, torch.Tensor):
            from thinpoint.state import tensor_records

            tensor_records.refuse_unreal(obj, path)
            if not tensor_records.is_describable(obj):
                return None
            return "tensor", self._tensor_id(obj, path, self._tensor_nesting)
        if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return self._storage(obj, path)
        return None


def _type_and_value(obj: Any) -> tuple[str, Any]:
    return type(obj).__name__, obj


def _blob_view(shape: tuple[int, ...], dtype: str, item_bytes: int, path: Path, role: str) -> View:
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
        name=path,
    )


def _enum(member: enum.Enum) -> Node | None:
    """The node of an enum member by name, of a combination of flags by value; None if no name leads to it."""
    cls = type(member)
    if reference(cls) is None:
        return None
    name = member._name_
    if name is not None and cls._member_map_.get(name) is member:
        return {"enum": [cls.__module__, cls.__qualname__, name]}
    if isinstance(member, enum.Flag) and type(member._value_) is int:
        return {"flag": [cls.__module__, cls.__qualname__, scalars.ENCODERS[int](member._value_)]}
    return None


_CONTAINERS: dict[type, Callable[[_Flattener, Any, Path, int], Node]] = {
    list: _Flattener._list,
    dict: _Flattener._dict,
    collections.OrderedDict: _Flattener._ordered_dict,
    collections.Counter: _Flattener._ordered_dict,
    collections.defaultdict: _Flattener._default_dict,
    collections.deque: _Flattener._deque,
    tuple: _Flattener._tuple,
    set: _Flattener._set,
    frozenset: _Flattener._set,
    slice: _Flattener._slice,
    types.SimpleNamespace: _Flattener._namespace,
    argparse.Namespace: _Flattener._namespace,
    bytes: _Flattener._bytes,
    bytearray: _Flattener._bytes,
    str: _Flattener._text,
    np.ndarray: _Flattener._array,
}
