"""What the stores share: buffers seen as bytes, and the check of a range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thinpoint.errors import TruncatedFileError, UsageError

PIECE_BYTES = 64 << 20
"""The most bytes handed to the system in one write, so that a slow disk can be interrupted."""


def pieces(buffer: Any) -> Iterator[memoryview]:
    """The bytes of a contiguous buffer as views of at most `PIECE_BYTES`; no copy."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return
    view = view.cast("B")
    for start in range(0, view.nbytes, PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def check_range(offset: int, size: int, file_bytes: int, name: str) -> None:
    """Raises TruncatedFileError unless [offset, offset + size) is inside the file."""
    if offset < 0 or size < 0:
        raise UsageError(f"no such range of bytes: {size} at {offset}", where=name)
    if offset + size > file_bytes:
        raise truncated(offset, size, file_bytes, name)


def truncated(offset: int, size: int, file_bytes: int, name: str) -> TruncatedFileError:
    """The error for a range that goes beyond the end of the file."""
    return TruncatedFileError(
        "the file ends too early",
        where=name,
        offset=offset,
        expected=f"at least {offset + size:,} bytes",
        actual=f"{file_bytes:,}",
    )
