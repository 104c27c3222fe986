"""What a store of URLs needs from a file system: implemented once for S3 and once for all that fsspec knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from thinpoint.store.contract import StoredFile


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file as it is now.

    Attributes:
        size: bytes.
        version: changes when the file is replaced; None where the file system has nothing like it.
    """

    size: int
    version: str | None


class Upload(Protocol):
    """A file on its way. After an error only `abort` may be called.

    Attributes:
        parallel: parts may be put at the same time, in any order; otherwise one after the other.
    """

    parallel: bool

    def part_bytes(self, number: int) -> int:
        """Bytes of a part, of all but the last exactly so many; numbers count from 0."""
        ...

    def put_part(self, number: int, views: list[memoryview]) -> None:
        """Puts the bytes of all views as one part; on return the caller may reuse them."""
        ...

    def finish(self, number: int, views: list[memoryview]) -> None:
        """Puts what is left, perhaps nothing, as the last part; then the file is in place.

        Raises:
            FileExistsError: it exists and was not to be replaced.
        """
        ...

    def abort(self) -> None:
        """Removes what was put. May raise."""
        ...


class RemoteFiles(Protocol):
    """Files below one place; the name "" is the place itself. Raises what the library raises. May be shared by threads.

    Attributes:
        rename, ranges, durable: see `Capabilities`.
    """

    rename: bool
    ranges: bool
    durable: bool

    @property
    def creates_in_one_step(self) -> bool:
        """See `Capabilities.put_if_absent`. May try it out, once: blocks on I/O."""
        ...

    def stat(self, name: str) -> RemoteFile:
        """Raises FileNotFoundError if there is no file of that name."""
        ...

    def read(self, name: str, start: int, end: int, version: str | None) -> bytes:
        """The bytes [start, end), at least one, of that version."""
        ...

    def put(self, name: str, data: bytes, if_absent: bool) -> None:
        """Raises FileExistsError if `if_absent` and it exists."""
        ...

    def upload(self, name: str, overwrite: bool) -> Upload:
        """Begins a file; nothing is there until it is finished."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        ...

    def files(self, prefix: str) -> Iterable[StoredFile]:
        """All files whose names begin with the prefix, those that are being written too, in any order."""
        ...

    def move(self, old: str, new: str) -> None:
        """Renames a file or folder. Raises FileExistsError if the new name exists. Only where `rename`."""
        ...
