"""A file of `torch.save`, and any object in memory, as a tree of leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from thinpoint.errors import LimitExceededError, UnsafeObjectError
from thinpoint.formats.leaves import (
    Box,
    Leaf,
    ObjectLeaf,
    OpenCheckpoint,
    TensorLeaf,
    copied,
    is_container,
    items,
    walk,
)
from thinpoint.formats.torch_file import read_torch
from thinpoint.state.tree import Path

MAX_NODES = 1 << 21
"""Values of an object; containers that it holds several times count each time, so that a few bytes cannot ask for 2^100."""


def open_torch(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> OpenCheckpoint:
    """What a file of `torch.save` holds; its tensors are mapped if it is a zip archive, else in memory.

    Raises: as `read_torch`.
    """
    found = read_torch(path, allow_pickle=allow_pickle)
    return OpenCheckpoint(
        name=os.fspath(path), kind="pt", tree=tree_of(found.obj), num_bytes=os.stat(path).st_size
    )


def tree_of(obj: Any) -> Any:
    """The tree of an object in memory; its leaves are views of it."""
    return _TreeMaker().node(obj, 0)


def expanded(tree: Any, *, skips_unsafe: bool = False) -> Iterator[tuple[Path, Leaf]]:
    """The leaves with their paths; containers that one format keeps in one piece are taken apart as another does.

    Args:
        skips_unsafe: leave what would have to run code to be loaded as it is.

    Raises:
        UnsafeObjectError: an object is such, and `skips_unsafe` is False.
    """
    for path, leaf in walk(tree):
        if isinstance(leaf, TensorLeaf):
            yield path, leaf
            continue
        try:
            below = tree_of(leaf.load())
        except UnsafeObjectError:
            if not skips_unsafe:
                raise
            yield path, leaf
        else:
            yield from walk(below, path)


class _TreeMaker:
    def __init__(self) -> None:
        self._leaves: dict[tuple[Any, ...], TensorLeaf] = {}
        self._open: set[int] = set()
        self._count = 0

    def node(self, obj: Any, depth: int) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise LimitExceededError("the object holds too many values", expected=f"at most {MAX_NODES:,}")
        if not is_container(obj, depth) or id(obj) in self._open:
            return self._leaf(obj)
        self._open.add(id(obj))
        children = [(key, self.node(value, depth + 1)) for key, value in items(obj)]
        self._open.discard(id(obj))
        if isinstance(obj, dict):
            return type(obj)(children)
        return type(obj)(child for _, child in children)

    def _leaf(self, obj: Any) -> Leaf:
        if not is_plain_tensor(obj):
            return ObjectLeaf(load=_Given(obj))
        start = obj.storage_offset() * obj.element_size()
        steps = zip(obj.shape, obj.stride(), strict=True)
        extent = 0 if 0 in obj.shape else 1 + sum((size - 1) * step for size, step in steps)
        storage = obj.untyped_storage()._cdata
        key = (storage, start, tuple(obj.shape), obj.stride(), obj.dtype)
        if key not in self._leaves:
            self._leaves[key] = TensorLeaf(
                dtype=obj.dtype,
                shape=tuple(obj.shape),
                read=_Part(obj),
                memory=(storage, start, start + extent * obj.element_size()),
            )
        return self._leaves[key]


def is_plain_tensor(obj: Any) -> bool:
    """Whether this is a tensor of strided elements in host memory and nothing more; a parameter is one."""
    import torch

    return (
        type(obj) in (torch.Tensor, torch.nn.Parameter)
        and obj.layout is torch.strided
        and obj.device.type == "cpu"
        and not (obj.is_quantized or obj.is_nested or obj.is_conj() or obj.is_neg())
    )


class _Part:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __call__(self, box: Box) -> Any:
        return copied(self._tensor, box)


class _Given:
    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __call__(self) -> Any:
        return self._obj
