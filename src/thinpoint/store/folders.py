"""Folders of a local disk: made, made durable, renamed without replacing anything."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat

_NO_FOLDER_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM}
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def fsync_folder(folder: str) -> None:
    """Makes the names in a folder durable; does nothing on file systems that do not offer it.

    Raises:
        OSError: the system refused.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise


def make_folders(folder: str, root: str) -> None:
    """Makes a folder and those above it; on return all names from `root` down to it are durable.

    Also the names of folders that were there: another thread may have made them just now and not be that far yet.

    Args:
        folder: absolute path; `root` or below it.
        root: absolute path.

    Raises:
        FileNotFoundError: another thread has removed one of them, empty, in the meantime.
        OSError: the system refused.
    """
    chain = [folder]
    while chain[-1] != root:
        chain.append(os.path.dirname(chain[-1]))
    while not os.path.isdir(os.path.dirname(chain[-1])):
        chain.append(os.path.dirname(chain[-1]))
    for path in reversed(chain):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        fsync_folder(os.path.dirname(path))


def remove_empty_folders(folder: str, root: str) -> None:
    """Removes `folder` and those above it as long as they are empty; never `root` or what is above it."""
    with contextlib.suppress(OSError):
        while folder.startswith(root.rstrip("/") + "/"):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def rename_to_free_name(old: str, new: str) -> None:
    """Renames a file or folder in one step and replaces nothing.

    Where the system cannot do both at once (NFS), a file that appears at the very moment would be replaced.

    Raises:
        FileExistsError: the new name exists.
        OSError: the system refused.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        status = library.renameat2(
            _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(_RENAME_NOREPLACE)
        )
        number = ctypes.get_errno()
        if status == 0:
            return
        if number not in _NO_RENAMEAT2:
            raise OSError(number, os.strerror(number), old, None, new)
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)
