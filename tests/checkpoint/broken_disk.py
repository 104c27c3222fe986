"""A local disk that fails, tears, loses power or kills the process at its n-th operation.

What `LocalStore` asks of the operating system goes through here, so that faults fall between the steps of one store call too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pkgutil
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from thinpoint import store
from thinpoint.store import folders, local_store

MODES = {
    "fail": "an I/O error instead of the operation",
    "again": "an error that passes, instead of the operation",
    "full": "from here on the disk is full",
    "lost": "the operation is done, but an I/O error is reported",
    "tear": "half of a write is done, and an I/O error reported; as lost for what is no write",
    "kill": "the process is killed before the operation",
    "kill-torn": "and after half of a write",
    "kill-after": "and after the operation",
    "cut": "the power fails before the operation: what was not synced is gone, or half of it",
}

KINDS = {"open", "write", "fsync", "close", "rename", "link", "mkdir", "delete", "list", "look", "read"}
"""What operations are called. All of them occur when checkpoints are saved, or a fault point is missed."""

_GROWS = {"open", "write", "mkdir", "link", "rename"}


class BrokenDisk:
    """Counts operations; at the n-th one it breaks.

    Args:
        at: the operation that breaks, from 0 on; -1 for none.
        mode: one of MODES.
        spare: a folder outside the store, on the same file system.
    """

    def __init__(self, at: int, mode: str, spare: str) -> None:
        self.count = 0
        self.names: list[str] = []
        self._at = at
        self._mode = mode
        self._spare = spare
        self._lock = threading.RLock()
        # By device and inode: a descriptor of each file whose last bytes were not synced.
        self._unsynced: dict[tuple[int, int], int] = {}
        # What takes a new name back, by the folder whose sync makes it durable.
        self._undo: list[tuple[str, Callable[[], None]]] = []

    def install(self) -> None:
        """From now on all of `LocalStore` works on this disk. For a process that ends soon."""
        proxy = _Os(self)
        for found in pkgutil.iter_modules(store.__path__):
            module = sys.modules.get(f"{store.__name__}.{found.name}")
            if getattr(module, "os", None) is os:
                module.os = proxy  # type: ignore[union-attr]
        rename = folders.rename_to_free_name

        def renamed(old: str, new: str) -> None:
            self.run("rename", lambda: rename(old, new), moved=(old, new))

        local_store.rename_to_free_name = renamed  # type: ignore[assignment]

    def run(
        self,
        kind: str,
        operation: Callable[[], Any],
        *,
        half: Callable[[], Any] | None = None,
        moved: tuple[str, str] | None = None,
    ) -> Any:
        """The operation's result, or what breaks instead. Thread-safe; one operation at a time."""
        with self._lock:
            index = self.count
            self.count += 1
            self.names.append(kind)
            if index == self._at:
                self._break(operation, half)
            if 0 <= self._at < index and self._mode == "full" and kind in _GROWS:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if moved:
                self._remember(kind, *moved)
            return operation()

    def wrote(self, fd: int) -> None:
        """Bytes were written and are not synced."""
        status = os.fstat(fd)
        if self._mode == "cut" and (status.st_dev, status.st_ino) not in self._unsynced:
            self._unsynced[status.st_dev, status.st_ino] = os.dup(fd)

    def synced(self, fd: int) -> None:
        """A file's bytes, or a folder's names, are durable."""
        status = os.fstat(fd)
        if self._mode == "cut":
            kept = self._unsynced.pop((status.st_dev, status.st_ino), None)
            if kept is not None:
                os.close(kept)
            folder = os.readlink(f"/proc/self/fd/{fd}")
            self._undo = [item for item in self._undo if item[0] != folder]

    def _break(self, operation: Callable[[], Any], half: Callable[[], Any] | None) -> None:
        if self._mode == "cut":
            self._cut_power()
        if self._mode in ("lost", "kill-after") or (half is None and self._mode in ("tear", "kill-torn")):
            operation()
        elif self._mode in ("tear", "kill-torn") and half is not None:
            half()
        if self._mode.startswith("kill") or self._mode == "cut":
            os.kill(os.getpid(), signal.SIGKILL)
        number = {"again": errno.EAGAIN, "full": errno.ENOSPC}.get(self._mode, errno.EIO)
        raise OSError(number, os.strerror(number))

    def _remember(self, kind: str, old: str, new: str) -> None:
        """How to take a new name back; to be called before the operation."""
        if self._mode != "cut":
            return
        backup = os.path.join(self._spare, f"backup-{self.count}")
        if kind == "rename" and os.path.isfile(new):
            os.link(new, backup)

        def undo() -> None:
            with contextlib.suppress(OSError):
                if kind == "mkdir":
                    shutil.rmtree(new)
                elif kind == "link":
                    os.unlink(new)
                else:
                    os.makedirs(os.path.dirname(old), exist_ok=True)
                    os.rename(new, old)
                    if os.path.exists(backup):
                        os.rename(backup, new)

        self._undo.append((os.path.dirname(new), undo))

    def _cut_power(self) -> None:
        for fd in self._unsynced.values():
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
        for _, undo in reversed(self._undo):
            undo()


class _Os:
    """The module `os`, with the operations that `LocalStore` uses on files counted."""

    def __init__(self, disk: BrokenDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        kind = "open" if flags & os.O_CREAT else "look"
        return self._disk.run(kind, lambda: os.open(path, flags, mode))

    def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        first = views[0][: views[0].nbytes // 2]
        count = self._disk.run(
            "write", lambda: os.pwritev(fd, views, offset), half=lambda: os.pwritev(fd, [first], offset)
        )
        self._disk.wrote(fd)
        return count

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        whole = memoryview(data)
        half = whole[: whole.nbytes // 2]
        count = self._disk.run(
            "write", lambda: os.pwrite(fd, whole, offset), half=lambda: os.pwrite(fd, half, offset)
        )
        self._disk.wrote(fd)
        return count

    def preadv(self, fd: int, views: list[Any], offset: int) -> int:
        return self._disk.run("read", lambda: os.preadv(fd, views, offset))

    def fsync(self, fd: int) -> None:
        self._disk.run("fsync", lambda: os.fsync(fd))
        self._disk.synced(fd)

    def close(self, fd: int) -> None:
        # A descriptor is gone whatever close reports, so an error here is only reported, never instead of it.
        self._disk.run("close", lambda: None)
        os.close(fd)

    def replace(self, old: str, new: str) -> None:
        self._disk.run("rename", lambda: os.replace(old, new), moved=(old, new))

    def rename(self, old: str, new: str) -> None:
        self._disk.run("rename", lambda: os.rename(old, new), moved=(old, new))

    def link(self, old: str, new: str) -> None:
        self._disk.run("link", lambda: os.link(old, new), moved=(old, new))

    def mkdir(self, path: str) -> None:
        if os.path.isdir(path):
            os.mkdir(path)
        self._disk.run("mkdir", lambda: os.mkdir(path), moved=("", path))

    def unlink(self, path: str) -> None:
        self._disk.run("delete", lambda: os.unlink(path))

    def rmdir(self, path: str) -> None:
        self._disk.run("delete", lambda: os.rmdir(path))

    def scandir(self, path: str) -> Any:
        return self._disk.run("list", lambda: os.scandir(path))
