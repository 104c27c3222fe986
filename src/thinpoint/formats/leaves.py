"""Any checkpoint as nested containers whose leaves are read when they are asked for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinpoint.state.selection import Selection
from thinpoint.state.tree import MAX_NESTING, Path, display
from thinpoint.state.tree_names import match

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]
"""Part of a tensor: for each dimension a slice with start and stop, both within it."""

Range = tuple[Any, int, int]
"""Where a tensor lies: what stands for its storage, first byte, one past the last."""

CONTAINERS = (dict, OrderedDict, list, tuple)
"""What a tree consists of, besides leaves. Everything else, also a subclass of these, is a leaf."""

PIECE_BYTES = 32 << 20
"""The most of a tensor that is read at a time."""

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorLeaf:
    """A plain tensor. Two names of the same elements have the same leaf.

    Attributes:
        dtype, shape: of the whole.
        read: gives the elements of a box as a new contiguous tensor on the CPU. May be called from several threads.
        memory: where its elements lie, if others may share them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], torch.Tensor]
    memory: Range | None = None

    @property
    def num_elems(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """torch's name without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    def load(self) -> torch.Tensor:
        """The whole tensor."""
        return self.read(whole(self.shape))

    def cast(self, dtype: torch.dtype) -> TensorLeaf:
        """The tensor with its values converted, as `Tensor.to` does."""
        return replace(self, dtype=dtype, read=lambda box: self.read(box).to(dtype), memory=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ObjectLeaf:
    """Whatever is no plain tensor: numbers, text, tensors of other layouts, objects."""

    load: Callable[[], Any]


Leaf = TensorLeaf | ObjectLeaf


@dataclass(kw_only=True)
class OpenCheckpoint:
    """A checkpoint of any kind.

    Attributes:
        name: what messages call it.
        kind: "thin", "thin folder", "dcp", "pt", "safetensors" or "hf".
        tree: containers and leaves.
        num_bytes: of its files.
    """

    name: str
    kind: str
    tree: Any
    num_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; those with several names count once."""
        return sum(leaf.num_bytes for leaf in {id(leaf): leaf for leaf in self.tensors().values()}.values())

    def tensors(self) -> dict[Path, TensorLeaf]:
        """The plain tensors by path, in order."""
        return {path: leaf for path, leaf in walk(self.tree) if isinstance(leaf, TensorLeaf)}

    def selected(self, patterns: Collection[str] | None) -> OpenCheckpoint:
        """The same with only what the patterns select; None is everything. See `match`.

        Raises:
            UnknownNameError: a pattern selects nothing.
        """
        if patterns is None:
            return self
        paths = match([path for path, _ in walk(self.tree)], patterns)
        return replace(self, tree=_selected(self.tree, Selection(paths), ()))

    def cast(self, dtype: torch.dtype) -> tuple[OpenCheckpoint, list[str]]:
        """The same with floating-point tensors of 16 bits and more in another dtype; the names of what that changes."""
        names = []
        done: dict[int, TensorLeaf] = {}

        def convert(path: Path, leaf: Leaf) -> Leaf:
            if not isinstance(leaf, TensorLeaf) or not leaf.dtype.is_floating_point:
                return leaf
            if leaf.dtype.itemsize < 2 or leaf.dtype == dtype:
                return leaf
            names.append(display(path))
            return done.setdefault(id(leaf), leaf.cast(dtype))

        return replace(self, tree=rebuild(self.tree, convert)), names


def is_plain_key(key: object) -> bool:
    """Whether a key of a dict can be part of a path as it is."""
    if type(key) is tuple:
        return all(map(is_plain_key, key))
    return key is None or type(key) in (str, int, bool, float)


def is_container(value: object, depth: int) -> bool:
    """Whether a value is a container of a tree; empty ones and those nested too deeply are leaves."""
    if type(value) not in CONTAINERS or not value or depth >= MAX_NESTING:
        return False
    return not isinstance(value, dict) or all(map(is_plain_key, value))


def items(container: Any) -> list[tuple[Any, Any]]:
    """Keys and values, or positions and values."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """The leaves with their paths, in order."""
    if isinstance(tree, (TensorLeaf, ObjectLeaf)):
        yield path, tree
        return
    for key, value in items(tree):
        yield from walk(value, (*path, key))


def rebuild(tree: Any, make: Callable[[Path, Leaf], Any], path: Path = ()) -> Any:
    """Containers of the same types, with `make(path, leaf)` in place of each leaf."""
    if isinstance(tree, (TensorLeaf, ObjectLeaf)):
        return make(path, tree)
    if isinstance(tree, dict):
        return type(tree)((key, rebuild(value, make, (*path, key))) for key, value in tree.items())
    return type(tree)(rebuild(value, make, (*path, i)) for i, value in enumerate(tree))


def materialized(tree: Any, advance: Callable[[int], None] | None = None) -> Any:
    """The object itself, in memory; a tensor with several names is one object.

    Args:
        advance: called with bytes of tensors read since the call before.
    """
    done: dict[int, Any] = {}

    def load(path: Path, leaf: Leaf) -> Any:
        if id(leaf) not in done:
            done[id(leaf)] = leaf.load()
            if advance is not None and isinstance(leaf, TensorLeaf):
                advance(leaf.num_bytes)
        return done[id(leaf)]

    return rebuild(tree, load)


def unique_names(paths: Collection[Path]) -> dict[Path, str]:
    """Names for people; where two paths look the same, the later one is written as the tuple it is."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        name = display(path)
        names[path] = name if name not in taken else repr(path)
        taken.add(names[path])
    return names


def sharing(tensors: dict[Path, TensorLeaf]) -> list[Path]:
    """The tensors some of whose bytes belong to one before them too."""
    found: list[Path] = []
    ends: dict[Any, tuple[int, TensorLeaf]] = {}
    placed = [(path, leaf, leaf.memory) for path, leaf in tensors.items() if leaf.memory and leaf.num_bytes]
    order = {path: i for i, (path, _, _) in enumerate(placed)}
    for path, leaf, memory in sorted(placed, key=lambda item: (str(item[2][0]), item[2][1], order[item[0]])):
        storage, start, end = memory
        if storage in ends and start < ends[storage][0]:
            found.append(path)
        ends[storage] = (max(end, ends[storage][0] if storage in ends else 0), leaf)
    return sorted(found, key=order.__getitem__)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Boxes that hold the elements [start, end) of the row-major order, in that order; at most two a dimension and one."""
    if start >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, begin = divmod(start, row)
    last, rest = divmod(end, row)
    if begin or first == last:
        stop = min((first + 1) * row, end)
        for box in boxes(shape[1:], begin, stop - first * row):
            yield (slice(first, first + 1), *box)
        first += 1
    if first < last:
        yield (slice(first, last), *whole(shape[1:]))
    if rest and first <= last:
        for box in boxes(shape[1:], 0, rest):
            yield (slice(last, last + 1), *box)


def read_pieces(leaf: TensorLeaf) -> Iterator[torch.Tensor]:
    """All elements in row-major order, in contiguous tensors of at most about PIECE_BYTES."""
    at_once = max(1, PIECE_BYTES // leaf.dtype.itemsize)
    for start in range(0, leaf.num_elems, at_once):
        for box in boxes(leaf.shape, start, min(start + at_once, leaf.num_elems)):
            yield leaf.read(box)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, which torch can copy and index whatever the dtype was."""
    import torch

    name = _INTEGERS.get(tensor.dtype.itemsize)
    return tensor if name is None else tensor.view(getattr(torch, name))


def copied(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box of a strided CPU tensor, bit for bit, as a new contiguous tensor."""
    import torch

    part = as_integers(tensor.detach())[box]
    return part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _selected(tree: Any, selection: Selection, path: Path) -> Any:
    if isinstance(tree, (TensorLeaf, ObjectLeaf)) or selection.whole(path):
        return tree
    kept = [
        (key, value)
        for key, value in items(tree)
        if selection.whole((*path, key)) or selection.partly((*path, key))
    ]
    below = {key: _selected(value, selection, (*path, key)) for key, value in kept}
    if isinstance(tree, dict):
        return type(tree)(below)
    # Positions keep their meaning.
    nothing = ObjectLeaf(load=lambda: None)
    return type(tree)(below.get(i, nothing) for i in range(len(tree)))
