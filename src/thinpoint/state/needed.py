"""What the selected part of a tree needs: tensors, byte ranges of storages, pickles. Trusts nothing it reads."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from thinpoint.errors import MalformedFileError
from thinpoint.state.pickle_reader import PlacedPickle, checked_pickle, placed_pickles
from thinpoint.state.record_fields import TENSOR_TAGS, inner_ids, trees_of
from thinpoint.state.selection import Selection
from thinpoint.state.tree import CONTAINERS, Node, Parsed, Path, numbered_nodes, traverse
from thinpoint.state.tree_names import checked_tensor_id

ByteRanges = list[tuple[int, int]]
"""Half-open, sorted, disjoint."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What must be read to build the selected part of a tree.

    Attributes:
        tensor_ids: of all tensors, those inside others and those of pickles included.
        ranges: for each storage of a tensor the bytes that the tensors cover.
        pickles: every pickle of the file by its number, if one is needed and pickles may be read; else empty.
    """

    tensor_ids: frozenset[int]
    ranges: dict[int, ByteRanges]
    pickles: dict[int, PlacedPickle]


def find_needed(
    root: Node,
    records: list[dict[str, Any]],
    num_storages: int,
    *,
    weights_only: bool,
    select: Collection[Path] | None,
) -> Needed:
    """What the selected part of a tree needs. Arguments as for `unflatten`.

    Raises:
        MalformedFileError: tree or records break the grammar.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise MalformedFileError("the tensor records in the file are no list of objects")
    needs = _Needs(root, records, weights_only)
    if select is None:
        needs.add_tree(root, ())
    else:
        needs.add_selected(Selection(select))
    needs.add_parts_of_tensors()
    return Needed(
        tensor_ids=frozenset(needs.tensor_ids),
        ranges=_byte_ranges(records, needs.tensor_ids, num_storages),
        pickles=needs.pickles,
    )


class _Needs:
    """The tensors and pickles found so far."""

    def __init__(self, root: Node, records: list[dict[str, Any]], weights_only: bool) -> None:
        # In the order in which they were found: storages are asked for in that order.
        self.tensor_ids: dict[int, None] = {}
        self.pickles: dict[int, PlacedPickle] = {}
        self._pending: collections.deque[int] = collections.deque()
        self._root = root
        self._records = records
        self._weights_only = weights_only

    def add_tree(self, node: Node, path: Path) -> list[int]:
        """Add all that a tree at `path` needs; the targets of its refs."""
        refs: list[int] = []
        for below, _, parsed, _ in traverse(node):
            refs += self._add_node(parsed, (*path, *below))
        return refs

    def add_selected(self, selection: Selection) -> None:
        """Add what the selected part of the root tree needs."""
        refs: list[int] = []
        for path, _, parsed, in_key in traverse(self._root):
            below = selection.partly(path)
            if in_key or selection.whole(path) or (below and parsed.tag not in CONTAINERS):
                refs += self._add_node(parsed, path)
            elif below:
                for name, node in parsed.attrs:
                    refs += self.add_tree(node, (*path, name))
        self._add_targets(refs)

    def add_parts_of_tensors(self) -> None:
        """Add what the records of the tensors found so far need, and of those found by that."""
        while self._pending:
            record = self._records[self._pending.popleft()]
            self._add_ids(inner_ids(record, len(self._records), ()).values(), ())
            for tree in trees_of(record):
                self.add_tree(tree, ())

    def _add_node(self, parsed: Parsed, path: Path) -> tuple[int, ...]:
        """Add what one node needs; the number that it names if it is a ref."""
        if parsed.tag in TENSOR_TAGS:
            self._add_ids([parsed.body], path)
        elif parsed.tag == "pickle":
            for body in self._pickles_with(checked_pickle(parsed.body, path)):
                self._add_ids(body["tensors"], path)
        elif parsed.tag == "ref" and type(parsed.body) is int:
            return (parsed.body,)
        return ()

    def _pickles_with(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The pickles to add for one: all of them the first time, since each is read after those before it."""
        if self._weights_only:
            return [body]
        if self.pickles:
            return []
        self.pickles = placed_pickles(
            [self._root, *(tree for rec in self._records for tree in trees_of(rec))]
        )
        return [placed.body for placed in self.pickles.values()]

    def _add_ids(self, ids: Iterable[Any], path: Path) -> None:
        for tensor_id in ids:
            checked_tensor_id(tensor_id, len(self._records), path)
            if tensor_id not in self.tensor_ids:
                self.tensor_ids[tensor_id] = None
                self._pending.append(tensor_id)

    def _add_targets(self, refs: list[int]) -> None:
        """Add everything below what the kept refs name, since that is loaded whole."""
        if not refs:
            return
        numbered = numbered_nodes(self._root)
        seen: set[int] = set()
        while refs:
            number = refs.pop()
            if number in seen or not 0 <= number < len(numbered):
                continue
            seen.add(number)
            path, node = numbered[number]
            refs += self.add_tree(node, path)


def _byte_ranges(
    records: list[dict[str, Any]], tensor_ids: Iterable[int], num_storages: int
) -> dict[int, ByteRanges]:
    """For each storage the bytes that the tensors cover."""
    found: dict[int, ByteRanges] = {}
    for tensor_id in tensor_ids:
        record = records[tensor_id]
        storage_id = record.get("storage")
        if storage_id is None:
            continue
        if "subclass" in record or "layout" in record:
            raise MalformedFileError(f"tensor {tensor_id} has both a storage and inner tensors")
        if type(storage_id) is not int or not 0 <= storage_id < num_storages:
            raise MalformedFileError(f"tensor {tensor_id} names no storage: {str(storage_id)[:40]}")
        from thinpoint.state.tensor_rebuild import view_range

        found.setdefault(storage_id, []).append(view_range(record, (tensor_id,)))
    return {storage_id: _merged(ranges) for storage_id, ranges in found.items()}


def _merged(ranges: ByteRanges) -> ByteRanges:
    merged: ByteRanges = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
