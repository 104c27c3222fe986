"""A tree, its tensor records and storages back to the object. Trusts nothing it reads."""

from __future__ import annotations

import argparse
import collections
import enum
import pickle
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import numpy as np

from thinpoint.errors import MalformedFileError, ThinpointError, UnsafeObjectError, UnsupportedObjectError
from thinpoint.state import arrays, scalars
from thinpoint.state.classes import resolve, set_fields
from thinpoint.state.flatten import FACTORIES
from thinpoint.state.pickles import PICKLE_ERRORS, StateUnpickler
from thinpoint.state.tree import (
    CONTAINERS,
    MAX_TENSOR_NESTING,
    Node,
    Parsed,
    Path,
    display,
    malformed,
    numbered_nodes,
    parse,
    traverse,
)
from thinpoint.state.tree_names import checked_tensor_id

FetchStorage = Callable[[int, "list[tuple[int, int]]"], Any]
"""Storage id and needed byte ranges (sorted, disjoint) to a `torch.UntypedStorage`; other bytes may be anything."""

Prepare = Callable[["dict[int, list[tuple[int, int]]]"], None]
"""Storage id to byte ranges, as they will be asked for one by one."""

FetchBlob = Callable[[int], "bytes | bytearray | memoryview"]
"""Storage id to all its bytes."""

_TENSOR_TAGS = frozenset({"tensor", "untyped_storage", "typed_storage"})
_TRUST_HINT = (
    "Re-running with `weights_only=False` will likely succeed, but it can result in arbitrary code execution: "
    "do it only if you trust the source of the file"
)
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
    try:
        builder = _Unflattener(tensors, num_storages, fetch_storage, fetch_blob, weights_only)
        builder.plan_ranges(tree, select)
        if prepare is not None:
            prepare(builder.ranges)
        obj = builder.tree(tree, (), select)
        builder.finish_attrs()
        return obj
    except RecursionError as error:
        raise MalformedFileError("the state in the file is nested too deeply for Python's stack") from error


class _Tree:
    """A tree under way: its numbered nodes and the objects made of them so far."""

    def __init__(self, root: Node, pruned: bool = False) -> None:
        self.pruned = pruned
        self.nodes = numbered_nodes(root)
        self.number_of = {id(node): number for number, (_, node) in enumerate(self.nodes)}
        self.objects: dict[int, Any] = {}


class _Unflattener:
    def __init__(
        self,
        tensors: list[dict[str, Any]],
        num_storages: int,
        fetch_storage: FetchStorage,
        fetch_blob: FetchBlob,
        weights_only: bool,
    ) -> None:
        self._records = tensors
        self._num_storages = num_storages
        self._fetch_storage = fetch_storage
        self._fetch_blob = fetch_blob
        self._weights_only = weights_only
        self._root: Node = None
        self._current = _Tree(None)
        self._select: _Selection | None = None
        self._tensors: dict[int, Any] = {}
        self._tensor_nesting = 0
        self._needed: dict[int, None] = {}
        self._storages: dict[int, Any] = {}
        self._used_blobs: set[int] = set()
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._attrs: collections.deque[tuple[Any, Node, Path]] = collections.deque()
        self._unpickler: StateUnpickler | None = None
        self._pickles: dict[int, tuple[dict[str, Any], Path]] | None = None
        self._unpickled: list[Any] = []
        self._decoders: dict[str, Callable[[Any], Any]] = {**scalars.DECODERS, **arrays.DECODERS}
        self._has_torch_decoders = False

    # ---- what is needed ----

    def plan_ranges(self, root: Node, select: Collection[Path] | None) -> None:
        """Collect the byte ranges of every storage that the selected part of the tree needs."""
        if not isinstance(self._records, list) or not all(
            isinstance(record, dict) for record in self._records
        ):
            raise MalformedFileError("the tensor records in the file are no list of objects")
        self._root = root
        selection = _Selection(select)
        needed = self._needed
        refs: list[tuple[int, Path]] = []
        for path, _, parsed, in_key in traverse(root):
            below = selection.partly(path)
            if in_key or selection.whole(path) or (below and parsed.tag not in CONTAINERS):
                self._note(parsed, path, needed, refs)
            elif below:
                for name, node in parsed.attrs:
                    self._note_all(node, (*path, name), needed, refs)
        if select is not None and refs:
            self._note_refs(numbered_nodes(root), refs, needed)
        pending = collections.deque(needed)
        while pending:
            record = self._records[pending.popleft()]
            found: dict[int, None] = dict.fromkeys(self._inner_ids(record, ()).values())
            for tree in _trees_of(record):
                self._note_all(tree, (), found, [])
            for tensor_id in found:
                if tensor_id not in needed:
                    needed[tensor_id] = None
                    pending.append(tensor_id)
        self._collect_ranges()

    def _note(
        self, parsed: Parsed, path: Path, needed: dict[int, None], refs: list[tuple[int, Path]]
    ) -> None:
        if parsed.tag in _TENSOR_TAGS:
            needed[checked_tensor_id(parsed.body, len(self._records), path)] = None
        elif parsed.tag == "pickle":
            # A pickle is read after those before it, so all their tensors are needed.
            bodies = [_checked_pickle(parsed.body, path)] if self._weights_only else self._unread_pickles()
            for body in bodies:
                for tensor_id in body["tensors"]:
                    needed[checked_tensor_id(tensor_id, len(self._records), path)] = None
        elif parsed.tag == "ref" and type(parsed.body) is int:
            refs.append((parsed.body, path))

    def _unread_pickles(self) -> list[dict[str, Any]]:
        """The bodies of all pickles the first time, then nothing."""
        return [] if self._pickles is not None else [body for body, _ in self._all_pickles().values()]

    def _note_all(
        self, node: Node, path: Path, needed: dict[int, None], refs: list[tuple[int, Path]]
    ) -> None:
        for below, _, parsed, _ in traverse(node):
            self._note(parsed, (*path, *below), needed, refs)

    def _note_refs(
        self, numbered: list[tuple[Path, Node]], refs: list[tuple[int, Path]], needed: dict[int, None]
    ) -> None:
        """Everything below what the kept refs name, since that is loaded whole."""
        seen: set[int] = set()
        while refs:
            number, path = refs.pop()
            if number in seen or not 0 <= number < len(numbered):
                continue
            seen.add(number)
            self._note_all(numbered[number][1], path, needed, refs)

    @property
    def ranges(self) -> dict[int, list[tuple[int, int]]]:
        """The bytes that each needed storage is needed for, sorted and disjoint."""
        return {storage_id: _merged(ranges) for storage_id, ranges in self._ranges.items()}

    def _collect_ranges(self) -> None:
        for tensor_id in self._needed:
            record = self._records[tensor_id]
            storage_id = record.get("storage")
            if storage_id is None:
                continue
            if "subclass" in record or "layout" in record:
                raise MalformedFileError(f"tensor {tensor_id} has both a storage and inner tensors")
            if type(storage_id) is not int or not 0 <= storage_id < self._num_storages:
                raise MalformedFileError(f"tensor {tensor_id} names no storage: {str(storage_id)[:40]}")
            from thinpoint.state.tensor_rebuild import view_range

            self._ranges.setdefault(storage_id, []).append(view_range(record, (tensor_id,)))

    def _inner_ids(self, record: dict[str, Any], path: Path) -> dict[str, int]:
        inner = record.get("inner", {})
        if not isinstance(inner, dict):
            malformed(path, "the inner tensors of a tensor are no object")
        return {name: checked_tensor_id(value, len(self._records), path) for name, value in inner.items()}

    # ---- trees ----

    def tree(self, root: Node, path: Path, select: Collection[Path] | None = None) -> Any:
        """The object of a tree with its own numbering."""
        saved = self._current, self._select
        selection = _Selection(select)
        self._current = _Tree(root, pruned=not selection.whole(()))
        self._select = None if selection.whole(()) else selection
        try:
            return self._node(root, path)
        finally:
            self._current, self._select = saved

    def finish_attrs(self) -> None:
        """Set the attributes of all tensors made so far; last, because they may refer to the tensors."""
        while self._attrs:
            tensor, node, path = self._attrs.popleft()
            attrs = self.tree(node, path)
            if type(attrs) is not dict or not all(type(name) is str for name in attrs):
                malformed(path, "the attributes of a tensor are no dict of names")
            # Straight into the dict: setting an attribute of a tensor by name could run its setter.
            tensor.__dict__.update(attrs)

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
        if tag in _TENSOR_TAGS:
            return self._tensor_node(tag, parsed.body, path)
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
            saved, self._select = self._select, None
            try:
                return self._node(node, target_path)
            finally:
                self._select = saved
        obj = self._current.objects[target]
        if obj is _PENDING:
            malformed(path, "a reference to something that it is part of")
        return obj

    # ---- containers ----

    def _child(self, node: Node, path: Path) -> tuple[bool, Any]:
        """Whether the selection keeps something at this path, and that."""
        select = self._select
        if select is None:
            return True, self._node(node, path)
        if select.whole(path):
            self._select = None
            try:
                return True, self._node(node, path)
            finally:
                self._select = select
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
            key = key_node if isinstance(key_node, str) else self.tree(key_node, below)
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
        module, qualname, value = self._class_value(parsed.body, path)
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

    def _class_value(self, body: Any, path: Path) -> tuple[str, str, Any]:
        if (
            not isinstance(body, list)
            or len(body) != 3
            or not all(isinstance(part, str) for part in body[:2])
        ):
            malformed(path, "a class reference")
        return body[0], body[1], body[2]

    # ---- bytes ----

    def _data(self, data: Any, path: Path) -> bytes | bytearray | memoryview:
        if isinstance(data, str):
            try:
                return scalars.decode_base64(data)
            except ValueError as error:
                malformed(path, f"bytes that are no base64 ({error})")
        if type(data) is not int or not 0 <= data < self._num_storages:
            malformed(path, "bytes that are neither base64 nor in a storage")
        # Else a small file could ask for one large storage again and again.
        if data in self._used_blobs:
            malformed(path, f"storage {data} is used twice")
        self._used_blobs.add(data)
        return self._fetch_blob(data)

    def _bytes(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        data = self._data(parsed.body, path)
        return self._keep(number, bytearray(data) if parsed.tag == "bytearray" else bytes(data))

    def _text(self, parsed: Parsed, path: Path, number: int | None) -> str:
        try:
            text = str(self._data(parsed.body, path), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            malformed(path, "text that is no UTF-8")
        self._keep(number, text)
        return text

    def _number_list(self, parsed: Parsed, path: Path, number: int | None) -> list[Any]:
        data = self._data(parsed.body, path)
        if len(data) % 8:
            malformed(path, "a list of numbers that are not 8 bytes each")
        values = (
            np.frombuffer(data, "<i8" if parsed.tag == "int_list" else "<f8") if len(data) else np.zeros(0)
        )
        return self._keep(number, values.tolist())  # type: ignore[no-any-return]

    def _array(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        body = parsed.body
        if not isinstance(body, list) or len(body) != 4:
            malformed(path, "an array is a dtype, a shape, an order and bytes")
        dtype, shape, order, data = body
        buffer = self._data(data, path)
        try:
            array = arrays.build_array(
                dtype, shape, order, buffer if isinstance(buffer, bytearray) else bytearray(buffer)
            )
        except scalars.DECODE_ERRORS as error:
            malformed(path, f"not a valid array ({str(error)[:200]})")
        return self._keep(number, array)

    # ---- tensors ----

    def _tensor_node(self, tag: str, body: Any, path: Path) -> Any:
        tensor = self._tensor(checked_tensor_id(body, len(self._records), path), path)
        if tag == "tensor":
            return tensor
        torch = sys.modules["torch"]
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            malformed(path, "a storage of something that has none")
        storage = tensor.untyped_storage()
        if tag == "untyped_storage":
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)

    def _tensor(self, tensor_id: int, path: Path) -> Any:
        if tensor_id in self._tensors:
            tensor = self._tensors[tensor_id]
            if tensor is _PENDING:
                malformed(path, "a tensor that is part of itself")
            return tensor
        if self._tensor_nesting >= MAX_TENSOR_NESTING:
            malformed(path, f"a tensor inside more than {MAX_TENSOR_NESTING} others")
        if tensor_id not in self._needed:
            malformed(path, f"tensor {tensor_id}, which the pickle that needs it does not list")
        self._tensors[tensor_id] = _PENDING
        self._tensor_nesting += 1
        tensor = self._build_tensor(self._records[tensor_id], path)
        self._tensor_nesting -= 1
        self._tensors[tensor_id] = tensor
        record = self._records[tensor_id]
        if "attrs" in record:
            if "subclass" in record or record.get("layout") == "jagged":
                malformed(path, "attributes of a tensor subclass")
            self._attrs.append((tensor, record["attrs"], path))
        return tensor

    def _build_tensor(self, record: dict[str, Any], path: Path) -> Any:
        from thinpoint.state import tensor_rebuild

        inner = {
            name: self._tensor(tensor_id, (*path, name))
            for name, tensor_id in self._inner_ids(record, path).items()
        }
        storage = self._storage(record.get("storage"), path)
        subclass = record.get("subclass")
        context = self._context(subclass, path) if "subclass" in record else None
        try:
            if "subclass" in record:
                return tensor_rebuild.finish(
                    self._build_subclass(subclass, inner, context, path), record, path
                )
            if "layout" in record:
                return tensor_rebuild.finish(tensor_rebuild.build_layout(record, inner, path), record, path)
            return tensor_rebuild.finish(
                tensor_rebuild.build_strided(record, storage, inner, path), record, path
            )
        except tensor_rebuild.BUILD_ERRORS as error:
            tensor_rebuild.bad_record(path, f"{type(error).__name__}: {str(error)[:300]}")

    def _storage(self, storage_id: int | None, path: Path) -> Any:
        if storage_id is None:
            return None
        if storage_id not in self._storages:
            self._storages[storage_id] = self._fetch_storage(
                storage_id, _merged(self._ranges.get(storage_id, []))
            )
        return self._storages[storage_id]

    def _context(self, body: Any, path: Path) -> Any:
        if not isinstance(body, dict) or not isinstance(body.get("class"), list) or "context" not in body:
            malformed(path, "a tensor subclass has a class and a context")
        return self.tree(body["context"], (*path, "context"))

    def _build_subclass(self, body: Any, inner: dict[str, Any], context: Any, path: Path) -> Any:
        from thinpoint.state.tensor_rebuild import checked_sizes

        module, qualname, _ = self._class_value([*body["class"], None], path)
        cls: Any = resolve(module, qualname, "tensor subclass", weights_only=self._weights_only, path=path)
        size, stride = checked_sizes(body, "outer_size", path), checked_sizes(body, "outer_stride", path)
        torch = sys.modules["torch"]
        try:
            return cls.__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))
        except Exception as error:
            raise UnsupportedObjectError(
                f"{display(path)}: {module}.{qualname}.__tensor_unflatten__ failed: {error}"
            ) from error

    # ---- pickles ----

    def _pickle(self, parsed: Parsed, path: Path, number: int | None) -> Any:
        body = _checked_pickle(parsed.body, path)
        if self._weights_only:
            _refuse_pickle(body, path)
        pickles = self._all_pickles()
        if pickles.get(body["index"], (None,))[0] is not parsed.body:
            malformed(path, "two pickles with one number")
        # The pieces share one memo, so each is read after those before it.
        for index in range(len(self._unpickled), body["index"] + 1):
            if index not in pickles:
                malformed(path, f"pickle {index} is missing")
            self._unpickle(*pickles[index])
        return self._keep(number, self._unpickled[body["index"]])

    def _unpickle(self, body: dict[str, Any], path: Path) -> None:
        data = bytes(self._data(body["data"], path))
        if self._unpickler is None:
            self._unpickler = StateUnpickler(self._put_back)
        try:
            self._unpickled.append(self._unpickler.load(data))
        except ThinpointError:
            raise
        except (*PICKLE_ERRORS, EOFError, IndexError, KeyError, OSError) as error:
            raise UnsupportedObjectError(
                f"{display(path)}, a {body['type']}, cannot be unpickled: {type(error).__name__}: {error}",
                hint="The classes it needs must be importable, in versions that fit the file",
            ) from error

    def _put_back(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) != 2 or pid[0] not in _TENSOR_TAGS:
            raise pickle.UnpicklingError("a persistent id that names no tensor")
        return self._tensor_node(pid[0], pid[1], ())

    def _all_pickles(self) -> dict[int, tuple[dict[str, Any], Path]]:
        """Every pickle of the file by its number in the stream, whichever tree it stands in."""
        if self._pickles is None:
            self._pickles = {}
            for tree in [self._root, *(tree for record in self._records for tree in _trees_of(record))]:
                for path, _, parsed, _ in traverse(tree):
                    if parsed.tag == "pickle":
                        body = _checked_pickle(parsed.body, path)
                        self._pickles[body["index"]] = (parsed.body, path)
        return self._pickles


def _trees_of(record: dict[str, Any]) -> list[Node]:
    """The trees inside a tensor's record: its attributes and the context of its subclass."""
    trees = [record["attrs"]] if "attrs" in record else []
    subclass = record.get("subclass")
    return [*trees, subclass["context"]] if isinstance(subclass, dict) and "context" in subclass else trees


def _checked_pickle(body: Any, path: Path) -> dict[str, Any]:
    if not isinstance(body, dict) or set(body) != {"index", "type", "classes", "tensors", "data"}:
        malformed(path, "a pickle has a number, a type, classes, tensors and data")
    strings = [body["type"], *body["classes"]] if isinstance(body["classes"], list) else [None]
    if not all(isinstance(text, str) for text in strings) or not isinstance(body["tensors"], list):
        malformed(path, "type, classes and tensors of a pickle")
    if type(body["index"]) is not int or body["index"] < 0:
        malformed(path, "the number of a pickle")
    return body


def _refuse_pickle(body: dict[str, Any], path: Path) -> NoReturn:
    classes = [name for name in body["classes"] if name != body["type"]]
    needs = f" (it needs {', '.join(classes[:8])})" if classes else ""
    raise UnsafeObjectError(
        f"Weights only load failed: {display(path) or 'the state'} is a pickled {body['type']}{needs}",
        hint=_TRUST_HINT,
    )


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class _Selection:
    """Which paths are kept whole, and which are on the way to one."""

    def __init__(self, paths: Collection[Path] | None) -> None:
        self._paths = None if paths is None else set(paths)
        self._prefixes = {path[:n] for path in self._paths or () for n in range(len(path))}

    def whole(self, path: Path) -> bool:
        """Whether the node at this path is kept with all that is below it."""
        if self._paths is None:
            return True
        return any(path[:n] in self._paths for n in range(len(path) + 1))

    def partly(self, path: Path) -> bool:
        """Whether something below this path is kept."""
        return path in self._prefixes


_BUILDERS: dict[str, Callable[[_Unflattener, Parsed, Path, int | None], Any]] = {
    "list": _Unflattener._list,
    "dict": _Unflattener._dict,
    "ordered_dict": _Unflattener._ordered_dict,
    "counter": _Unflattener._ordered_dict,
    "default_dict": _Unflattener._default_dict,
    "deque": _Unflattener._deque,
    "tuple": _Unflattener._tuple,
    "set": _Unflattener._set,
    "frozenset": _Unflattener._frozenset,
    "slice": _Unflattener._slice,
    "namespace": _Unflattener._namespace,
    "arg_namespace": _Unflattener._namespace,
    "dataclass": _Unflattener._dataclass,
    "namedtuple": _Unflattener._namedtuple,
    "enum": _Unflattener._enum,
    "flag": _Unflattener._enum,
    "bytes": _Unflattener._bytes,
    "bytearray": _Unflattener._bytes,
    "text": _Unflattener._text,
    "int_list": _Unflattener._number_list,
    "float_list": _Unflattener._number_list,
    "array": _Unflattener._array,
    "ref": _Unflattener._ref,
    "pickle": _Unflattener._pickle,
}
