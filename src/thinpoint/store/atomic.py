"""Files on a local disk: written to a temporary name and put in place in one step."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

from thinpoint.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    UsageError,
    from_os_error,
)
from thinpoint.store.buffers import pieces
from thinpoint.store.contract import Mapper
from thinpoint.store.direct import DirectFile, is_in_memory
from thinpoint.store.folders import fsync_folder
from thinpoint.store.names import temporary_name
from thinpoint.store.paths import decode_path, kind_of

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class AtomicWriter:
    """A new file that appears under its name complete or not at all; a `Sink`.

    Bytes go to a temporary file in the same folder. `commit` makes them durable and renames; leaving the
    `with` block without it, or by any exception, removes the temporary file and leaves what was there before
    untouched. A killed process leaves a hidden `.NAME.PID-RANDOM.tmp` that nothing reads.

    The file gets the mode that any new file gets in its folder (umask, setgid, default ACL), or the
    permission bits of the file it replaces. A symbolic link stays and its target is replaced. Not to be
    shared between threads, apart from those of the `map` given to `write_all`.

    Args:
        path: the final name.
        overwrite: replace what is there; otherwise AlreadyExistsError, also when it appears meanwhile.
        durable: wait until file and folder are on the disk. Without it a power cut may empty the file.

    Raises (on entering the `with` block, writing and committing):
        NotFoundError: the folder does not exist.
        AlreadyExistsError: see `overwrite`.
        UsageError: the path is a folder, a device or a pipe.
        PermissionDeniedError, NoSpaceError, StorageError: the system refused.
    """

    def __init__(
        self, path: str | bytes | os.PathLike[Any], *, overwrite: bool = True, durable: bool = True
    ) -> None:
        self._name = decode_path(path)
        if self._name.endswith(os.sep):
            raise UsageError("the path is a folder, cannot be replaced by a file", where=self._name)
        self._overwrite = overwrite
        self._durable = durable
        self._target = os.path.realpath(self._name)
        self._folder, stem = os.path.split(self._target)
        self._tmp = os.path.join(self._folder, temporary_name(stem))
        self._fd = -1
        self._direct = DirectFile()
        self._turn: AbstractContextManager[object] = nullcontext()
        self._written = 0
        self._is_whole = True

    @property
    def name(self) -> str:
        """The path as it was given."""
        return self._name

    def __enter__(self) -> AtomicWriter:
        old_mode = self._check_target()
        try:
            self._fd = os.open(self._tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if old_mode is not None:
                os.fchmod(self._fd, old_mode)
            if is_in_memory(self._fd):
                self._turn = threading.Lock()
            else:
                self._direct.open(self._tmp)
        except OSError as error:
            self._discard()
            raise from_os_error(error, "cannot create the file", where=self._name) from error
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._written

    def write(self, buffer: Any) -> None:
        """See `Sink.write`."""
        self.write_all([buffer])

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        """See `Sink.write_all`. Whole pieces go past the page cache where the file system offers that.

        Several threads write more where the file system lets them into one file at the same time; in memory they take turns.
        """
        self._check_open()
        jobs, offset = [], self._written
        for views in pieces(buffers, offset):
            jobs.append((offset, views))
            offset += sum(view.nbytes for view in views)
        errors: list[OSError] = []

        def write_piece(job: tuple[int, list[memoryview]]) -> None:
            # Errors are collected: the file must not be closed while other threads still write to it.
            if not errors:
                try:
                    with self._turn:
                        if not self._direct.write(*job):
                            _write_at(self._fd, *job)
                except OSError as error:
                    errors.append(error)

        self._is_whole = False
        for _ in map(write_piece, jobs):
            pass
        if errors:
            raise from_os_error(errors[0], "cannot write the file", where=self._name) from errors[0]
        self._written = offset
        self._is_whole = True

    def commit(self) -> None:
        """Makes what was written the file of that name, in one step; blocks until it is durable.

        Raises:
            AlreadyExistsError, NoSpaceError, StorageError: nothing is in place, unless the message says so.
            UsageError: writing has failed before.
        """
        self._check_open()
        try:
            self._direct.close()
            if self._durable:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            # Some file systems report a full disk only here.
            os.close(fd)
            self._check_target()
            if self._overwrite:
                os.replace(self._tmp, self._target)
            else:
                self._rename_to_free_name()
        except StorageError:
            raise
        except OSError as error:
            raise from_os_error(error, "cannot write the file", where=self._name) from error
        if self._durable:
            self._fsync_folder()

    def _check_open(self) -> None:
        if self._fd < 0 or not self._is_whole:
            raise UsageError("the file is not open for writing, or writing to it failed", where=self._name)

    def _check_target(self) -> int | None:
        """Permission bits of the file to replace, or None; raises if what is there must not be replaced."""
        if not os.path.isdir(self._folder):
            raise NotFoundError(
                f"the folder {self._folder} does not exist",
                errno=errno.ENOENT,
                where=self._name,
                hint="Create the folder first",
            )
        try:
            mode = os.lstat(self._target).st_mode
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, "cannot write the file", where=self._name) from error
        if not stat.S_ISREG(mode):
            raise UsageError(f"{kind_of(mode)}, cannot be replaced by a file", where=self._name)
        if not self._overwrite:
            raise self._exists()
        return stat.S_IMODE(mode) & 0o777

    def _exists(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            "the file exists already",
            errno=errno.EEXIST,
            where=self._name,
            hint="Choose another name, or allow overwriting",
        )

    def _rename_to_free_name(self) -> None:
        """Renames without replacing: unlike rename, link and O_EXCL fail if the name is taken by now."""
        try:
            os.link(self._tmp, self._target)
        except FileExistsError as error:
            raise self._exists() from error
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            try:
                os.close(os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError as taken:
                raise self._exists() from taken
            try:
                os.replace(self._tmp, self._target)
            except BaseException:
                os.unlink(self._target)
                raise
        else:
            os.unlink(self._tmp)

    def _fsync_folder(self) -> None:
        try:
            fsync_folder(self._folder)
        except OSError as error:
            what = "the file is in place, but its folder could not be made durable"
            raise from_os_error(error, what, where=self._name) from error

    def _discard(self) -> None:
        with suppress(OSError):
            self._direct.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
        with suppress(OSError):
            os.unlink(self._tmp)


def _write_at(fd: int, offset: int, views: list[memoryview]) -> None:
    """Write all views one behind the other; short writes are continued."""
    while views:
        count = os.pwritev(fd, views, offset)
        offset += count
        first = 0
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        views = views[first:]
        if count:
            views[0] = views[0][count:]
