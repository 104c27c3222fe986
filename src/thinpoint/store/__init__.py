"""Where bytes go to and come from: local files and file objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thinpoint.errors import UsageError
from thinpoint.store.contract import Sink, Source
from thinpoint.store.fileobj import FileObjectSink, FileObjectSource
from thinpoint.store.local import AtomicWriter, LocalSource

__all__ = [
    "AtomicWriter",
    "FileObjectSink",
    "FileObjectSource",
    "LocalSource",
    "Sink",
    "Source",
    "open_sink",
    "open_source",
]


@contextmanager
def open_sink(target: Any, *, overwrite: bool = True) -> Iterator[Sink]:
    """A sink for a path or a binary file object; leaving the block without an error makes it durable.

    Raises:
        StorageError: the system refused; a path is left as it was.
        UsageError: neither a path nor a writable file object.
    """
    if hasattr(target, "write"):
        sink = FileObjectSink(target)
        yield sink
        sink.flush()
        return
    with AtomicWriter(_path(target), overwrite=overwrite) as writer:
        yield writer
        writer.commit()


@contextmanager
def open_source(target: Any) -> Iterator[Source]:
    """A source for a path or a seekable binary file object.

    Raises:
        StorageError: the system refused.
        UsageError: neither a path nor a readable, seekable file object.
    """
    source = FileObjectSource(target) if hasattr(target, "read") else LocalSource(_path(target))
    try:
        yield source
    finally:
        source.close()


def _path(target: Any) -> str:
    if isinstance(target, str | bytes | os.PathLike):
        return os.fsdecode(target)
    raise UsageError(f"a path or a binary file object is needed, not {type(target).__name__}")
