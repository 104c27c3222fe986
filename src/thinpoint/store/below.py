"""A folder of a store as a store of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from thinpoint.store.contract import Capabilities, Sink, Source, Store, StoredFile
from thinpoint.store.names import check_name


class Below:
    """The files below one folder of a store, with its connection and options. See `Store`.

    Args:
        store: whose folder.
        folder: a name in it, without a slash at its end.

    Raises:
        UsageError: it cannot be the name of a folder.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._start = check_name(folder) + "/"

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return f"{self._store.url}/{self._start[:-1]}"

    @property
    def capabilities(self) -> Capabilities:
        """See `Store.capabilities`."""
        return self._store.capabilities

    def sink(self, name: str, *, overwrite: bool = False) -> AbstractContextManager[Sink]:
        """See `Store.sink`."""
        return self._store.sink(self._start + name, overwrite=overwrite)

    def source(self, name: str) -> Source:
        """See `Store.source`."""
        return self._store.source(self._start + name)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        self._store.put(self._start + name, data, if_absent=if_absent)

    def get(self, name: str, max_bytes: int) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._start + name, max_bytes)

    def files(self, prefix: str = "") -> list[StoredFile]:
        """See `Store.files`."""
        found = self._store.files(self._start + prefix)
        return [replace(file, name=file.name.removeprefix(self._start)) for file in found]

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._store.delete(self._start + name)

    def rename(self, old: str, new: str) -> None:
        """See `Store.rename`."""
        self._store.rename(self._start + old, self._start + new)
