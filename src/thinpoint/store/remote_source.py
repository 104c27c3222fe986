"""Reads ranges of a file on an fsspec file system."""

from __future__ import annotations

import time
from typing import Any

from thinpoint.errors import StorageError, UsageError
from thinpoint.store.buffers import ReadAt, check_range, truncated, writable_bytes
from thinpoint.store.remote_errors import RemoteErrors
from thinpoint.store.remote_files import RemoteFiles

READ_BYTES = 32 << 20
"""Bytes asked for at once: the library holds a copy of them."""

ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
"""Before the second attempt; three times as long before each further one. One lost connection must not end hours of reading."""


class RemoteSource(ReadAt):
    """A file as it was when it was opened; a `Source`. Reads again when a connection is lost.

    Raises:
        NotFoundError, PermissionDeniedError, StorageError: the store refused.
    """

    def __init__(self, files: RemoteFiles, errors: RemoteErrors, name: str) -> None:
        with errors.translated("cannot open the file", name):
            self._file = files.stat(name)
        self._files: RemoteFiles | None = files
        self._errors = errors
        self._name = name

    @property
    def name(self) -> str:
        return self._errors.where(self._name)

    @property
    def size(self) -> int:
        return self._file.size

    def read_into(self, offset: int, buffer: Any) -> None:
        """See `Source.read_into`."""
        if self._files is None:
            raise UsageError("the file is closed", where=self.name)
        view = writable_bytes(buffer)
        check_range(offset, view.nbytes, self.size, self.name)
        for start in range(0, view.nbytes, READ_BYTES):
            piece = view[start : start + READ_BYTES]
            piece[:] = self._read(self._files, offset + start, piece.nbytes)

    def _read(self, files: RemoteFiles, offset: int, size: int) -> bytes:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._errors.translated("cannot read the file", self._name):
                    data = files.read(self._name, offset, offset + size, self._file.version)
                break
            except StorageError as error:
                if not error.transient or attempt == ATTEMPTS:
                    raise
            time.sleep(pause_s)
            pause_s *= 3
        if len(data) < size:
            raise truncated(offset, size, offset + len(data), self.name)
        if len(data) > size:
            raise StorageError("the server gives other bytes than the range asked for", where=self.name)
        return data

    def close(self) -> None:
        """See `Source.close`."""
        self._files = None
