"""What a place for bytes must offer: a sink that takes one file front to back, a source that gives ranges."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


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

    def tell(self) -> int:
        """Bytes written so far."""
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

    def close(self) -> None:
        """Gives the file back; it cannot be read any more. Closing twice is no error."""
        ...
