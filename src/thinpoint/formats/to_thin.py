"""A tree of leaves as a state to encode, whose tensors are read only when their turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from thinpoint.engine.views import host_bytes
from thinpoint.formats.leaves import CONTAINERS, Leaf, TensorLeaf, boxes, items, rebuild, walk
from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import FlatState, StorageSource
from thinpoint.state.roles import is_optimizer_state, role_of
from thinpoint.state.storages import cut_regions, strided_view
from thinpoint.state.tree import Path
from thinpoint.state.tree_names import tensor_names


def flat_state(tree: Any, *, allow_pickle: bool = False) -> FlatState:
    """The state of a tree; objects are loaded, tensors are not. A tensor with several names is stored once.

    Every tensor is a contiguous one on the CPU, in a storage of its own.

    Raises:
        UnsafeObjectError: an object is pickled, and the checkpoint was opened without `allow_pickle`.
        UnsupportedObjectError: an object cannot be stored; without pickle, or at all.
    """
    import torch

    stand_ins: dict[int, torch.Tensor] = {}

    def make(path: Path, leaf: Leaf) -> Any:
        if not isinstance(leaf, TensorLeaf):
            return leaf.load()
        if id(leaf) not in stand_ins:
            stand_ins[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return stand_ins[id(leaf)]

    state = flatten(rebuild(tree, make), allow_pickle=allow_pickle)
    ids = tensor_names(state.tree, len(state.tensors))
    optimizers = set(_optimizers(tree, ()))
    for path, leaf in walk(tree):
        record = state.tensors[ids[path]] if isinstance(leaf, TensorLeaf) else None
        if isinstance(leaf, TensorLeaf) and record is not None and record["storage"] is None:
            in_optimizer = any(path[:n] in optimizers for n in range(len(path)))
            record["role"] = role_of(path, leaf.dtype_name, in_optimizer=in_optimizer)
            record["storage"] = len(state.storages)
            state.storages.append(_storage(leaf, record, path))
    return state


def _optimizers(tree: Any, path: Path) -> Iterator[Path]:
    """The paths of dicts that are the state of an optimizer."""
    if isinstance(tree, dict) and is_optimizer_state(tree):
        yield path
    for key, value in items(tree) if isinstance(tree, CONTAINERS) else ():
        yield from _optimizers(value, (*path, key))


def _storage(leaf: TensorLeaf, record: dict[str, Any], path: Path) -> StorageSource:
    view = strided_view(
        shape=leaf.shape,
        stride=tuple(record["stride"]),
        offset=0,
        dtype=leaf.dtype_name,
        item_bytes=leaf.dtype.itemsize,
        role=record["role"],
        name=path,
    )
    return StorageSource(
        num_bytes=leaf.num_bytes, device="cpu", regions=cut_regions([view], 0), read=_Reader(leaf)
    )


class _Reader:
    """Reads ranges of bytes of a tensor's row-major elements."""

    def __init__(self, leaf: TensorLeaf) -> None:
        self._leaf = leaf

    def __call__(self, start: int, end: int) -> np.ndarray:
        item = self._leaf.dtype.itemsize
        first, last = start // item, -(-end // item)
        out = np.empty((last - first) * item, np.uint8)
        position = 0
        for box in boxes(self._leaf.shape, first, last):
            data = host_bytes(self._leaf.read(box))
            out[position : position + data.size] = data
            position += data.size
        return out[start - first * item : end - first * item]
