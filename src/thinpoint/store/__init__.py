"""Where bytes go to and come from: local disks, any fsspec URL, file objects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from thinpoint.errors import UsageError
from thinpoint.store.atomic import AtomicWriter
from thinpoint.store.contract import Capabilities, Sink, Source, Store, StoredFile
from thinpoint.store.fileobj import FileObjectSink, FileObjectSource
from thinpoint.store.local import LocalSource
from thinpoint.store.local_store import Leftover, LocalStore
from thinpoint.store.memory import MemorySource

__all__ = [
    "AtomicWriter",
    "Capabilities",
    "FileObjectSink",
    "FileObjectSource",
    "Leftover",
    "LocalSource",
    "LocalStore",
    "MemorySource",
    "Sink",
    "Source",
    "Store",
    "StoredFile",
    "open_sink",
    "open_source",
    "open_store",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL_URL = re.compile(r"(file|local)://")


def open_store(target: Any, **options: Any) -> Store:
    """The store at a path or URL. Nothing is read or made yet; a store itself is given back.

    Args:
        target: str, bytes or os.PathLike: a folder of a local disk, which need not exist; or a URL that fsspec knows
            (`s3://bucket/folder`).
        options: given to the fsspec file system (`endpoint_url=...`, `key=...`); what they hold is in no message.

    Raises:
        UsageError: neither a path nor a URL; fsspec, or what it needs for this kind of URL, is not installed.
    """
    if hasattr(target, "sink") and hasattr(target, "files"):
        store: Store = target
        return store
    path = _path(target)
    if _is_remote(path):
        from thinpoint.store.remote import open_remote_store

        return open_remote_store(path, options)
    if options:
        raise UsageError("a local disk takes no options", where=path, actual=", ".join(sorted(options)))
    return LocalStore(path)


@contextmanager
def open_sink(target: Any, *, overwrite: bool = True) -> Iterator[Sink]:
    """A sink for a path, a URL or a binary file object; leaving the block without an error makes it durable.

    A sink itself is given back, and made durable by whoever made it.

    Raises:
        StorageError: the system refused; a path is left as it was.
        UsageError: neither a path nor a URL nor a writable file object.
    """
    if hasattr(target, "write_all") and hasattr(target, "tell"):
        yield target
        return
    if hasattr(target, "write"):
        sink = FileObjectSink(target)
        yield sink
        sink.flush()
        return
    with _file_sink(_path(target), overwrite) as writer:
        yield writer


@contextmanager
def open_source(target: Any) -> Iterator[Source]:
    """A source for a path, a URL or a seekable binary file object; a source itself is given back, and closed by whoever made it.

    Raises:
        StorageError: the system refused.
        UsageError: neither a path nor a URL nor a readable, seekable file object.
    """
    if hasattr(target, "read_into") and hasattr(target, "read_at"):
        yield target
        return
    source = FileObjectSource(target) if hasattr(target, "read") else _file_source(_path(target))
    try:
        yield source
    finally:
        source.close()


def _file_sink(path: str, overwrite: bool) -> AbstractContextManager[Sink]:
    if _is_remote(path):
        from thinpoint.store.remote import open_remote_sink

        return open_remote_sink(path, overwrite)
    return _local_sink(path, overwrite)


@contextmanager
def _local_sink(path: str, overwrite: bool) -> Iterator[Sink]:
    with AtomicWriter(path, overwrite=overwrite) as writer:
        yield writer
        writer.commit()


def _file_source(path: str) -> Source:
    if _is_remote(path):
        from thinpoint.store.remote import open_remote_source

        return open_remote_source(path)
    return LocalSource(path)


def _is_remote(path: str) -> bool:
    return _URL.match(path) is not None


def _path(target: Any) -> str:
    if isinstance(target, str):
        return _LOCAL_URL.sub("", target, count=1) if _LOCAL_URL.match(target) else target
    if isinstance(target, bytes | os.PathLike):
        path = os.fsdecode(target)
        # An object or bytes say that they are a path, whatever it looks like.
        return os.path.join(os.curdir, path) if _URL.match(path) else path
    raise UsageError(f"a path, a URL or a binary file object is needed, not {type(target).__name__}")
