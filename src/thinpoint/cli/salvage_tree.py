"""A state without what is lost of it: which tensors and values are intact, and the tree that holds only those. Torch-free.

Tensors and storages keep their numbers, which the pickles of a state name too: what is lost leaves an empty record behind that
nothing refers to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from thinpoint.cli.salvage_losses import BadBytes, Losses, byte_range, data_of
from thinpoint.errors import ThinpointError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import Index, PartEntry, StorageEntry, TensorEntry, tensor_record
from thinpoint.formats.source import META_KEY
from thinpoint.state.record_fields import TENSOR_TAGS, trees_of
from thinpoint.state.tree import CONTAINERS, NUMBERED, Node, Parsed, parse, traverse
from thinpoint.state.tree_names import checked_tensor_id, display, walk

_DROPPED = object()
"""Stands for a node that is lost, where a node may be."""

_IN_PLACE = frozenset({"list", "tuple", "slice"})


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor, or another value with bytes of its own or a pickle, and what became of it.

    Attributes:
        name: the keys joined by dots.
        kind: the dtype of a tensor; else the tag of the value in the tree.
        shape: of a tensor, else None.
        num_bytes: of its elements, before coding; 0 if they are spelled out in the tree.
        reason: why it is lost; None if it is saved.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    num_bytes: int
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is intact of a file.

    Attributes:
        index: storages, tensors, tree and meta of the new file; its parts are those to copy, as the old file has them.
        rows: every tensor and every value with bytes of its own, in the order of the state.
        storage_numbers: of the old file to the new one, where they differ.
    """

    index: Index
    rows: list[Row]
    storage_numbers: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there were tensors or values with bytes of their own, and all are lost."""
        return bool(self.rows) and all(row.reason is not None for row in self.rows)


def intact_rest(index: Index, bad: dict[int, ThinpointError]) -> Rest:
    """What is intact of a file.

    Args:
        index: of the damaged file.
        bad: what is wrong, by part.

    Raises:
        MalformedFileError: the tree or a tensor's record breaks the rules.
    """
    losses = Losses(index, BadBytes(index, bad))
    rows = list(_rows(index, losses))
    tree = _Pruner(losses).node(index.tree)
    num_lost = sum(row.reason is not None for row in rows)
    meta = index.meta
    if num_lost:
        # The note about the original file no longer fits: what is left cannot be made that file again.
        meta = {key: value for key, value in meta.items() if key != META_KEY}
        meta["salvaged"] = {"lost": num_lost}
    tensors = [
        _without_bytes(tensor) if losses.of_tensor(i) else tensor for i, tensor in enumerate(index.tensors)
    ]
    wanted = _wanted_bytes(index, losses)
    storages = [
        # Of what nothing needs any more no byte is left: it would only ask for memory.
        storage if i in wanted else StorageEntry(bytes=0, device=storage.device)
        for i, storage in enumerate(index.storages)
    ]
    kept = [
        part
        for i, part in enumerate(index.parts)
        if i not in bad and part.storage in wanted and _overlaps(wanted[part.storage], part)
    ]
    rest = replace(
        index,
        meta=meta,
        storages=tuple(storages),
        parts=tuple(kept),
        tensors=tuple(tensors),
        tree=None if tree is _DROPPED else tree,
    )
    return Rest(index=rest, rows=rows)


def _without_bytes(tensor: TensorEntry) -> TensorEntry:
    return TensorEntry(storage=None, dtype=tensor.dtype, shape=(0,), stride=(1,), offset=0)


def _rows(index: Index, losses: Losses) -> Iterator[Row]:
    for path, node in walk(index.tree):
        parsed = parse(node, path)
        if parsed.tag in TENSOR_TAGS:
            tensor = index.tensors[checked_tensor_id(parsed.body, len(index.tensors), path)]
            num_bytes = math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 1)
            shape: tuple[int, ...] | None = tensor.shape
            kind = tensor.dtype
        else:
            data = data_of(parsed)
            has_storage = type(data) is int and 0 <= data < len(index.storages)
            if not has_storage and parsed.tag != "pickle":
                continue
            # A pickle that is spelled out can be lost with its tensors.
            num_bytes = index.storages[data].bytes if has_storage else 0
            shape, kind = None, parsed.tag
        yield Row(
            name=display(path) or "(the state)",
            kind=kind,
            shape=shape,
            num_bytes=num_bytes,
            reason=losses.of_leaf(parsed),
        )


def _wanted_bytes(index: Index, losses: Losses) -> dict[int, tuple[list[int], list[int]]]:
    """For each storage that something intact needs, the starts and ends of the bytes that it needs."""
    wanted: dict[int, list[tuple[int, int]]] = {}
    trees = [index.tree]
    for i, tensor in enumerate(index.tensors):
        if losses.of_tensor(i) is None:
            if tensor.storage is not None:
                wanted.setdefault(tensor.storage, []).append(byte_range(tensor, index.storages))
            trees += trees_of(tensor_record(tensor))
    for tree in trees:
        for _, _, parsed, _ in traverse(tree):
            data = data_of(parsed)
            if type(data) is int and 0 <= data < len(index.storages) and losses.of_leaf(parsed) is None:
                wanted.setdefault(data, []).append((0, index.storages[data].bytes))
    return {storage: _merged(ranges) for storage, ranges in wanted.items()}


def _merged(ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and ends of the union of half-open ranges, both ascending."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


def _overlaps(ranges: tuple[list[int], list[int]], part: PartEntry) -> bool:
    starts, ends = ranges
    place = bisect_right(ends, part.start)
    return place < len(ends) and starts[place] < part.end


class _Pruner:
    """Makes a tree without what is lost; what is left keeps its place and its references.

    Mappings and sets lose the entry; everything else gets None in its place.
    """

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._num_read = 0
        self._num_made = 0
        # By number in the old tree: the number in the new one. What was dropped has none.
        self._numbers: dict[int, int] = {}

    def node(self, node: Node) -> Any:
        """The node without what is lost in it, or _DROPPED."""
        parsed = parse(node, ())
        if parsed.tag == "ref":
            number = self._numbers.get(parsed.body) if type(parsed.body) is int else None
            return _DROPPED if number is None else {"ref": number}
        if parsed.tag in CONTAINERS:
            self._count(is_kept=True)
            return self._container(parsed)
        is_kept = self._losses.of_leaf(parsed) is None
        if parsed.tag in NUMBERED:
            self._count(is_kept=is_kept)
        return node if is_kept else _DROPPED

    def _count(self, *, is_kept: bool) -> None:
        if is_kept:
            self._numbers[self._num_read] = self._num_made
            self._num_made += 1
        self._num_read += 1

    def _container(self, parsed: Parsed) -> Node:
        tag = parsed.tag
        if parsed.keys is not None:
            pairs = self._pairs(parsed)
            if tag == "dict":
                return {tag: pairs}
            if tag == "default_dict":
                return {tag: [*parsed.head, pairs]}
            attrs = [item for name, node in parsed.attrs for item in (name, self._or_none(node))]
            return {tag: [pairs, attrs]}
        if parsed.names is not None:
            values = [self._or_none(node) for node in parsed.values]
            fields = [item for pair in zip(parsed.names, values, strict=True) for item in pair]
            return {tag: [*parsed.head, fields] if parsed.head else fields}
        if tag in ("set", "frozenset"):
            kept = [self.node(node) for node in parsed.values]
            return {tag: [node for node in kept if node is not _DROPPED]}
        values = [self._or_none(node) for node in parsed.values]
        if tag == "list":
            return values
        return {tag: values if tag in _IN_PLACE else [*parsed.head, values]}

    def _or_none(self, node: Node) -> Node:
        made = self.node(node)
        return None if made is _DROPPED else made

    def _pairs(self, parsed: Parsed) -> list[Node]:
        pairs: list[Node] = []
        for key, node in zip(parsed.keys or [], parsed.values, strict=True):
            if any(self._losses.of_leaf(leaf) for _, _, leaf, _ in traverse(key) if _is_leaf(leaf)):
                self._skip(node)
                continue
            value = self.node(node)
            if value is not _DROPPED:
                pairs += [key, value]
        return pairs

    def _skip(self, node: Node) -> None:
        """Leave out a node with all that is in it."""
        for _, _, parsed, in_key in traverse(node):
            if parsed.tag in NUMBERED and not in_key:
                self._count(is_kept=False)


def _is_leaf(parsed: Parsed) -> bool:
    return parsed.tag not in CONTAINERS and parsed.tag != "ref"
