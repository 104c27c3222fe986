"""A folder of PyTorch DCP (`FileSystemWriter`) as a tree of leaves."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import zstandard

from thinpoint.errors import MalformedFileError, UnsupportedError, UsageError
from thinpoint.formats.chunks import assemble
from thinpoint.formats.dcp_metadata import (
    MAX_METADATA_BYTES,
    StoredChunk,
    StoredItem,
    StoredTensor,
    parse_metadata,
)
from thinpoint.formats.leaves import Box, Leaf, ObjectLeaf, OpenCheckpoint, TensorLeaf
from thinpoint.formats.nesting import nested
from thinpoint.formats.torch_file import load_stream
from thinpoint.formats.torch_item import TensorItem, Window
from thinpoint.store import FileObjectSource
from thinpoint.store.contract import Source, Store

METADATA = ".metadata"
_ZSTD = "stream.zstd/1"
_ZSTD_SLACK_BYTES = 1 << 20
"""What `torch.save` writes around the elements of a tensor is far less."""

MAX_OBJECT_BYTES = 1 << 30


def open_dcp(store: Store, stack: ExitStack, *, allow_pickle: bool = False) -> OpenCheckpoint:
    """What a DCP folder holds. Only its `.metadata` is read, without running anything of it.

    Args:
        stack: closes the files.
        allow_pickle: unpickle whatever objects name, as `torch.load(weights_only=False)` does. Never for `.metadata`.

    Raises:
        UnsafeObjectError, MalformedFileError, LimitExceededError, UnsupportedError: see `parse_metadata`.
        StorageError: the store refused.
    """
    where = f"{store.url}/{METADATA}"
    metadata = parse_metadata(store.get(METADATA, MAX_METADATA_BYTES), where)
    files = _Files(store, stack)
    leaves: list[tuple[Any, Leaf]] = []
    for name, entry in metadata.entries.items():
        path = metadata.paths.get(name, (name,))
        if isinstance(entry, StoredTensor):
            leaves.append((path, _tensor(name, entry, files)))
        else:
            leaves.append((path, ObjectLeaf(load=_Object(name, entry, files, allow_pickle))))
    num_bytes = sum(file.size for file in store.files() if "/" not in file.name)
    return OpenCheckpoint(name=store.url, kind="dcp", tree=nested(leaves), num_bytes=num_bytes)


def _tensor(name: str, entry: StoredTensor, files: _Files) -> TensorLeaf:
    import torch

    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"this version of torch has no dtype {entry.dtype}", tensor=name)
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], Callable[[Box], Any]]] = [
        (chunk.offsets, chunk.sizes, _Chunk(name, chunk, dtype, files)) for chunk in entry.chunks
    ]
    return TensorLeaf(dtype=dtype, shape=entry.shape, read=lambda box: assemble(chunks, box, dtype))


class _Files:
    """The files of a folder, each opened when it is first needed, and what is compressed in them."""

    def __init__(self, store: Store, stack: ExitStack) -> None:
        self.url = store.url
        self._store = store
        self._stack = stack
        self._open: dict[str, Source] = {}
        self._last: tuple[StoredItem, Source] | None = None
        self._lock = threading.Lock()

    def item(self, item: StoredItem, max_bytes: int) -> tuple[Source, int, int]:
        """The source that holds an item as `torch.save` wrote it, and its offset and length there."""
        with self._lock:
            source = self._source(item.file)
            if item.offset + item.length > source.size:
                raise MalformedFileError(
                    "the metadata name bytes beyond the end of a file",
                    where=source.name,
                    offset=item.offset,
                    expected=f"at most {source.size:,} bytes",
                    actual=f"{item.offset + item.length:,}",
                )
            if not item.transforms:
                return source, item.offset, item.length
            if item.transforms != (_ZSTD,):
                raise UnsupportedError(
                    f"an item is stored through {', '.join(item.transforms)[:80]!a}, which thinpoint cannot undo",
                    where=source.name,
                    hint="Only plain items and PyTorch's own ZStandard extension can be read",
                )
            if self._last is None or self._last[0] != item:
                plain = _decompressed(source, item, max_bytes)
                self._last = item, FileObjectSource(io.BytesIO(plain))
            return self._last[1], 0, self._last[1].size

    def _source(self, name: str) -> Source:
        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(closing(self._store.source(name)))
            except UsageError as error:
                raise MalformedFileError(
                    "the metadata name something that is no file of the folder",
                    where=self.url,
                    actual=ascii(name)[:80],
                ) from error
        return self._open[name]


def _decompressed(source: Source, item: StoredItem, max_bytes: int) -> bytes:
    data = source.read_at(item.offset, item.length)
    try:
        with zstandard.ZstdDecompressor().stream_reader(np.ascontiguousarray(data).data) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise MalformedFileError(f"a compressed item is damaged ({error})", where=source.name) from error
    if len(plain) > max_bytes:
        raise MalformedFileError(
            "a compressed item is larger than what it holds", where=source.name, offset=item.offset
        )
    return plain


class _Chunk:
    """Reads boxes of a chunk; how its elements lie in the file is found out at the first."""

    def __init__(self, name: str, chunk: StoredChunk, dtype: Any, files: _Files) -> None:
        self._name = name
        self._chunk = chunk
        self._dtype = dtype
        self._files = files

    def __call__(self, box: Box) -> Any:
        num_bytes = math.prod(self._chunk.sizes) * self._dtype.itemsize
        source, offset, length = self._files.item(self._chunk.item, num_bytes + _ZSTD_SLACK_BYTES)
        if num_bytes > length:
            raise MalformedFileError(
                "an item is smaller than the elements of its chunk",
                where=source.name,
                tensor=self._name,
                expected=f"at least {num_bytes:,} bytes",
                actual=f"{length:,}",
            )
        item = TensorItem(source, offset, length, self._name)
        item.check(self._dtype, self._chunk.sizes)
        return item.read(box)


class _Object:
    def __init__(self, name: str, item: StoredItem, files: _Files, allow_pickle: bool) -> None:
        self._name = name
        self._item = item
        self._files = files
        self._allow_pickle = allow_pickle

    def __call__(self) -> Any:
        source, offset, length = self._files.item(self._item, MAX_OBJECT_BYTES)
        return load_stream(
            Window(source, offset, length),
            f"{source.name} ({self._name})",
            map_location="cpu",
            allow_pickle=self._allow_pickle,
        )
