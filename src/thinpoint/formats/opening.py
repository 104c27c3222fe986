"""Opens a checkpoint of any kind that this package knows, by what it is and not by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from thinpoint.engine.workers import Workers
from thinpoint.errors import NotThinFileError, UsageError
from thinpoint.file.layout import MAGIC
from thinpoint.folder.names import MANIFEST
from thinpoint.formats.dcp_source import METADATA, open_dcp
from thinpoint.formats.leaves import OpenCheckpoint
from thinpoint.formats.safetensors_source import SUFFIX, is_hf_folder, open_hf, open_safetensors
from thinpoint.formats.thin_folder_source import open_thin_folder
from thinpoint.formats.thin_source import open_thin
from thinpoint.formats.torch_file import torch_kind
from thinpoint.formats.torch_source import open_torch
from thinpoint.store import LocalStore, open_source, open_store
from thinpoint.store.contract import Store

KINDS = "a .thin file, a thin folder, a PyTorch DCP folder, a .pt or .safetensors file, a Hugging Face folder"
_HEAD_BYTES = 64


@contextmanager
def open_checkpoint(
    target: str, *, threads: int | None = None, allow_pickle: bool = False
) -> Iterator[OpenCheckpoint]:
    """A checkpoint, opened while the block runs: names, dtypes and shapes are known, the rest is read when it is asked for.

    Args:
        target: a path, or a URL (not for files of `torch.save`).
        threads: see `Workers`.
        allow_pickle: unpickle whatever the checkpoint names. Only for checkpoints that are trusted.

    Raises:
        UsageError: it is of none of the kinds.
        DamagedFileError, UnsupportedError, UnsafeObjectError: as the readers of these kinds.
        StorageError: the store refused.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(threads))
        store = open_store(target)
        if isinstance(store, LocalStore) and not os.path.isdir(store.url):
            yield _open_file(target, workers, stack, allow_pickle)
            return
        names = _names(store)
        if not names and not isinstance(store, LocalStore):
            yield _open_file(target, workers, stack, allow_pickle)
            return
        yield _open_folder(store, names, workers, stack, allow_pickle)


def _names(store: Store) -> set[str]:
    """The files right in a folder."""
    if isinstance(store, LocalStore):
        return {entry.name for entry in os.scandir(store.url) if entry.is_file()}
    return {file.name for file in store.files() if "/" not in file.name}


def _open_folder(
    store: Store, names: set[str], workers: Workers, stack: ExitStack, allow_pickle: bool
) -> OpenCheckpoint:
    if MANIFEST in names:
        return open_thin_folder(store, workers, stack, allow_pickle=allow_pickle)
    if METADATA in names:
        return open_dcp(store, stack, allow_pickle=allow_pickle)
    if is_hf_folder(names):
        return open_hf(store, stack)
    raise UsageError("this folder is no checkpoint", where=store.url, expected=KINDS)


def _open_file(target: str, workers: Workers, stack: ExitStack, allow_pickle: bool) -> OpenCheckpoint:
    source = stack.enter_context(open_source(target))
    head = source.read_at(0, min(_HEAD_BYTES, source.size)).tobytes()
    if head.startswith(MAGIC):
        return open_thin(source, workers, allow_pickle=allow_pickle)
    if torch_kind(head[:32]) is not None:
        return open_torch(target, allow_pickle=allow_pickle)
    if target.lower().endswith(SUFFIX) or head[8:9] == b"{":
        return open_safetensors(source)
    if target.lower().endswith(".thin"):
        raise NotThinFileError("the file does not begin as a .thin file does", where=source.name)
    raise UsageError("this file is no checkpoint", where=source.name, expected=KINDS)
