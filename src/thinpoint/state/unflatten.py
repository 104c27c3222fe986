"""A tree, its tensor records and storages back to the object. Trusts nothing it reads.

`needed` says first what the selected part of the tree takes; then the builder here goes through the tree, with one
reader each for bytes, tensors and pickles.
"""

from __future__ import annotations

import argparse
import collections
import enum
import types
from collections.abc import Callable, Collection
from typing import Any

from thinpoint.errors import MalformedFileError, UnsupportedObjectError
from thinpoint.state import arrays, scalars
from thinpoint.state.byte_reader import BYTE_TAGS, ByteReader, FetchBlob
from thinpoint.state.classes import FACTORIES, checked_reference, resolve, set_fields
from thinpoint.state.needed import ByteRanges, Needed, find_needed
from thinpoint.state.pickle_reader import PickleReader
from thinpoint.state.record_fields import TENSOR_TAGS
from thinpoint.state.selection import Selection
from thinpoint.state.tensor_reader import FetchStorage, TensorReader
from thinpoint.state.tree import Node, Parsed, Path, display, malformed, numbered_nodes, parse

Prepare = Callable[[dict[int, ByteRanges]], None]
"""Storage id to byte ranges, as they will be asked for one by one."""

_PENDING = object()


def unflatten(
    tree: Node,
    tensors: list[dict[str, Any]],
    *,
    num_storages: int,
    fetch_storage: FetchStorage,
    fetch_blob: FetchBlob,
    prepare: Prepare | None = None,
    weights_only: bool = True,
    select: Collection[Path] | None = None,
) -> Any:
    """The object that `flatten` took apart.

    Args:
        tree: the tree, untrusted.
        tensors: the tensor records, untrusted.
        num_storages: how many storages there are; ids from 0 to below that reach the two functions.
        fetch_storage: gives a storage on the device where its tensors shall be; called at most once for each id,
            and only for storages that are needed.
        fetch_blob: gives the bytes of a storage that is no tensor's; called at most once for each id. A bytearray
            is kept as the memory of an array, without a copy.
        prepare: called once before anything is fetched, with the byte ranges that each storage is needed for.
        weights_only: refuse what would run code: pickled objects, classes of modules that are not imported.
        select: paths of leaves to keep, or of containers to keep whole. Elsewhere dicts lose their keys, sequences
            and records hold None. What a kept leaf shares with another one is loaded whole.

    Raises:
        MalformedFileError: tree or records break the grammar, or reach beyond their storages.
        UnsafeObjectError: something would run code and weights_only is True.
        UnsupportedObjectError: a class cannot be imported or rebuilt here.
    """
    builder = None
    try:
        needed = find_needed(tree, tensors, num_storages, weights_only=weights_only, select=select)
        if prepare is not None:
            prepare(needed.ranges)
        builder = _Builder(
            tensors, needed, fetch_storage, ByteReader(num_storages, fetch_blob), weights_only=weights_only
        )
        obj = builder.tree(tree, (), select)
        builder.tensors.finish_attrs()
        return obj
    except RecursionError as error:
        raise MalformedFileError("the state in the file is nested too deeply for Python's stack") from error
    finally:
        # It and its readers know each other: what was loaded would live until the next garbage collection.
        if builder is not None:
            builder.release()


class _Tree:
    """A tree under way: its numbered nodes and the objects made of them so far."""

    def __init__(self, root: Node, pruned: bool = False) -> None:
        self.pruned = pruned
        self.nodes = numbered_nodes(root)
        self.number_of = {id(node): number for number, (_, node) in enumerate(self.nodes)}
        self.objects: dict[int, Any] = {}


class _Builder:
    """Builds objects of trees."""

    def __init__(
        self,
        records: list[dict[str, Any]],
        needed: Needed,
        fetch_storage: FetchStorage,
        bytes_of: ByteReader,
        *,
        weights_only: bool,
    ) -> None:
        self.tensors = TensorReader(records, needed, fetch_storage, self.tree, weights_only)
        self._bytes_of = bytes_of
        self._pickles = PickleReader(needed.pickles, weights_only, bytes_of.data, self.tensors.object)
        self._weights_only = weights_only
        self._current = _Tree(None)
        self._select: Selection | None = None
        self._decoders: dict[str, Callable[[Any], Any]] = {**scalars.DECODERS, **arrays.DECODERS}
        self._has_torch_decoders = False

    def tree(self, root: Node, path: Path, select: Collection[Path] | None = None) -> Any:
        """The object of a tree with its own numbering."""
        saved = self._current, self._select
        selection = Selection(select)
        self._current = _Tree(root, pruned=not selection.whole(()))
        self._select = None if selection.whole(()) else selection
        try:
            return self._node(root, path)
        finally:
            self._current, self._select = saved

    def release(self) -> None:
        """Let go of everything; nothing else may be called after that."""
        vars(self).clear()

    def _node(self, node: Node, path: Path) -> Any:
        parsed = parse(node, path)
        tag = parsed.tag
        if tag == "value":
            if type(node) is int and abs(node) > scalars.MAX_PLAIN_INT:
                malformed(path, "an integer beyond 2^53")
            return node
        number = self._current.number_of.get(id(node))
        build = _BUILDERS.get(tag)
        if build is not None:
            return build(self, parsed, path, number)
        if tag in TENSOR_TAGS:
            return self.tensors.object(tag, parsed.body, path)
        if tag in BYTE_TAGS:
            return self._keep(number, self._bytes_of.value(tag, parsed.body, path))
        if tag == "pickle":
            return self._keep(number, self._pickles.object(parsed.body, path))
        decode = self._decoder(tag, path)
        try:
            return decode(parsed.body)
        except scalars.DECODE_ERRORS as error:
            malformed(path, f"not a valid {tag} ({str(error)[:200]})")

    def _decoder(self, tag: str, path: Path) -> Callable[[Any], Any]:
        if tag not in self._decoders and not self._has_torch_decoders:
            from thinpoint.state import torch_values

            self._decoders.update(torch_values.DECODERS)
            self._has_torch_decoders = True
        decode = self._decoders.get(tag)
        if decode is None:
            malformed(path, f"unknown tag {str(tag)[:40]!r}")
        return decode

    def _keep(self, number: int | None, obj: Any) -> Any:
        """Make the object known to refs. Only where nothing of it is left out."""
        if number is not None and self._select is None:
            self._current.objects[number] = obj
        return obj

    def _reserve(self, number: int | None) -> None:
        if number is not None and self._select is None:
            self._current.objects[number] = _PENDING

    def _ref(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        target = parsed.body
        if type(target) is not int or not 0 <= target < len(self._current.nodes):
            malformed(path, f"a reference to {str(target)[:40]!r}")
        if target not in self._current.objects:
            # Left out by the selection where it first stands; here it is wanted whole.
            target_path, node = self._current.nodes[target]
            if not self._current.pruned:
                malformed(path, f"a reference to {display(target_path) or 'the root'}, which comes later")
            return self._whole(node, target_path)
        obj = self._current.objects[target]
        if obj is _PENDING:
            malformed(path, "a reference to something that it is part of")
        return obj

    def _child(self, node: Node, path: Path) -> tuple[bool, Any]:
        """Whether the selection keeps something at this path, and that."""
        select = self._select
        if select is None:
            return True, self._node(node, path)
        if select.whole(path):
            return True, self._whole(node, path)
        if select.partly(path) and parse(node, path).tag != "ref":
            return True, self._node(node, path)
        return False, None

    def _values(self, parsed: Parsed, path: Path) -> list[Any]:
        steps = parsed.steps(path)
        return [self._child(node, (*path, step))[1] for step, node in zip(steps, parsed.values, strict=True)]

    def _kept_values(self, parsed: Parsed, path: Path) -> list[Any]:
        found = [
            self._child(node, (*path, step))
            for step, node in zip(parsed.steps(path), parsed.values, strict=True)
        ]
        return [value for kept, value in found if kept]

    def _fill(self, target: Any, parsed: Parsed, path: Path) -> Any:
        keys = parsed.keys or []
        for key_node, step, node in zip(keys, parsed.steps(path), parsed.values, strict=True):
            below = (*path, step)
            kept, value = self._child(node, below)
            if not kept:
                continue
            if isinstance(key_node, (dict, list)):
                key = self.tree(key_node, below)
            else:
                key = key_node if type(key_node) is str else self._node(key_node, below)
            try:
                target[key] = value
            except TypeError:
                malformed(below, "a key that cannot be hashed")
        return target

    def _fields(self, parsed: Parsed, path: Path) -> dict[str, Any]:
        names = parsed.names or []
        return dict(zip(names, self._values(parsed, path), strict=True))

    def _list(self, parsed: Parsed, path: Path, number: int | None) -> list[Any]:
        target: list[Any] = self._keep(number, [])
        for step, node in enumerate(parsed.values):
            target.append(self._child(node, (*path, step))[1])
        return target

    def _dict(self, parsed: Parsed, path: Path, number: int | None) -> dict[Any, Any]:
        return self._fill(self._keep(number, {}), parsed, path)  # type: ignore[no-any-return]

    def _ordered_dict(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        made: Any = collections.Counter() if parsed.tag == "counter" else collections.OrderedDict()
        target = self._fill(self._keep(number, made), parsed, path)
        for name, node in parsed.attrs:
            vars(target)[name] = self._whole(node, (*path, name))
        return target

    def _whole(self, node: Node, path: Path) -> Any:
        saved, self._select = self._select, None
        try:
            return self._node(node, path)
        finally:
            self._select = saved

    def _default_dict(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        name = parsed.head[0]
        if name is not None and (not isinstance(name, str) or name not in FACTORIES):
            malformed(path, f"unknown default factory {str(name)[:40]!r}")
        factory = None if name is None else FACTORIES[name]
        return self._fill(self._keep(number, collections.defaultdict(factory)), parsed, path)

    def _deque(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        maxlen = parsed.head[0]
        if maxlen is not None and (type(maxlen) is not int or not len(parsed.values) <= maxlen < 1 << 63):
            malformed(path, "maxlen of a deque")
        target = self._keep(number, collections.deque(maxlen=maxlen))
        target.extend(self._values(parsed, path))
        return target

    def _tuple(self, parsed: Parsed, path: Path, number: int | None) -> tuple[Any, ...]:
        self._reserve(number)
        return self._keep(number, tuple(self._values(parsed, path)))  # type: ignore[no-any-return]

    def _frozenset(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        self._reserve(number)
        return self._keep(number, self._hashed(frozenset, parsed, path))

    def _set(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        target: set[Any] = self._keep(number, set())
        target |= self._hashed(set, parsed, path)
        return target

    def _hashed(self, cls: type, parsed: Parsed, path: Path) -> Any:
        values = self._kept_values(parsed, path)
        try:
            return cls(values)
        except TypeError:
            malformed(path, "an element that cannot be hashed")

    def _slice(self, parsed: Parsed, path: Path, number: int | None) -> slice:
        self._reserve(number)
        if len(parsed.values) != 3:
            malformed(path, "a slice has three parts")
        return self._keep(number, slice(*self._values(parsed, path)))  # type: ignore[no-any-return]

    def _namespace(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        made = types.SimpleNamespace() if parsed.tag == "namespace" else argparse.Namespace()
        target = self._keep(number, made)
        vars(target).update(self._fields(parsed, path))
        return target

    def _dataclass(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        cls = resolve(parsed.head[0], parsed.head[1], "dataclass", weights_only=self._weights_only, path=path)
        try:
            target = self._keep(number, object.__new__(cls))
            set_fields(target, self._fields(parsed, path))
        except (AttributeError, TypeError) as error:
            raise UnsupportedObjectError(
                f"{display(path)} does not fit the class {'.'.join(parsed.head)} of this version: {error}"
            ) from error
        return target

    def _namedtuple(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        self._reserve(number)
        module, qualname = parsed.head
        cls: Any = resolve(module, qualname, "namedtuple", weights_only=self._weights_only, path=path)
        fields = self._fields(parsed, path)
        if tuple(fields) != cls._fields:
            raise UnsupportedObjectError(
                f"{display(path)} does not fit the class {'.'.join(parsed.head)} of this version",
                hint=f"The file has the fields {', '.join(fields)}; the class has {', '.join(cls._fields)}",
            )
        return self._keep(number, tuple.__new__(cls, fields.values()))

    def _enum(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        if not isinstance(parsed.body, list) or len(parsed.body) != 3:
            malformed(path, "an enum member is a class and a value")
        (module, qualname), value = checked_reference(parsed.body[:2], path), parsed.body[2]
        cls: Any = resolve(module, qualname, "enum", weights_only=self._weights_only, path=path)
        if parsed.tag == "enum":
            if not isinstance(value, str) or value not in cls._member_map_:
                raise UnsupportedObjectError(f"{module}.{qualname} has no member {str(value)[:80]}")
            return cls._member_map_[value]
        number_of_flags = self._node(value, path)
        if not issubclass(cls, enum.Flag) or type(number_of_flags) is not int:
            malformed(path, "a combination of flags that is no integer")
        try:
            return cls(number_of_flags)
        except (ValueError, TypeError) as error:
            raise UnsupportedObjectError(f"{module}.{qualname} has no such combination: {error}") from error


_BUILDERS: dict[str, Callable[[_Builder, Parsed, Path, int | None], Any]] = {
    "list": _Builder._list,
    "dict": _Builder._dict,
    "ordered_dict": _Builder._ordered_dict,
    "counter": _Builder._ordered_dict,
    "default_dict": _Builder._default_dict,
    "deque": _Builder._deque,
    "tuple": _Builder._tuple,
    "set": _Builder._set,
    "frozenset": _Builder._frozenset,
    "slice": _Builder._slice,
    "namespace": _Builder._namespace,
    "arg_namespace": _Builder._namespace,
    "dataclass": _Builder._dataclass,
    "namedtuple": _Builder._namedtuple,
    "enum": _Builder._enum,
    "flag": _Builder._enum,
    "ref": _Builder._ref,
}
