"""Files on a local disk: read by range, written to a temporary name and put in place in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from thinpoint.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    UsageError,
    from_os_error,
)
from thinpoint.store.buffers import check_range, pieces, truncated, writable_bytes
from thinpoint.store.contract import Mapper

_MAX_TMP_STEM_BYTES = 200
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM}


class LocalSource:
    """A regular file, open for reading. May be shared between threads and used after a fork.

    Args:
        path: a path; a symbolic link is followed.

    Raises:
        NotFoundError, PermissionDeniedError, StorageError: the system refused.
        UsageError: the path is a folder, a device or a pipe.
    """

    _fd = -1

    def __init__(self, path: str | bytes | os.PathLike[Any]) -> None:
        self._name = _decode(path)
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer; regular files ignore it.
            fd = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise from_os_error(error, "cannot open the file", where=self._name) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise UsageError(f"{_kind(status.st_mode)}, no regular file", where=self._name)
        self._fd = fd
        self._size = status.st_size

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> np.ndarray:
        """See `Source.read_at`."""
        check_range(offset, size, self._size, self._name)
        out = np.empty(size, np.uint8)
        self.read_into(offset, out)
        return out

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
        self._name = _decode(path)
        if self._name.endswith(os.sep):
            raise UsageError("the path is a folder, cannot be replaced by a file", where=self._name)
        self._overwrite = overwrite
        self._durable = durable
        self._target = os.path.realpath(self._name)
        self._folder, stem = os.path.split(self._target)
        short = os.fsdecode(os.fsencode(stem)[:_MAX_TMP_STEM_BYTES])
        self._tmp = os.path.join(self._folder, f".{short}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
        self._fd = -1
        self._written = 0

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
        """See `Sink.write_all`: one thread of `map` copies 1 to 3 GB/s into the page cache.

        Several threads write more where the file system lets them into one file at the same time; tmpfs does not.
        """
        if self._fd < 0:
            raise UsageError("the file is not open for writing", where=self._name)
        jobs, offset = [], self._written
        for views in pieces(buffers):
            jobs.append((offset, views))
            offset += sum(view.nbytes for view in views)
        errors: list[OSError] = []

        def write_piece(job: tuple[int, list[memoryview]]) -> None:
            # Errors are collected: the file must not be closed while other threads still write to it.
            if not errors:
                try:
                    _write_at(self._fd, *job)
                except OSError as error:
                    errors.append(error)

        for _ in map(write_piece, jobs):
            pass
        if errors:
            raise from_os_error(errors[0], "cannot write the file", where=self._name) from errors[0]
        self._written = offset

    def commit(self) -> None:
        """Makes what was written the file of that name, in one step; blocks until it is durable.

        Raises:
            AlreadyExistsError, NoSpaceError, StorageError: nothing is in place, unless the message says so.
        """
        if self._fd < 0:
            raise UsageError("the file is not open for writing", where=self._name)
        try:
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
            raise UsageError(f"{_kind(mode)}, cannot be replaced by a file", where=self._name)
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
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_FSYNC:
                what = "the file is in place, but its folder could not be made durable"
                raise from_os_error(error, what, where=self._name) from error

    def _discard(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
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


def _decode(path: str | bytes | os.PathLike[Any]) -> str:
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise UsageError("no path", expected="a string or os.PathLike", actual=type(path).__name__) from error
    if "\0" in name:
        raise UsageError("a path cannot hold a zero byte", where=ascii(name))
    return name


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISDIR, "the path is a folder"),
        (stat.S_ISFIFO, "the path is a pipe"),
        (stat.S_ISSOCK, "the path is a socket"),
        (stat.S_ISBLK, "the path is a device"),
        (stat.S_ISCHR, "the path is a device"),
        (stat.S_ISLNK, "the path is a symbolic link that leads in a circle"),
    ):
        if is_kind(mode):
            return words
    return "the path is something special"
