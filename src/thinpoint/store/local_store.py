"""A folder of a local disk as a store. Uses the operating system directly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from thinpoint.errors import AlreadyExistsError, StorageError, from_os_error
from thinpoint.store.atomic import AtomicWriter
from thinpoint.store.buffers import too_large
from thinpoint.store.contract import Capabilities, StoredFile
from thinpoint.store.folders import fsync_folder, make_folders, remove_empty_folders, rename_to_free_name
from thinpoint.store.local import LocalSource
from thinpoint.store.names import check_name, is_temporary

Result = TypeVar("Result")

_FOLDER_ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A file that is being written, or whose writer died.

    Attributes:
        name: its name in the store; `delete` takes it.
        size: bytes so far.
        age_s: seconds since the last byte was written.
    """

    name: str
    size: int
    age_s: float


class LocalStore:
    """A folder and all below it; see `Store`. It need not exist yet. Folders behind symbolic links are not listed.

    A file that is being written is a hidden one beside its place, which `files` leaves out and `leftovers` lists.

    Args:
        folder: a path.
    """

    capabilities = Capabilities(rename=True, put_if_absent=True, ranges=True, durable=True)

    def __init__(self, folder: str) -> None:
        self._root = os.path.abspath(folder)

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self._root

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[AtomicWriter]:
        """See `Store.sink`."""
        path = self._path(name, new=True)

        with ExitStack() as stack:
            try:
                writer = self._in_folder_of(
                    path, lambda: stack.enter_context(AtomicWriter(path, overwrite=overwrite))
                )
            except StorageError:
                raise
            except OSError as error:
                raise from_os_error(error, "cannot make the folder", where=path) from error
            yield writer
            writer.commit()

    def source(self, name: str) -> LocalSource:
        """See `Store.source`."""
        return LocalSource(self._path(name))

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        with self.sink(name, overwrite=not if_absent) as sink:
            sink.write(data)

    def get(self, name: str, max_bytes: int) -> bytes:
        """See `Store.get`."""
        with self.source(name) as source:
            if source.size > max_bytes:
                raise too_large(source.name, source.size, max_bytes)
            return source.read_at(0, source.size).tobytes()

    def files(self, prefix: str = "") -> list[StoredFile]:
        """See `Store.files`."""
        return [
            StoredFile(name=name, size=status.st_size, modified=status.st_mtime)
            for name, status in self._walk(prefix)
            if not is_temporary(name)
        ]

    def leftovers(self, prefix: str = "") -> list[Leftover]:
        """What is being written, or was by a process that died: that it is old tells them apart."""
        now = time.time()
        return [
            Leftover(name=name, size=status.st_size, age_s=max(0.0, now - status.st_mtime))
            for name, status in self._walk(prefix)
            if is_temporary(name)
        ]

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        path = self._path(name)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise from_os_error(error, "cannot delete the file", where=path) from error
        remove_empty_folders(os.path.dirname(path), self._root)

    def rename(self, old: str, new: str) -> None:
        """See `Store.rename`. Durable on return."""
        source, target = self._path(old), self._path(new, new=True)

        try:
            os.lstat(source)
            self._in_folder_of(target, lambda: rename_to_free_name(source, target))
            fsync_folder(os.path.dirname(target))
            fsync_folder(os.path.dirname(source))
        except FileExistsError as error:
            raise AlreadyExistsError(
                "the new name exists already", errno=error.errno, where=target
            ) from error
        except OSError as error:
            raise from_os_error(error, f"cannot rename to {new}", where=source) from error
        remove_empty_folders(os.path.dirname(source), self._root)

    def _path(self, name: str, *, new: bool = False) -> str:
        return os.path.join(self._root, check_name(name, new=new))

    def _in_folder_of(self, path: str, step: Callable[[], Result]) -> Result:
        """Makes the folder, then does the step; again if another thread has removed the folder, empty, in between."""
        folder = os.path.dirname(path)
        for attempt in range(1, _FOLDER_ATTEMPTS + 1):
            try:
                make_folders(folder, self._root)
                return step()
            except FileNotFoundError:
                if attempt == _FOLDER_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """All regular files whose names begin with `prefix`, by name; what vanishes meanwhile is left out."""
        above = prefix.rpartition("/")[0]
        if above:
            check_name(above)
            folders = above.split("/")
            if any(os.path.islink(os.path.join(self._root, *folders[: i + 1])) for i in range(len(folders))):
                # As below: folders that are links lie outside of the store.
                return iter(())
        found = self._walk_folder(os.path.join(self._root, above), f"{above}/" if above else "", prefix)
        return iter(sorted(found, key=lambda item: item[0]))

    def _walk_folder(self, folder: str, start: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise from_os_error(error, "cannot list the folder", where=folder) from error
        for entry in listed:
            name = start + entry.name
            if not name.startswith(prefix):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk_folder(entry.path, f"{name}/", prefix)
                elif entry.is_file():
                    yield name, entry.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise from_os_error(error, "cannot list the folder", where=folder) from error
