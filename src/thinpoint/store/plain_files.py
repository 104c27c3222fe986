"""Files of any fsspec file system: written under a temporary name, then moved."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from thinpoint.store.buffers import PIECE_BYTES
from thinpoint.store.contract import StoredFile
from thinpoint.store.names import temporary_name
from thinpoint.store.remote_files import RemoteFile


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What cannot be found out by trying.

    Attributes:
        moves: its `mv` is one step, for folders too.
        creates: `pipe_file(mode="create")`, where it is heeded, is one step.
        durable: what it has taken survives a crash of the machine.
    """

    moves: bool = False
    creates: bool = False
    durable: bool = False


_DISK = Traits(moves=True)
_OBJECTS = Traits(creates=True, durable=True)

TRAITS = {
    "file": _DISK,
    "sftp": _DISK,
    "ssh": _DISK,
    "smb": _DISK,
    "hdfs": _DISK,
    "gs": _OBJECTS,
    "gcs": _OBJECTS,
    "abfs": _OBJECTS,
    "abfss": _OBJECTS,
    "az": _OBJECTS,
}
"""By the name of the protocol; of any other nothing is believed."""

_ONE_AT_A_TIME = threading.Lock()
"""Held from "does it exist?" until it does: all that memory:// needs, as it is in this process only; elsewhere a help."""

_TIMES = ("mtime", "last_modified", "updated", "modified", "created", "LastModified")


class PlainFiles:
    """See `RemoteFiles`. Of fsspec's methods only those that take names as they are, without globs.

    Args:
        fs: an fsspec file system, used by nobody else: its cache of listings is turned off.
        root: the path of a folder in it, or of a file.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        traits = next((TRAITS[name] for name in sorted(protocols) if name in TRAITS), Traits())
        self._is_memory = "memory" in protocols
        self._may_create = traits.creates
        self.rename = traits.moves
        self.durable = traits.durable
        self.ranges = _overrides(fs, "cat_file")
        if hasattr(fs, "dircache"):
            fs.dircache.use_listings_cache = False

    @cached_property
    def creates_in_one_step(self) -> bool:
        """See `RemoteFiles.creates_in_one_step`. Where it may be, tries whether the library heeds `mode="create"`."""
        return self._is_memory or (self._may_create and self._heeds_create())

    def _heeds_create(self) -> bool:
        path = self._path(temporary_name("probe"))
        try:
            for _ in range(2):
                self._fs.pipe_file(path, b"", mode="create")
        except FileExistsError:
            return True
        except (NotImplementedError, TypeError):
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
        return False

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def stat(self, name: str) -> RemoteFile:
        """See `RemoteFiles.stat`."""
        info = self._fs.info(self._path(name))
        if info.get("type") == "directory":
            raise FileNotFoundError("it is a folder")
        if info.get("size") is None:
            raise OSError("the server does not tell the size of the file")
        return RemoteFile(size=info["size"], version=None)

    def read(self, name: str, start: int, end: int, version: str | None) -> bytes:
        """See `RemoteFiles.read`."""
        data: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
        return data

    def put(self, name: str, data: bytes, if_absent: bool) -> None:
        """See `RemoteFiles.put`."""
        path = self._path(name)
        self._make_folder_of(path)
        if if_absent and not self._is_memory and self.creates_in_one_step:
            self._fs.pipe_file(path, data, mode="create")
            return
        temporary = temporary_of(path)
        try:
            self._fs.pipe_file(temporary, data)
            self.place(temporary, path, not if_absent)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def upload(self, name: str, overwrite: bool) -> PlainUpload:
        """See `RemoteFiles.upload`."""
        path = self._path(name)
        self._make_folder_of(path)
        return PlainUpload(self, self._fs, path, overwrite)

    def place(self, temporary: str, path: str, overwrite: bool) -> None:
        """Moves a complete file to where it belongs."""
        if overwrite:
            self._move_file(temporary, path)
            return
        with _ONE_AT_A_TIME:
            if self._exists(path):
                raise FileExistsError("it exists already")
            self._move_file(temporary, path)

    def _move_file(self, old: str, new: str) -> None:
        if _overrides(self._fs, "mv"):
            self._fs.mv(old, new)
        else:
            # An object store's own copy appears as a whole.
            self._fs.cp_file(old, new)
            self._fs.rm_file(old)

    def _exists(self, path: str) -> bool:
        # fsspec's own `exists` takes any error for "no".
        try:
            self._fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def _make_folder_of(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if folder.strip("/"):
            self._fs.makedirs(folder, exist_ok=True)

    def delete(self, name: str) -> None:
        """See `RemoteFiles.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def files(self, prefix: str) -> Iterator[StoredFile]:
        """See `RemoteFiles.files`. Asks folder by folder: fsspec's own walk leaves out what it has no access to."""
        above = prefix.rpartition("/")[0]
        return self._files_in(f"{above}/" if above else "", prefix)

    def _files_in(self, start: str, prefix: str) -> Iterator[StoredFile]:
        folder = self._path(start.rstrip("/"))
        try:
            entries = self._fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            last = entry["name"].rstrip("/").rpartition("/")[2]
            name = start + last
            # A file lists itself, some object stores list an empty object that stands for the folder.
            if not last or not name.startswith(prefix) or entry["name"].rstrip("/") == folder.rstrip("/"):
                continue
            if entry["type"] == "directory":
                yield from self._files_in(f"{name}/", prefix)
            elif entry["type"] == "file":
                yield StoredFile(name=name, size=entry["size"], modified=_modified(entry))

    def move(self, old: str, new: str) -> None:
        """See `RemoteFiles.move`."""
        source, target = self._path(old), self._path(new)
        self._make_folder_of(target)
        with _ONE_AT_A_TIME:
            if not self._exists(source):
                raise FileNotFoundError("there is no such file")
            if self._exists(target):
                raise FileExistsError("the new name exists already")
            self._fs.mv(source, target)


class PlainUpload:
    """Writes to a temporary name. See `Upload`."""

    parallel = False

    def __init__(self, files: PlainFiles, fs: Any, path: str, overwrite: bool) -> None:
        self._files = files
        self._fs = fs
        self._path = path
        self._overwrite = overwrite
        self._temporary = temporary_of(path)
        self._file: Any = fs.open(self._temporary, "wb")

    def part_bytes(self, number: int) -> int:
        """See `Upload.part_bytes`."""
        return PIECE_BYTES

    def put_part(self, number: int, views: list[memoryview]) -> None:
        """See `Upload.put_part`."""
        for view in views:
            self._file.write(view)

    def finish(self, number: int, views: list[memoryview]) -> None:
        """See `Upload.finish`."""
        self.put_part(number, views)
        self._file.close()
        self._files.place(self._temporary, self._path, self._overwrite)

    def abort(self) -> None:
        """See `Upload.abort`."""
        try:
            self._file.close()
        finally:
            self._fs.rm_file(self._temporary)


def temporary_of(path: str) -> str:
    """A temporary name in the same folder."""
    folder, slash, stem = path.rpartition("/")
    return f"{folder}{slash}{temporary_name(stem)}"


def _overrides(fs: Any, method: str) -> bool:
    """The file system has its own way to do it, instead of fsspec's general one."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    general = getattr(AbstractFileSystem, method)
    if getattr(type(fs), method, general) is not general:
        return True
    general_async = getattr(AsyncFileSystem, f"_{method}", None)
    return getattr(type(fs), f"_{method}", general_async) is not general_async


def _modified(entry: dict[str, Any]) -> float:
    """When a file was last written; now, if the file system does not tell: then nothing takes it for old."""
    for key in _TIMES:
        value = entry.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
