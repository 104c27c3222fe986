"""Any place that has an fsspec URL, as a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

from thinpoint.errors import UnsupportedError
from thinpoint.store.buffers import too_large
from thinpoint.store.contract import Capabilities, StoredFile
from thinpoint.store.names import check_name, is_temporary
from thinpoint.store.remote_errors import RemoteErrors
from thinpoint.store.remote_files import RemoteFiles
from thinpoint.store.remote_sink import RemoteSink, remote_sink
from thinpoint.store.remote_source import RemoteSource


class FsspecStore:
    """A folder of an fsspec file system; see `Store`. Connects when it is first used, and again after a fork.

    Args:
        connect: opens the file system.
        errors: knows the URL and translates.
    """

    def __init__(self, connect: Callable[[], RemoteFiles], errors: RemoteErrors) -> None:
        self._connect = connect
        self._errors = errors
        self._lock = threading.Lock()
        self._connected: tuple[int, RemoteFiles] | None = None

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @property
    def url(self) -> str:
        """The URL, without passwords and options."""
        return self._errors.url

    @cached_property
    def capabilities(self) -> Capabilities:
        """See `Store.capabilities`; the first time blocks on I/O, where a capability has to be tried out.

        Raises:
            StorageError: the store refused.
        """
        with self._errors.translated("cannot find out what the store can do"):
            files = self._files
            return Capabilities(
                rename=files.rename,
                put_if_absent=files.creates_in_one_step,
                ranges=files.ranges,
                durable=files.durable,
            )

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[RemoteSink]:
        """See `Store.sink`."""
        check_name(name, new=True)
        with remote_sink(self._files, self._errors, name, overwrite=overwrite) as sink:
            yield sink

    def source(self, name: str) -> RemoteSource:
        """See `Store.source`."""
        return RemoteSource(self._files, self._errors, check_name(name))

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        check_name(name, new=True)
        with self._errors.translated("cannot write the file", name):
            self._files.put(name, bytes(data), if_absent)

    def get(self, name: str, max_bytes: int) -> bytes:
        """See `Store.get`."""
        source = self.source(name)
        if source.size > max_bytes:
            raise too_large(source.name, source.size, max_bytes)
        return source.read_at(0, source.size).tobytes()

    def files(self, prefix: str = "") -> list[StoredFile]:
        """See `Store.files`."""
        with self._errors.translated("cannot list the files"):
            found = [file for file in self._files.files(prefix) if not is_temporary(file.name)]
        return sorted(found, key=lambda file: file.name)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._errors.translated("cannot delete the file", name):
            self._files.delete(check_name(name))

    def rename(self, old: str, new: str) -> None:
        """See `Store.rename`."""
        check_name(old)
        check_name(new, new=True)
        if not self._files.rename:
            raise UnsupportedError("the store cannot rename in one step", where=self._errors.where(old))
        with self._errors.translated(f"cannot rename to {new}", old):
            self._files.move(old, new)

    @property
    def _files(self) -> RemoteFiles:
        with self._lock:
            # A file system's threads and connections do not live on in a forked child.
            if self._connected is None or self._connected[0] != os.getpid():
                with self._errors.translated("cannot connect"):
                    self._connected = os.getpid(), self._connect()
            return self._connected[1]
