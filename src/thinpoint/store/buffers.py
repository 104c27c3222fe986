"""What the stores share: buffers cut into pieces, reading into a new array, and the check of a range."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.errors import LimitExceededError, TruncatedFileError, UsageError

if TYPE_CHECKING:
    from thinpoint.store.contract import Source

PIECE_BYTES = 8 << 20
"""Bytes handed to the system at once: a slow disk can be interrupted, and several threads find work in one part."""

_MAX_BUFFERS = 1024
"""IOV_MAX of Linux, the most buffers that one system call takes."""


def pieces(buffers: Iterable[Any], offset: int = 0) -> Iterator[list[memoryview]]:
    """The bytes of contiguous buffers, in order, as lists of views of together at most `PIECE_BYTES`; no copy.

    Args:
        offset: where the first byte comes to lie; pieces end at multiples of `PIECE_BYTES`.
    """
    piece: list[memoryview] = []
    room = PIECE_BYTES - offset % PIECE_BYTES
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes == 0:
            continue
        view = view.cast("B")
        while view.nbytes:
            piece.append(view[:room])
            room -= piece[-1].nbytes
            view = view[piece[-1].nbytes :]
            if room == 0 or len(piece) == _MAX_BUFFERS:
                yield piece
                piece, room = [], room or PIECE_BYTES
    if piece:
        yield piece


def writable_bytes(buffer: Any) -> memoryview:
    """A contiguous writable buffer as bytes; no copy."""
    view = memoryview(buffer)
    if view.readonly:
        raise UsageError("the buffer to read into is read-only")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class ReadAt:
    """`Source.read_at`, for sources that have the rest."""

    def read_at(self: Source, offset: int, size: int) -> np.ndarray:
        """See `Source.read_at`."""
        check_range(offset, size, self.size, self.name)
        out = np.empty(size, np.uint8)
        self.read_into(offset, out)
        return out


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


def too_large(where: str, size: int, max_bytes: int) -> LimitExceededError:
    """The error of `Store.get` for a file that is larger than the caller takes."""
    return LimitExceededError(
        "the file is larger than it can be",
        where=where,
        expected=f"at most {max_bytes:,} bytes",
        actual=f"{size:,}",
    )
