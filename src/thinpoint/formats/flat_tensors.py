"""Any state that holds nothing but tensors, written as a `.safetensors` file with flat names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thinpoint.engine.restore import Restorer
from thinpoint.engine.views import StridedView, host_bytes, read_view
from thinpoint.engine.workers import Workers
from thinpoint.errors import MalformedFileError, UnsupportedObjectError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import TensorEntry
from thinpoint.formats.pieces import Range, write_ranges
from thinpoint.formats.safetensors_file import contiguous_stride
from thinpoint.formats.safetensors_header import METADATA_KEY, NAMES, make_header
from thinpoint.formats.torch_file import import_torch
from thinpoint.state.tree import Node, Path, display, key_of, parse
from thinpoint.state.tree_names import checked_tensor_id

_DICTS = frozenset({"dict", "ordered_dict"})
_NOT_PLAIN = ("layout", "subclass", "quantizer", "conj", "neg", "attrs")
_MAX_DEPTH = 160
_MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class _Flat:
    name: str
    entry: TensorEntry

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry.shape) * ITEM_BYTES[self.entry.dtype]

    @property
    def range(self) -> Range:
        """The bytes of its storage between its first and last element."""
        item = ITEM_BYTES[self.entry.dtype]
        steps = zip(self.entry.shape, self.entry.stride, strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps) if self.num_bytes else 0
        storage = self.entry.storage if self.entry.storage is not None else -1
        return storage, self.entry.offset * item, (self.entry.offset + extent) * item

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_stride(self.entry.shape)
        return all(
            size == 1 or step == want
            for size, step, want in zip(self.entry.shape, self.entry.stride, expected, strict=True)
        )


def write_flat_tensors(restorer: Restorer, workers: Workers, sink: Any) -> None:
    """Write the tensors of an open file as a `.safetensors` file; names are the keys joined by dots.

    Tensors come in order of falling element size, then of names, as the safetensors library writes them.
    Strides, devices and `requires_grad` are not kept, since the format has none. Memory is bounded by a few
    pieces, and by the largest tensor that is not contiguous.

    Raises:
        UnsupportedObjectError: the state holds what the format cannot: each is listed in the message.
        DamagedFileError, StorageError: the file cannot be read, or the sink refused.
    """
    tensors = _flat_tensors(restorer)
    tensors.sort(key=lambda t: (-ITEM_BYTES[t.entry.dtype], t.name))
    sink.write(make_header([(t.name, t.entry.dtype, t.entry.shape, t.num_bytes) for t in tensors]))
    run: list[Range] = []
    for tensor in tensors:
        if tensor.is_contiguous:
            if tensor.num_bytes:
                run.append(tensor.range)
        else:
            write_ranges(restorer, workers, run, sink)
            run = []
            sink.write(_gathered(restorer, tensor.entry))
    write_ranges(restorer, workers, run, sink)


def _gathered(restorer: Restorer, entry: TensorEntry) -> Any:
    """The elements in row-major order, as flat uint8."""
    torch = import_torch()
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None or entry.storage is None:
        raise UnsupportedObjectError(
            f"this version of torch has no dtype {entry.dtype}", where=restorer.reader.name
        )
    out = torch.empty(entry.shape, dtype=dtype)
    view = StridedView(
        storage=entry.storage, dtype=dtype, shape=entry.shape, stride=entry.stride, offset=entry.offset
    )
    read_view(restorer, view, out)
    return host_bytes(out)


def _flat_tensors(restorer: Restorer) -> list[_Flat]:
    index = restorer.reader.index
    problems: list[str] = []
    found: dict[str, _Flat] = {}
    for path, node in _leaves(index.tree, (), 0):
        name = display(path)
        tag, body = next(iter(node.items())) if isinstance(node, dict) else ("value", node)
        if tag != "tensor" or not path:
            problems.append(f"{name} is no tensor" if path else "the state is no dict of tensors")
            continue
        entry = index.tensors[checked_tensor_id(body, len(index.tensors), path)]
        special = [key for key in _NOT_PLAIN if key in entry.extra]
        if name in found or name == METADATA_KEY:
            problems.append(f"{name} is a name that cannot be used twice or at all")
        elif special or entry.storage is None or entry.dtype not in NAMES:
            what = special[0] if special else "no data" if entry.storage is None else f"dtype {entry.dtype}"
            problems.append(f"{name} has {what}, which the format cannot hold")
        elif entry.dtype == "float4_e2m1fn_x2" and not entry.shape:
            problems.append(f"{name} is a 0-dim tensor of float4_e2m1fn_x2")
        else:
            found[name] = _Flat(name=name, entry=entry)
    problems += _shared(list(found.values()))
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise UnsupportedObjectError(
            f"the state does not fit into a .safetensors file: {'; '.join(problems[:_MAX_LISTED])}{more}",
            where=restorer.reader.name,
            hint="Use --to pt",
        )
    return list(found.values())


def _leaves(node: Node, path: Path, depth: int) -> Iterator[tuple[Path, Node]]:
    """What nested dicts end in, without the attributes of an OrderedDict (a module's `_metadata`)."""
    parsed = parse(node, path)
    if parsed.tag not in _DICTS or (depth and not parsed.values):
        yield path, node
        return
    if depth >= _MAX_DEPTH:
        raise MalformedFileError("the state in the file is nested too deeply")
    for key, value in zip(parsed.keys or (), parsed.values, strict=True):
        yield from _leaves(value, (*path, key_of(key, path)), depth + 1)


def _shared(tensors: list[_Flat]) -> list[str]:
    """A line for each tensor that overlaps one before it in its storage."""
    lines = []
    last: _Flat | None = None
    for tensor in sorted((t for t in tensors if t.num_bytes), key=lambda t: t.range):
        if last is not None and tensor.range[0] == last.range[0] and tensor.range[1] < last.range[2]:
            lines.append(f"{tensor.name} shares memory with {last.name}")
        if last is None or tensor.range[0] != last.range[0] or tensor.range[2] > last.range[2]:
            last = tensor
    return lines
