"""A state from the labels of its parts alone, for a file whose index is lost: nested dicts of plain tensors. Torch-free."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, TypeGuard

from thinpoint.cli.salvage_tree import Rest, Row
from thinpoint.errors import ThinpointError
from thinpoint.file import limits
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import Index, PartEntry, StorageEntry, TensorEntry
from thinpoint.file.scan import FoundPart
from thinpoint.state.tree import MAX_NESTING, Node, display

_QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
_NO_TENSOR = "bytes"
_LAZY = ("conj", "neg")
"""Operations that torch puts off; they change what the stored elements mean."""


def rest_by_labels(found: tuple[FoundPart, ...], bad: dict[int, ThinpointError]) -> Rest:
    """The tensors of which every part is there and intact, by the names in their labels.

    Args:
        found: the parts, in file order.
        bad: what is wrong, by place in `found`.

    """
    numbers = {storage: i for i, storage in enumerate(dict.fromkeys(part.entry.storage for part in found))}
    sizes = [0] * len(numbers)
    rows: list[Row] = []
    parts: list[PartEntry] = []
    tensors: list[TensorEntry] = []
    names = _Names()
    for places in _by_tensor(found):
        entries = [found[place].entry for place in places]
        label = found[places[0]].label
        name = label.get("name")
        keys: list[str | int] = name if _is_name(name) else [f"part {found[places[0]].part_index}"]
        errors = [bad[place] for place in places if place in bad]
        tensor, reason = _tensor(label, entries)
        if errors:
            reason = f"{errors[0].what}, at byte {errors[0].offset or 0:,}"
        elif reason is None and not names.add(keys, len(tensors)):
            reason = "another tensor has the same name"
        rows.append(
            Row(
                name=display(tuple(keys)) or "(the state)",
                kind=str(label.get("dtype", "unknown")),
                shape=None if tensor is None else tensor.shape,
                num_bytes=sum(entry.raw_bytes for entry in entries),
                reason=reason,
            )
        )
        if reason is None and tensor is not None:
            number = numbers[entries[0].storage]
            tensors.append(replace(tensor, storage=number))
            parts += entries
            sizes[number] = max(sizes[number], entries[-1].end)
    index = Index(
        writer={},
        required=(),
        optional=(),
        meta={"salvaged": {"lost": sum(row.reason is not None for row in rows), "index": "lost"}},
        storages=tuple(StorageEntry(bytes=size, device="cpu") for size in sizes),
        parts=tuple(sorted(parts, key=lambda entry: entry.offset)),
        tensors=tuple(tensors),
        tree=names.tree(),
    )
    return Rest(index=index, rows=rows, storage_numbers=numbers)


def _by_tensor(found: tuple[FoundPart, ...]) -> list[list[int]]:
    """Places of the parts that lie in one storage and bear the same label, which names a tensor."""
    places: dict[tuple[int, str], list[int]] = {}
    for place, part in enumerate(found):
        places.setdefault((part.entry.storage, json.dumps(part.label, sort_keys=True)), []).append(place)
    return list(places.values())


def _tensor(label: dict[str, Any], entries: list[PartEntry]) -> tuple[TensorEntry | None, str | None]:
    """The tensor that a label describes, if the parts hold exactly its bytes; else why there is none."""
    dtype, shape = label.get("dtype"), label.get("shape")
    if dtype == _NO_TENSOR:
        return None, "no tensor: what it was stood in the index"
    if dtype in _QUANTIZED:
        return None, "quantised: its scale stood in the index"
    if not _is_name(label.get("name")) or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return None, "its label does not say what it is"
    if not _are_sizes(shape) or 0 in shape:
        return None, "its label does not say what it is"
    stride = label.get("stride", _contiguous(shape))
    if not _are_sizes(stride) or len(shape) != len(stride):
        return None, "its label does not say what it is"
    item = ITEM_BYTES[dtype]
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    tensor = TensorEntry(
        storage=0,
        dtype=dtype,
        shape=tuple(shape),
        stride=tuple(stride),
        offset=entries[0].start // item,
        extra={
            **({"role": entries[0].role} if entries[0].role else {}),
            **{flag: True for flag in _LAZY if label.get(flag) is True},
        },
    )
    num_bytes = sum(entry.raw_bytes for entry in entries)
    if num_bytes < extent * item:
        return tensor, f"only {num_bytes:,} of its {extent * item:,} bytes are left"
    is_whole = num_bytes == extent * item == entries[-1].end - entries[0].start
    if not is_whole or entries[0].start % item:
        return tensor, "it shares its memory with others; where it lay in it stood in the index"
    return tensor, None


def _contiguous(shape: list[int]) -> list[int]:
    """The strides of the row-major order, which a label leaves out."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= limits.MAX_DIMS
        and all(type(n) is int and 0 <= n <= limits.MAX_INT64 for n in value)
    )


def _is_name(value: Any) -> TypeGuard[list[str | int]]:
    return isinstance(value, list) and all(type(key) in (str, int) for key in value)


class _Names:
    """The nested dicts that names lead through."""

    def __init__(self) -> None:
        self._root: Any = {}

    def add(self, keys: list[str | int], tensor_id: int) -> bool:
        """Put a tensor at a name; False if something is there already."""
        keys = keys if len(keys) < MAX_NESTING else [display(tuple(keys))]
        if not keys:
            # The state itself was the tensor.
            if self._root != {}:
                return False
            self._root = tensor_id
            return True
        if not isinstance(self._root, dict):
            return False
        place = self._root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                return False
        if keys[-1] in place:
            return False
        place[keys[-1]] = tensor_id
        return True

    def tree(self) -> Node:
        """The tree of the state."""
        return _tree(self._root)


def _tree(node: Any) -> Node:
    if not isinstance(node, dict):
        return {"tensor": node}
    pairs: list[Node] = []
    for key, below in node.items():
        pairs += [json.dumps(key) if type(key) is int and abs(key) > 1 << 53 else key, _tree(below)]
    return {"dict": pairs}
