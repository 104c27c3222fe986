"""A `.thin` file as a tree of leaves."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from thinpoint.engine.backends import choose_backends
from thinpoint.engine.load import load_paths
from thinpoint.engine.restore import Restorer
from thinpoint.engine.views import StridedView, read_view
from thinpoint.engine.workers import Workers
from thinpoint.errors import UnsafeObjectError, UnsupportedError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import TensorEntry
from thinpoint.file.reader import FileReader
from thinpoint.formats.leaves import Box, ObjectLeaf, OpenCheckpoint, TensorLeaf, is_plain_key
from thinpoint.state.tree import MAX_NESTING, Node, Parsed, Path, parse
from thinpoint.state.tree_names import checked_tensor_id
from thinpoint.store.contract import Source

_MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_SPECIAL = frozenset({"layout", "subclass", "quantizer", "conj", "neg"})
PICKLE_HINT = "Only if you trust the file: --allow-pickle"


def open_thin(source: Source, workers: Workers, *, allow_pickle: bool = False) -> OpenCheckpoint:
    """What a `.thin` file holds; nothing but its index is read yet.

    Args:
        source: must stay open as long as the result is used.

    Raises:
        DamagedFileError, UnsupportedError: as `thinpoint.load`.
    """
    builder = _Builder(FileReader(source), workers, allow_pickle)
    return OpenCheckpoint(
        name=source.name, kind="thin", tree=builder.node(builder.reader.index.tree, ()), num_bytes=source.size
    )


class _Builder:
    def __init__(self, reader: FileReader, workers: Workers, allow_pickle: bool) -> None:
        self.reader = reader
        self._restorer = Restorer(reader, choose_backends().host, workers)
        self._objects = _Objects(self._restorer, allow_pickle)
        self._leaves: dict[tuple[Any, ...], TensorLeaf] = {}

    def node(self, node: Node, path: Path) -> Any:
        """The container or leaf that a node stands for."""
        parsed = parse(node, path)
        if parsed.values and len(path) < MAX_NESTING:
            steps = parsed.steps(path) if parsed.tag in (*_MAPPINGS, *_SEQUENCES) else []
            if parsed.tag in _SEQUENCES:
                return _SEQUENCES[parsed.tag](self._children(parsed, steps, path))
            if parsed.tag in _MAPPINGS and all(map(is_plain_key, steps)) and _keys_are_plain(parsed):
                return _MAPPINGS[parsed.tag](zip(steps, self._children(parsed, steps, path), strict=True))
        if parsed.tag == "tensor":
            tensors = self.reader.index.tensors
            leaf = self._tensor(tensors[checked_tensor_id(parsed.body, len(tensors), path)])
            if leaf is not None:
                return leaf
        return self._objects.leaf(path)

    def _children(self, parsed: Parsed, steps: list[Any], path: Path) -> list[Any]:
        return [self.node(value, (*path, step)) for value, step in zip(parsed.values, steps, strict=True)]

    def _tensor(self, entry: TensorEntry) -> TensorLeaf | None:
        """The leaf of a plainly strided tensor; None for any other."""
        import torch

        dtype = getattr(torch, entry.dtype, None)
        if entry.storage is None or _SPECIAL & set(entry.extra) or entry.dtype not in ITEM_BYTES:
            return None
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(
                f"this version of torch has no dtype {entry.dtype}", where=self.reader.name
            )
        key = (entry.storage, entry.offset, entry.shape, entry.stride, entry.dtype)
        if key not in self._leaves:
            view = StridedView(
                storage=entry.storage,
                dtype=dtype,
                shape=entry.shape,
                stride=entry.stride,
                offset=entry.offset,
            )
            start = entry.offset * dtype.itemsize
            self._leaves[key] = TensorLeaf(
                dtype=dtype,
                shape=entry.shape,
                read=_View(self._restorer, view),
                memory=(entry.storage, start, start + view.extent * dtype.itemsize),
            )
        return self._leaves[key]


def _keys_are_plain(parsed: Parsed) -> bool:
    """Whether no key is spelled as JSON text in paths, which a key that is a string could look like too."""
    return all(not isinstance(key, dict) or "tuple" in key for key in parsed.keys or [])


class _View:
    def __init__(self, restorer: Restorer, view: StridedView) -> None:
        self._restorer = restorer
        self._view = view

    def __call__(self, box: Box) -> Any:
        import torch

        view = self._view.index(box)
        out = torch.empty(view.shape, dtype=view.dtype)
        read_view(self._restorer, view, out)
        return out


class _Objects:
    """Loads what is no plain tensor: all at once, or one by one if some of it is refused."""

    def __init__(self, restorer: Restorer, allow_pickle: bool) -> None:
        self._reader = restorer.reader
        self._restorer = restorer
        self._weights_only = not allow_pickle
        self._paths: list[Path] = []
        self._all: Any = None
        self._state = "new"
        self._lock = threading.Lock()

    def leaf(self, path: Path) -> ObjectLeaf:
        self._paths.append(path)
        return ObjectLeaf(load=lambda: self._get(path))

    def _get(self, path: Path) -> Any:
        with self._lock:
            if self._state == "new":
                try:
                    self._all = self._load(self._paths)
                    self._state = "loaded"
                except UnsafeObjectError:
                    self._state = "one by one"
            obj = self._all if self._state == "loaded" else self._load([path])
        for key in path:
            obj = obj[key]
        return obj

    def _load(self, paths: list[Path]) -> Any:
        try:
            return load_paths(self._restorer, paths, map_location="cpu", weights_only=self._weights_only)
        except UnsafeObjectError as error:
            error.where = error.where or self._reader.name
            error.hint = PICKLE_HINT
            raise
