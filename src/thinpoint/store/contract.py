"""What a place for bytes must offer: a sink that takes one file front to back, a source that gives ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
