"""An object to its tree, tensor records and storages.

The flattener here goes through the object and makes the tree; one writer each takes bytes,
tensors and pickles out of it.
"""

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
from thinpoint.state import arrays, byte_writer, scalars
from thinpoint.state.byte_writer import ByteWriter
from thinpoint.state.classes import (
    FACTORIES,
    get_fields,
    instance_dict,
    is_plain_dataclass,
    is_plain_namedtuple,
    reference,
)
from thinpoint.state.leaves import FlatState
from thinpoint.state.pickle_writer import PickleWriter
from thinpoint.state.roles import is_optimizer_state, role_of
from thinpoint.state.storages import StorageTable
from thinpoint.state.tensor_writer import DeviceOf, TensorWriter
from thinpoint.state.tree import MAX_NESTING, Node, Path, display, key_of

MAX_INLINE_TEXT = 1 << 16
MIN_LIST_BLOB = 257
"""Shorter lists of numbers are spelled out; longer ones would bloat the index (think of a sampler's permutation)."""

_SORTABLE = frozenset({str, bytes, int, bool})
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_DEEP_HINT = "Nest less, or save the object in a flatter form"


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
        flattener.finish_deferred()
        sources, shifts_bytes = flattener.storages.finish()
        flattener.tensors.move(shifts_bytes)
        return FlatState(tree=tree, tensors=flattener.tensors.records, storages=sources)
    except RecursionError as error:
        raise UnsupportedObjectError(
            "the state is nested too deeply for Python's stack", hint=_DEEP_HINT
        ) from error
    finally:
        # It and its writers know each other: the user's tensors would live until the next garbage collection.
        flattener.release()


def key_step(key: Any) -> Any:
    """What stands for a dict's key in the paths of a tree that holds it.

    Raises:
        UnsupportedObjectError: the key cannot be stored.
    """
    flattener = _Flattener(True, None)
    try:
        return key_of(flattener.tree(key, (), 0), ())
    finally:
        flattener.release()


@dataclass(frozen=True)
class _Deferred:
    record: dict[str, Any]
    field: str
    obj: Any
    path: Path
    nesting: int
    in_optimizer: bool


class _Flattener:
    def __init__(self, allow_pickle: bool, device_of: DeviceOf | None) -> None:
        self.storages = StorageTable()
        self.tensors = TensorWriter(self.storages, self._role_at, self._defer, device_of)
        self._bytes_to = ByteWriter(self.storages, self._role_at)
        self._pickles = PickleWriter(self._bytes_to, self.tensors, allow_pickle)
        # Objects are known by address, so each must live until the end.
        self._kept: list[Any] = []
        # Numbers of the tree under way: dict keys, attributes and contexts of tensors are trees of their own.
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._count = 0
        self._in_optimizer = False
        self._tensor_nesting = 0
        # Attributes and contexts wait until the end: a pickler cannot be entered again from within itself.
        self._deferred: collections.deque[_Deferred] = collections.deque()
        self._encoders: dict[type, Callable[[Any], Node]] = dict(scalars.ENCODERS)
        if "torch" in sys.modules:
            from thinpoint.state import torch_values

            self._encoders.update(torch_values.ENCODERS)

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
        taken = self.tensors.take(obj, path, self._tensor_nesting)
        if taken is not None:
            kind, tensor_id = taken
            return {kind: tensor_id}
        if isinstance(obj, np.generic):
            try:
                return byte_writer.numpy_scalar(obj)
            except scalars.NotPlainError:
                return self._pickle(obj, path, depth)
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
            if type(key) is str:
                step = key_node = key
            else:
                key_node = self.tree(key, (*path, type(key).__name__), depth + 1)
                step = key_of(key_node, path)
            flat += [key_node, self.node(value, (*path, step), depth + 1)]
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

    def _list(self, obj: list[Any], path: Path, depth: int) -> Node:
        if len(obj) >= MIN_LIST_BLOB:
            kinds = set(map(type, obj))
            if kinds == {int} and _INT64_MIN <= min(obj) and max(obj) <= _INT64_MAX:
                return {"int_list": self._bytes_to.numbers(np.array(obj, "<i8"), path)}
            if kinds == {float}:
                return {"float_list": self._bytes_to.numbers(np.array(obj, "<f8"), path)}
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

    def _bytes(self, obj: Any, path: Path, depth: int) -> Node:
        return {type(obj).__name__: self._bytes_to.data(obj, path)}

    def _text(self, obj: str, path: Path, depth: int) -> Node:
        return {"text": self._bytes_to.data(obj.encode("utf-8", "surrogatepass"), path)}

    def _array(self, obj: np.ndarray, path: Path, depth: int) -> Node:
        try:
            return {"array": self._bytes_to.array(obj, path)}
        except scalars.NotPlainError:
            return self._pickle_body(obj, path, depth)

    def _pickle(self, obj: Any, path: Path, depth: int) -> Node:
        return self._numbered(_Flattener._pickle_body, obj, path, depth)

    def _pickle_body(self, obj: Any, path: Path, depth: int) -> Node:
        return self._pickles.node(obj, path, self._tensor_nesting)

    def _role_at(self, path: Path, dtype: str) -> str:
        return role_of(path, dtype, in_optimizer=self._in_optimizer)

    def _defer(self, record: dict[str, Any], field: str, obj: Any, path: Path, nesting: int) -> None:
        self._kept.append(obj)
        self._deferred.append(_Deferred(record, field, obj, path, nesting, self._in_optimizer))

    def finish_deferred(self) -> None:
        """Fill in the attributes and contexts of all tensors met so far, and of those met by that."""
        while self._deferred:
            item = self._deferred.popleft()
            self._in_optimizer, self._tensor_nesting = item.in_optimizer, item.nesting
            item.record[item.field] = self.tree(item.obj, item.path, 0)

    def release(self) -> None:
        """Let go of everything; nothing else may be called after that."""
        vars(self).clear()


def _type_and_value(obj: Any) -> tuple[str, Any]:
    return type(obj).__name__, obj


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
