"""Paths of a local disk."""

from __future__ import annotations

import os
import stat
from typing import Any

from thinpoint.errors import UsageError


def decode_path(path: str | bytes | os.PathLike[Any]) -> str:
    """A path as a string.

    Raises:
        UsageError: it is no path.
    """
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise UsageError("no path", expected="a string or os.PathLike", actual=type(path).__name__) from error
    if "\0" in name:
        raise UsageError("a path cannot hold a zero byte", where=ascii(name))
    return name


def kind_of(mode: int) -> str:
    """What is at a path that is no regular file, in words."""
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
