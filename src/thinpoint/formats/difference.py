"""How two checkpoints of any kinds differ, in bits. Holds one piece of two tensors at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.engine.views import host_bytes
from thinpoint.errors import UnsupportedObjectError
from thinpoint.file.json_text import dump_json
from thinpoint.formats.leaves import PIECE_BYTES, Leaf, OpenCheckpoint, TensorLeaf, boxes, unique_names
from thinpoint.formats.torch_source import expanded
from thinpoint.formats.value_steps import largest
from thinpoint.state.flatten import flatten

if TYPE_CHECKING:
    import torch

Advance = Callable[[int], None]
_MAX_TEXT = 60


@dataclass(kw_only=True)
class TensorDifference:
    """Two tensors of one dtype and shape whose bits differ.

    Attributes:
        name, dtype, shape: of both.
        num_values: elements.
        num_different: those of them whose bits differ.
        first: index of the first of these, in row-major order.
        num_nan: how many of them are NaN in one or both; they do not count for what follows.
        steps: the most values of the dtype that lie between two elements, one of them included: units in the last place.
            None if the dtype has no order.
        largest: the largest absolute difference of two values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_values: int
    num_different: int = 0
    first: tuple[int, ...] = ()
    num_nan: int = 0
    steps: int | None = None
    largest: float | int | None = None


@dataclass(frozen=True, kw_only=True)
class OtherDifference:
    """Two values of one name that are not tensors of one dtype and shape; as text."""

    name: str
    a: str
    b: str


@dataclass(kw_only=True)
class Difference:
    """How two checkpoints differ.

    Attributes:
        only_a, only_b: names that the other does not have.
        forms: dtype, shape or kind of a value differ; its bits were not compared.
        tensors: their bits differ.
        objects: what is no tensor, and differs.
        num_tensors, num_objects: of the names that both have.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    forms: list[OtherDifference] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    objects: list[OtherDifference] = field(default_factory=list)
    num_tensors: int = 0
    num_objects: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same names with the same bits."""
        return not (self.only_a or self.only_b or self.forms or self.tensors or self.objects)


def compare(a: OpenCheckpoint, b: OpenCheckpoint, advance: Advance) -> Difference:
    """Compares by name: keys joined by dots. Containers count by what they hold, not by their class.

    Args:
        advance: called with bytes of `a` compared since the call before.

    Raises:
        What reading either raises.
    """
    in_a, in_b = _named(a), _named(b)
    found = Difference(
        only_a=[name for name in in_a if name not in in_b], only_b=[name for name in in_b if name not in in_a]
    )
    for name in in_a:
        if name in in_b:
            _compare_leaves(found, name, in_a[name], in_b[name], advance)
    return found


def _named(checkpoint: OpenCheckpoint) -> dict[str, Leaf]:
    leaves = dict(expanded(checkpoint.tree))
    names = unique_names(leaves)
    return {names[path]: leaf for path, leaf in leaves.items()}


def _compare_leaves(found: Difference, name: str, a: Leaf, b: Leaf, advance: Advance) -> None:
    if isinstance(a, TensorLeaf) and isinstance(b, TensorLeaf):
        found.num_tensors += 1
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            found.forms.append(OtherDifference(name=name, a=_form(a), b=_form(b)))
            return
        difference = _compare_tensors(name, a, b, advance)
        if difference.num_different:
            found.tensors.append(difference)
        return
    found.num_objects += 1
    if isinstance(a, TensorLeaf) or isinstance(b, TensorLeaf):
        found.forms.append(OtherDifference(name=name, a=_form(a), b=_form(b)))
        return
    x, y = a.load(), b.load()
    if not _is_same(x, y):
        found.objects.append(OtherDifference(name=name, a=_text(x), b=_text(y)))


def _form(leaf: Leaf) -> str:
    if isinstance(leaf, TensorLeaf):
        return f"{leaf.dtype_name} {'x'.join(map(str, leaf.shape)) or 'scalar'}"
    return type(leaf.load()).__name__


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _is_same(a: Any, b: Any) -> bool:
    """Whether two objects are stored alike: type, bits of numbers, bytes of arrays and tensors."""
    try:
        return _encoding(a) == _encoding(b)
    except UnsupportedObjectError:
        return False


def _encoding(value: Any) -> tuple[bytes, list[bytes]]:
    state = flatten(value)
    data = [
        storage.read(region.start_bytes, region.end_bytes).tobytes()
        for storage in state.storages
        for region in storage.regions
    ]
    return dump_json([state.tree, state.tensors]), data


def _compare_tensors(name: str, a: TensorLeaf, b: TensorLeaf, advance: Advance) -> TensorDifference:
    found = TensorDifference(name=name, dtype=a.dtype_name, shape=a.shape, num_values=a.num_elems)
    at_once = max(1, PIECE_BYTES // a.dtype.itemsize)
    for start in range(0, a.num_elems, at_once):
        position = start
        for box in boxes(a.shape, start, min(start + at_once, a.num_elems)):
            x, y = a.read(box), b.read(box)
            _compare_pieces(found, x, y, position)
            position += x.numel()
        advance((position - start) * a.dtype.itemsize)
    return found


def _compare_pieces(found: TensorDifference, x: torch.Tensor, y: torch.Tensor, position: int) -> None:
    rows = (-1, x.dtype.itemsize)
    if np.array_equal(host_bytes(x), host_bytes(y)):
        return
    places = np.flatnonzero((host_bytes(x).reshape(rows) != host_bytes(y).reshape(rows)).any(axis=1))
    if not found.num_different:
        found.first = tuple(int(i) for i in np.unravel_index(position + int(places[0]), found.shape or (1,)))
        found.first = found.first if found.shape else ()
    found.num_different += len(places)
    num_nan, steps, difference = largest(x, y, places)
    found.num_nan += num_nan
    found.steps = _most(found.steps, steps)
    found.largest = _most(found.largest, difference)


def _most(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else max(a, b)
