"""What a place for bytes must offer: a sink for one file front to back, a source of ranges, a store of many files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or a pool's: runs a function over items, yields results in order, raises the first error."""


class Sink(Protocol):
    """Takes a file's bytes in order."""

    def write(self, buffer: Any) -> None:
        """Appends all of `buffer`; blocks on I/O.

        Args:
            buffer: contiguous, host memory, any item size; the caller may reuse it afterwards.

        Raises:
            StorageError: the system refused; the file is incomplete.
        """
        ...

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        """Appends buffers in order, as `write` does one; where the place allows it, pieces of them at the same time.

        Args:
            buffers: as for `write`.
            map: runs the pieces. Its threads must not be those that wait for this call.

        Raises:
            StorageError: the system refused; the file is incomplete. No piece is under way any more.
        """
        ...

    def tell(self) -> int:
        """Bytes written so far; after an error, at least those of the calls before it."""
        ...


class Source(Protocol):
    """Gives ranges of a file's bytes. May be shared between threads."""

    @property
    def name(self) -> str:
        """What messages call the file."""
        ...

    @property
    def size(self) -> int:
        """Bytes in the file."""
        ...

    def read_at(self, offset: int, size: int) -> np.ndarray:
        """The bytes [offset, offset + size); blocks on I/O.

        Returns:
            Flat uint8 array of exactly `size` bytes, 8-byte aligned, owned by the caller.

        Raises:
            TruncatedFileError: the range goes beyond the end of the file. Nothing is allocated for it.
            StorageError: the system refused.
        """
        ...

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fills `buffer` with the bytes from `offset` on; blocks on I/O.

        Args:
            buffer: writable, contiguous, host memory, any item size.

        Raises: as `read_at`; `buffer` may be partly written.
        """
        ...

    def close(self) -> None:
        """Gives the file back; it cannot be read any more. Closing twice is no error."""
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a store can do; what it cannot, callers do in another way.

    Attributes:
        rename: a file, or all files below a folder, get another name in one step.
        put_if_absent: `put(..., if_absent=True)` is one step: of two callers one gets AlreadyExistsError.
        ranges: reading a range moves only its bytes.
        durable: what `put` and a closed sink have written survives a crash of the machine.
    """

    rename: bool
    put_if_absent: bool
    ranges: bool
    durable: bool


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in a store: its name in the store, bytes, and when it was last written, seconds since 1970 by the store's clock."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """Files under one folder or URL. Names are relative, with "/" between their parts, never "..". May be shared by threads.

    A file is there whole or not at all: what is being written is seen by nobody, by `files` neither. All methods block on I/O.
    Errors are StorageError and its classes, whatever library does the work: NotFoundError for what is not there, NoSpaceError
    for a full place, PermissionDeniedError; `transient` tells whether trying again may help.
    """

    @property
    def url(self) -> str:
        """For people and for `open_store`: a path, or a URL without secrets."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def sink(self, name: str, *, overwrite: bool = False) -> AbstractContextManager[Sink]:
        """A new file, with its folders; leaving the block without an error puts it in place, durable; else it never was.

        Raises:
            AlreadyExistsError: it exists and `overwrite` is False; at the latest when the block ends.
        """
        ...

    def source(self, name: str) -> Source:
        """An existing file, open for reading; the caller closes it."""
        ...

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """A small file, in one step and durable; replaces what is there.

        Raises:
            AlreadyExistsError: `if_absent` and it exists.
        """
        ...

    def get(self, name: str, max_bytes: int) -> bytes:
        """A small file.

        Raises:
            LimitExceededError: it has more than `max_bytes`; nothing is read.
        """
        ...

    def files(self, prefix: str = "") -> list[StoredFile]:
        """All complete files whose names begin with `prefix`, by name, at any depth; empty if the folder does not exist."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file; one that is not there is no error. Empty folders above it may go too."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file, or a folder with all that is in it, a name that does not exist yet; in one step.

        Raises:
            UnsupportedError: the store has no `rename`.
            AlreadyExistsError: the new name exists.
        """
        ...
