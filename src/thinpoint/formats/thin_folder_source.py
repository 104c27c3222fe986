"""A folder with a manifest as a tree of leaves: of many ranks (`spec/FOLDER.md`), or of a single file."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from typing import Any

from thinpoint.dcp.folder import ThinFolder, read_manifest
from thinpoint.dcp.rank_state import RankState
from thinpoint.engine.workers import Workers
from thinpoint.errors import TruncatedFileError, UnsafeObjectError, UnsupportedError
from thinpoint.folder.layout import TensorLayout
from thinpoint.formats.leaves import Box, Leaf, ObjectLeaf, OpenCheckpoint, TensorLeaf
from thinpoint.formats.nesting import nested
from thinpoint.formats.thin_source import PICKLE_HINT, open_thin
from thinpoint.store.contract import Store

MAX_OPEN_FILES = 128
"""Files of ranks that stay open; with more ranks each is opened again for every tensor."""


def open_thin_folder(
    store: Store, workers: Workers, stack: ExitStack, *, allow_pickle: bool = False
) -> OpenCheckpoint:
    """What a folder with a manifest holds; only manifest and layout are read yet.

    Args:
        stack: closes the files.

    Raises:
        DamagedFileError, UnsupportedError: as `ThinFolder`.
        StorageError: the store refused.
    """
    manifest = read_manifest(store)
    if manifest.layout is None:
        return _open_single(store, workers, stack, allow_pickle)
    reader = _Reader(stack.enter_context(ThinFolder(store)), allow_pickle)
    paths = reader.folder.planner_data or {}
    leaves: list[tuple[Any, Leaf]] = []
    for name, layout in reader.folder.tensors.items():
        leaves.append((paths.get(name, (name,)), reader.tensor(name, layout)))
    leaves += [(paths.get(name, (name,)), reader.object(name)) for name in reader.folder.objects]
    order = {path: i for i, path in enumerate(paths.values())}
    leaves.sort(key=lambda leaf: order.get(leaf[0], len(order)))
    return OpenCheckpoint(
        name=store.url, kind="thin folder", tree=nested(leaves), num_bytes=manifest.num_bytes
    )


def _open_single(store: Store, workers: Workers, stack: ExitStack, allow_pickle: bool) -> OpenCheckpoint:
    manifest = read_manifest(store)
    record = manifest.files[0]
    if len(manifest.files) != 1:
        raise UnsupportedError("the checkpoint is in several files, without a layout", where=store.url)
    source = stack.enter_context(closing(store.source(record.name)))
    if source.size != record.num_bytes:
        raise TruncatedFileError(
            "the size of a file is not what the manifest says",
            where=source.name,
            expected=f"{record.num_bytes:,} bytes",
            actual=f"{source.size:,}",
        )
    found = open_thin(source, workers, allow_pickle=allow_pickle)
    found.name = store.url
    return found


class _Reader:
    """Reads from a folder, on one thread at a time."""

    def __init__(self, folder: ThinFolder, allow_pickle: bool) -> None:
        self.folder = folder
        self._allow_pickle = allow_pickle
        self._stays_open = folder.world_size <= MAX_OPEN_FILES
        self._lock = threading.Lock()

    def tensor(self, name: str, layout: TensorLayout) -> TensorLeaf:
        import torch

        dtype = getattr(torch, layout.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"this version of torch has no dtype {layout.dtype}", tensor=name)

        def read(box: Box) -> Any:
            with self._lock:
                if self._stays_open:
                    start, end = tuple(part.start for part in box), tuple(part.stop for part in box)
                    for chunk in layout.overlapping(start, end):
                        self.folder.rank_file(chunk.rank)
                return self.folder.read(name, box)

        return TensorLeaf(dtype=dtype, shape=layout.shape, read=read)

    def object(self, name: str) -> ObjectLeaf:
        def load() -> Any:
            with self._lock:
                if self._stays_open:
                    self.folder.rank_file(self.folder.objects[name])
                try:
                    value = self.folder.load_object(name, weights_only=not self._allow_pickle)
                except UnsafeObjectError as error:
                    error.hint = PICKLE_HINT
                    raise
            if isinstance(value, RankState):
                # As plain data: other formats have no such class, and other numbers of ranks no use for it.
                return {"world_size": value.world_size, "value": value.values[0]}
            return value

        return ObjectLeaf(load=load)
