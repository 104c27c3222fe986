"""The names of the files of a checkpoint, and the ids that make them unique."""

from __future__ import annotations

import re
import secrets
import threading
import time

MANIFEST = "manifest.json"
DCP_METADATA = ".metadata"

MAX_STEP = 10**18

MAX_RANKS = 1 << 16
"""The most ranks that one checkpoint is made of; a rank has five digits in the name of its file."""

_TAG_CHARS = 10
_ID = re.compile(rf"[0-9a-f]{{{14 + _TAG_CHARS}}}")
_DATA = re.compile(rf"({_ID.pattern})-rank([0-9]{{5}})\.thin")
_LAYOUT = re.compile(rf"({_ID.pattern})-layout\.zst")


def data_name(save_id: str, rank: int) -> str:
    """A rank's data file, as a name in the checkpoint's folder."""
    return f"{save_id}-rank{rank:05d}.thin"


def layout_name(save_id: str) -> str:
    """The layout of a checkpoint of many ranks, as a name in its folder."""
    return f"{save_id}-layout.zst"


def save_id_of(data_file: str) -> str | None:
    """The save that wrote a data file, from its name in the folder; None for any other name."""
    found = _DATA.fullmatch(data_file)
    return found[1] if found else None


def rank_of(data_file: str) -> int | None:
    """The rank that wrote a data file, from its name in the folder; None for any other name."""
    found = _DATA.fullmatch(data_file)
    return int(found[2]) if found else None


def save_id_of_layout(name: str) -> str | None:
    """The save that wrote a layout, from its name in the folder; None for any other name."""
    found = _LAYOUT.fullmatch(name)
    return found[1] if found else None


def save_id_in(name: str) -> str | None:
    """The first id of a save anywhere in a name, as in that of a temporary file; None without one."""
    found = _DATA.search(name) or _LAYOUT.search(name)
    return found[1] if found else None


def is_id(text: object) -> bool:
    """Whether this is the id of a run or a save."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def tag_of(any_id: str) -> str:
    """The end of an id, the same in that of a run and in those of all its saves."""
    return any_id[-_TAG_CHARS:]


def time_of(any_id: str) -> float:
    """When an id was made, in seconds since 1970."""
    return int(any_id[:-_TAG_CHARS], 16) / 1e6


_last_microsecond = 0
_clock_lock = threading.Lock()


def new_id(tag: str | None = None) -> str:
    """24 hexadecimal digits that sort by time, never the same twice: microseconds since 1970, then a tag.

    Args:
        tag: 10 hexadecimal digits; None for random ones.
    """
    global _last_microsecond  # noqa: PLW0603
    with _clock_lock:
        _last_microsecond = max(time.time_ns() // 1000, _last_microsecond + 1)
        return f"{_last_microsecond:014x}{tag or secrets.token_hex(_TAG_CHARS // 2)}"
