"""Files on a local disk: read by range; written by `AtomicWriter`."""

from __future__ import annotations

import os
import stat
from typing import Any

from thinpoint.errors import UsageError, from_os_error
from thinpoint.store.atomic import AtomicWriter
from thinpoint.store.buffers import ReadAt, check_range, truncated, writable_bytes
from thinpoint.store.paths import decode_path, kind_of

__all__ = ["AtomicWriter", "LocalSource"]


class LocalSource(ReadAt):
    """A regular file, open for reading. May be shared between threads and used after a fork.

    Args:
        path: a path; a symbolic link is followed.

    Raises:
        NotFoundError, PermissionDeniedError, StorageError: the system refused.
        UsageError: the path is a folder, a device or a pipe.
    """

    _fd = -1

    def __init__(self, path: str | bytes | os.PathLike[Any]) -> None:
        self._name = decode_path(path)
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer; regular files ignore it.
            fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise from_os_error(error, "cannot open the file", where=self._name) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise UsageError(f"{kind_of(status.st_mode)}, no regular file", where=self._name)
        self._fd = fd
        self._size = status.st_size

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffer: Any) -> None:
        """See `Source.read_into`."""
        if self._fd < 0:
            raise UsageError("the file is closed", where=self._name)
        view = writable_bytes(buffer)
        size = view.nbytes
        check_range(offset, size, self._size, self._name)
        done = 0
        while done < size:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise from_os_error(error, "cannot read the file", where=self._name) from error
            if count == 0:
                raise truncated(offset, size, offset + done, self._name)
            done += count

    def close(self) -> None:
        """See `Source.close`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
