"""What damaged parts cost: the tensors and pickles that are lost with them, and why. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any

from thinpoint.errors import ThinpointError
from thinpoint.file.dtypes import ITEM_BYTES, ITEMS_PER_BYTE
from thinpoint.file.index import Index, PartEntry, StorageEntry, TensorEntry, tensor_record
from thinpoint.state.byte_reader import BYTE_TAGS
from thinpoint.state.pickle_reader import checked_pickle
from thinpoint.state.record_fields import TENSOR_TAGS, inner_ids, trees_of
from thinpoint.state.tree import Node, Parsed, traverse
from thinpoint.state.tree_names import checked_tensor_id


def byte_range(tensor: TensorEntry, storages: tuple[StorageEntry, ...]) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first element to its last, half-open; equal if it has none."""
    if tensor.storage is None or 0 in tensor.shape:
        return 0, 0
    if tensor.dtype in ITEMS_PER_BYTE:
        # Rows may be padded.
        return 0, storages[tensor.storage].bytes
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    item = ITEM_BYTES[tensor.dtype]
    return tensor.offset * item, (tensor.offset + extent) * item


class BadBytes:
    """The bytes of each storage that are lost, and why."""

    def __init__(self, index: Index, bad: dict[int, ThinpointError]) -> None:
        self._storages = index.storages
        self._parts: dict[int, list[tuple[PartEntry, ThinpointError]]] = {}
        for i in sorted(bad):
            part = index.parts[i]
            self._parts.setdefault(part.storage, []).append((part, bad[i]))
        self._ends = {storage: [part.end for part, _ in parts] for storage, parts in self._parts.items()}

    def of_range(self, storage: int, start: int, end: int) -> str | None:
        """Why one of these bytes is lost; None if all are intact."""
        if storage not in self._parts or start >= end:
            return None
        place = bisect_right(self._ends[storage], start)
        if place == len(self._ends[storage]) or self._parts[storage][place][0].start >= end:
            return None
        return _reason(self._parts[storage][place][1])

    def of_tensor(self, tensor: TensorEntry) -> str | None:
        """Why one of a tensor's own bytes is lost."""
        if tensor.storage is None:
            return None
        return self.of_range(tensor.storage, *byte_range(tensor, self._storages))

    def of_data(self, data: Any) -> str | None:
        """Why the bytes that a DATA of the tree stands for are lost."""
        if type(data) is not int or not 0 <= data < len(self._storages):
            return None
        return self.of_range(data, 0, self._storages[data].bytes)


def _reason(error: ThinpointError) -> str:
    return error.what if error.offset is None else f"{error.what}, at byte {error.offset:,}"


def data_of(parsed: Parsed) -> Any:
    """The DATA of a node that has one, else None."""
    body = parsed.body
    if parsed.tag == "array":
        return body[3] if isinstance(body, list) and len(body) == 4 else None
    if parsed.tag == "pickle":
        return body.get("data") if isinstance(body, dict) else None
    return body if parsed.tag in BYTE_TAGS else None


_NEEDS = "it needs what is lost: "

Item = tuple[str, int]
"""("tensor", id) or ("pickle", number)."""


class Losses:
    """What is lost: tensors and pickles with lost bytes, and whatever is made with the help of a lost one.

    A tensor needs those inside it and all that its attributes hold; a pickle needs its tensors and the pickles before it,
    and is lost with the tensor whose attribute it is.
    """

    def __init__(self, index: Index, bad: BadBytes) -> None:
        self.bad = bad
        self._num_tensors = len(index.tensors)
        self._reasons: dict[Item, str] = {}
        self._dependents: dict[Item, list[Item]] = {}
        self._pickles: set[int] = set()
        for i, tensor in enumerate(index.tensors):
            item = ("tensor", i)
            self._lose(item, bad.of_tensor(tensor))
            record = tensor_record(tensor)
            for inner in inner_ids(record, self._num_tensors, ()).values():
                self._needs(item, ("tensor", inner))
            for tree in trees_of(record):
                self._read(tree, item)
        self._read(index.tree, None)
        for before, after in pairwise(sorted(self._pickles)):
            self._needs(("pickle", after), ("pickle", before))
        self._spread()

    def of_tensor(self, tensor_id: int) -> str | None:
        """Why a tensor is lost, or None."""
        return self._reasons.get(("tensor", tensor_id))

    def of_leaf(self, parsed: Parsed) -> str | None:
        """Why a node that is no container is lost, or None."""
        if parsed.tag in TENSOR_TAGS:
            return self.of_tensor(checked_tensor_id(parsed.body, self._num_tensors, ()))
        if parsed.tag == "pickle":
            return self._reasons.get(("pickle", parsed.body["index"]))
        return self.bad.of_data(data_of(parsed))

    def _read(self, tree: Node, owner: Item | None) -> None:
        """Note what the leaves of a tree need, and what the tensor needs whose tree it is."""
        for path, _, parsed, _ in traverse(tree):
            if parsed.tag in TENSOR_TAGS:
                tensor_id = checked_tensor_id(parsed.body, self._num_tensors, path)
                if owner is not None:
                    self._needs(owner, ("tensor", tensor_id))
            elif parsed.tag == "pickle":
                self._read_pickle(checked_pickle(parsed.body, path), owner)
            elif owner is not None:
                self._lose(owner, self.bad.of_data(data_of(parsed)))

    def _read_pickle(self, body: dict[str, Any], owner: Item | None) -> None:
        item = ("pickle", body["index"])
        self._pickles.add(body["index"])
        self._lose(item, self.bad.of_data(body["data"]))
        for tensor_id in body["tensors"]:
            self._needs(item, ("tensor", checked_tensor_id(tensor_id, self._num_tensors, ())))
        if owner is not None:
            self._needs(owner, item)
            self._needs(item, owner)

    def _needs(self, item: Item, other: Item) -> None:
        self._dependents.setdefault(other, []).append(item)

    def _lose(self, item: Item, reason: str | None) -> None:
        if reason is not None:
            self._reasons.setdefault(item, reason)

    def _spread(self) -> None:
        waiting = list(self._reasons)
        while waiting:
            item = waiting.pop()
            for dependent in self._dependents.get(item, ()):
                if dependent not in self._reasons:
                    # The first cause only: chains of tensors may be long.
                    cause = self._reasons[item].removeprefix(_NEEDS)
                    self._reasons[dependent] = f"{_NEEDS}{cause}"
                    waiting.append(dependent)
