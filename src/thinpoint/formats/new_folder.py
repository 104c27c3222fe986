"""A folder that appears under its name whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinpoint.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError, from_os_error
from thinpoint.store.folders import fsync_folder
from thinpoint.store.names import temporary_name


@contextmanager
def new_folder(target: str, *, overwrite: bool, is_replaceable: Callable[[str], bool]) -> Iterator[str]:
    """The path of an empty folder to fill; when the block ends without an error it is renamed to `target`, durable.

    With an error, what was in `target` before is untouched.

    Args:
        target: a local path.
        overwrite: replace a folder that exists.
        is_replaceable: whether a file of that name may be deleted with the folder that is replaced.

    Raises:
        AlreadyExistsError: it exists and `overwrite` is False.
        UsageError: it is no folder, or holds something else besides such files.
        NotFoundError: the folder that it is to lie in does not exist.
        StorageError: the system refused.
    """
    path = os.path.realpath(target)
    parent, stem = os.path.split(path)
    if not os.path.isdir(parent):
        raise NotFoundError(
            f"the folder {parent} does not exist",
            errno=errno.ENOENT,
            where=target,
            hint="Create the folder first",
        )
    check_folder_target(target, overwrite=overwrite, is_replaceable=is_replaceable)
    new, old = (os.path.join(parent, temporary_name(stem)) for _ in range(2))
    try:
        try:
            os.mkdir(new)
        except OSError as error:
            raise from_os_error(error, "cannot make the folder", where=target) from error
        yield new
        _put_in_place(new, old, path, target, overwrite=overwrite, is_replaceable=is_replaceable)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_folder_target(target: str, *, overwrite: bool, is_replaceable: Callable[[str], bool]) -> None:
    """Raises as `new_folder` unless a folder may be put there: before the work, not after it."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise AlreadyExistsError(
            "the folder exists already",
            errno=errno.EEXIST,
            where=target,
            hint="Choose another name, or allow it with --overwrite",
        )
    if not os.path.isdir(target):
        raise UsageError("there is something that is no folder", where=target)
    others = sorted(name for name in os.listdir(target) if not is_replaceable(name))
    if others:
        raise UsageError(
            "the folder holds other things than such a checkpoint, which would be deleted",
            where=target,
            actual=", ".join(others[:3]),
            hint="Choose another name",
        )


def _put_in_place(
    new: str, old: str, path: str, target: str, *, overwrite: bool, is_replaceable: Callable[[str], bool]
) -> None:
    check_folder_target(target, overwrite=overwrite, is_replaceable=is_replaceable)
    try:
        fsync_folder(new)
        if os.path.lexists(path):
            os.rename(path, old)
            try:
                os.rename(new, path)
            except OSError:
                os.rename(old, path)
                raise
        else:
            os.rename(new, path)
        fsync_folder(os.path.dirname(path))
        shutil.rmtree(old, ignore_errors=True)
    except StorageError:
        raise
    except OSError as error:
        raise from_os_error(error, "cannot put the folder in place", where=target) from error
