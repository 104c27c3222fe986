"""Names of files in a store, and of those that are still being written."""

from __future__ import annotations

import os
import re
import secrets

from thinpoint.errors import UsageError

_MAX_STEM_BYTES = 200
_TEMPORARY = re.compile(r"\..*\.\d+-[0-9a-f]{16}\.tmp\Z", re.DOTALL)


def check_name(name: str, *, new: bool = False) -> str:
    """The name, if a store may use it.

    Args:
        name: relative, parts joined by "/".
        new: a file is to get this name: then it must not look like one that is still being written.

    Raises:
        UsageError: it is empty, absolute, holds a zero byte, or a part of it is empty, "." or "..".
    """
    if not isinstance(name, str):
        raise UsageError("the name of a file must be a string", actual=type(name).__name__)
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise UsageError(
            "this cannot be the name of a file in a store",
            expected='relative, parts joined by "/", none of them empty, "." or ".."',
            actual=ascii(name),
        )
    if new and is_temporary(name):
        raise UsageError("names of this form are kept for files that are still being written", actual=name)
    return name


def temporary_name(stem: str) -> str:
    """`.STEM.PID-RANDOM.tmp`: where a file is written until it is complete; never the same twice."""
    short = os.fsdecode(os.fsencode(stem)[:_MAX_STEM_BYTES])
    return f".{short}.{os.getpid()}-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """The last part of a name or path is what `temporary_name` makes."""
    return _TEMPORARY.match(name.rpartition("/")[2]) is not None
