"""Tensor records back to tensor objects, each made once, with what they are made of and their attributes."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.classes import checked_reference, resolve
from thinpoint.state.needed import ByteRanges, Needed
from thinpoint.state.record_fields import inner_ids
from thinpoint.state.tree import MAX_TENSOR_NESTING, Node, Path, display, malformed
from thinpoint.state.tree_names import checked_tensor_id

FetchStorage = Callable[[int, ByteRanges], Any]
"""Storage id and needed byte ranges to a `torch.UntypedStorage`; other bytes may be anything."""

TreeOf = Callable[[Node, Path], Any]
"""The object of a tree with its own numbering."""

_UNDER_WAY = object()


class TensorReader:
    """Makes the tensors of a file.

    Args:
        records: the tensor records, untrusted.
        needed: what may be asked for.
        fetch_storage: called at most once for each storage.
        tree_of: builds attributes, objects and contexts.
        weights_only: make only subclasses of modules that are imported already.
    """

    def __init__(
        self,
        records: list[dict[str, Any]],
        needed: Needed,
        fetch_storage: FetchStorage,
        tree_of: TreeOf,
        weights_only: bool,
    ) -> None:
        self._records = records
        self._needed = needed
        self._fetch_storage = fetch_storage
        self._tree_of = tree_of
        self._weights_only = weights_only
        self._tensors: dict[int, Any] = {}
        self._storages: dict[int, Any] = {}
        self._nesting = 0
        self._attrs: collections.deque[tuple[Any, Node, Path]] = collections.deque()

    def object(self, tag: str, body: Any, path: Path) -> Any:
        """The tensor, or its bare storage, that a tag of `TENSOR_TAGS` and a tensor id stand for.

        Raises:
            MalformedFileError: no such tensor, or its record is not valid.
            UnsafeObjectError, UnsupportedObjectError: its class may not or cannot be used here.
        """
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

    def finish_attrs(self) -> None:
        """Set the attributes of all tensors made so far; last, because they may refer to the tensors."""
        while self._attrs:
            tensor, node, path = self._attrs.popleft()
            # Straight into the dict: setting an attribute of a tensor by name could run its setter.
            tensor.__dict__.update(self._named(node, path, "the attributes of a tensor"))

    def _tensor(self, tensor_id: int, path: Path) -> Any:
        if tensor_id in self._tensors:
            tensor = self._tensors[tensor_id]
            if tensor is _UNDER_WAY:
                malformed(path, "a tensor that is part of itself")
            return tensor
        if self._nesting >= MAX_TENSOR_NESTING:
            malformed(path, f"a tensor inside more than {MAX_TENSOR_NESTING} others")
        if tensor_id not in self._needed.tensor_ids:
            malformed(path, f"tensor {tensor_id}, which the pickle that needs it does not list")
        self._tensors[tensor_id] = _UNDER_WAY
        self._nesting += 1
        tensor = self._build(self._records[tensor_id], path)
        self._nesting -= 1
        self._tensors[tensor_id] = tensor
        record = self._records[tensor_id]
        if "attrs" in record:
            if "subclass" in record or record.get("layout") == "jagged":
                malformed(path, "attributes of a tensor subclass")
            self._attrs.append((tensor, record["attrs"], path))
        return tensor

    def _build(self, record: dict[str, Any], path: Path) -> Any:
        from thinpoint.state import tensor_rebuild

        inner = {
            name: self._tensor(tensor_id, (*path, name))
            for name, tensor_id in inner_ids(record, len(self._records), path).items()
        }
        # What is fetched and built of trees fails with errors of its own, which say nothing about this record.
        made: Any = self._subclass(record["subclass"], inner, path) if "subclass" in record else None
        storage = self._storage(record.get("storage"))
        try:
            if "subclass" not in record:
                made = (
                    tensor_rebuild.build_layout(record, inner, path)
                    if "layout" in record
                    else tensor_rebuild.build_strided(record, storage, inner, path)
                )
            return tensor_rebuild.finish(made, record, path)
        except tensor_rebuild.BUILD_ERRORS as error:
            tensor_rebuild.bad_record(path, f"{type(error).__name__}: {str(error)[:300]}")

    def _storage(self, storage_id: int | None) -> Any:
        if storage_id is None:
            return None
        if storage_id not in self._storages:
            ranges = self._needed.ranges.get(storage_id, [])
            self._storages[storage_id] = self._fetch_storage(storage_id, ranges)
        return self._storages[storage_id]

    def _subclass(self, body: Any, inner: dict[str, Any], path: Path) -> Any:
        from thinpoint.state.tensor_rebuild import checked_sizes

        if not isinstance(body, dict) or "class" not in body or "context" not in body:
            malformed(path, "a tensor subclass has a class and a context")
        if "objects" in body:
            objects = self._named(body["objects"], path, "the objects of a tensor subclass")
            if not inner.keys().isdisjoint(objects):
                malformed(path, "an inner tensor and an object of one name")
            inner = {**inner, **objects}
        context = self._tree_of(body["context"], (*path, "context"))
        module, qualname = checked_reference(body["class"], path)
        cls: Any = resolve(module, qualname, "tensor subclass", weights_only=self._weights_only, path=path)
        size, stride = checked_sizes(body, "outer_size", path), checked_sizes(body, "outer_stride", path)
        torch = sys.modules["torch"]
        try:
            return cls.__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))
        except Exception as error:
            raise UnsupportedObjectError(
                f"{display(path)}: {module}.{qualname}.__tensor_unflatten__ failed: {error}"
            ) from error

    def _named(self, tree: Node, path: Path, what: str) -> dict[str, Any]:
        found = self._tree_of(tree, path)
        if type(found) is not dict or not all(type(name) is str for name in found):
            malformed(path, f"{what} are no dict of names")
        return found
