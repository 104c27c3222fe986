"""The names in a directory of checkpoints, and the ids that make them unique."""

from __future__ import annotations

import re
import secrets
import threading
import time

MANIFEST = "manifest.json"
TRASH = "trash/"
RUNS = "runs/"

MAX_STEP = 10**18

_TAG_CHARS = 10
_STEP = re.compile(r"step-([0-9]{10,19})")
_ID = re.compile(rf"[0-9a-f]{{{14 + _TAG_CHARS}}}")
_DATA = re.compile(rf"({_ID.pattern})-rank[0-9]{{5}}\.thin")
_RUN = re.compile(rf"{RUNS}({_ID.pattern})\.json")


def step_folder(step: int) -> str:
    """The folder of a training step, without a slash at its end."""
    return f"step-{step:010d}"


def step_of(folder: str) -> int | None:
    """The training step whose folder this is; None for any other name."""
    found = _STEP.fullmatch(folder)
    if found is None or step_folder(int(found[1])) != folder:
        return None
    return int(found[1])


def manifest_name(step: int) -> str:
    """The manifest of a training step, as a name in the store."""
    return f"{step_folder(step)}/{MANIFEST}"


def data_name(save_id: str, rank: int) -> str:
    """A rank's data file, as a name in its step's folder."""
    return f"{save_id}-rank{rank:05d}.thin"


def save_id_of(data_file: str) -> str | None:
    """The save that wrote a data file, from its name in the folder; None for any other name."""
    found = _DATA.fullmatch(data_file)
    return found[1] if found else None


def save_id_in(name: str) -> str | None:
    """The first id of a save anywhere in a name, as in that of a temporary file; None without one."""
    found = _DATA.search(name)
    return found[1] if found else None


def trash_label(name: str) -> str | None:
    """The folder of the trash that a file lies in, an id; None for any other name."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] + "/" == TRASH and is_id(parts[1]) else None


def run_name(run_id: str) -> str:
    """The file of a run, as a name in the store."""
    return f"{RUNS}{run_id}.json"


def run_id_of(name: str) -> str | None:
    """The run whose file this is; None for any other name."""
    found = _RUN.fullmatch(name)
    return found[1] if found else None


def is_id(text: object) -> bool:
    """Whether this is the id of a run or a save."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def tag_of(any_id: str) -> str:
    """The end of an id, the same in that of a run and in those of all its saves."""
    return any_id[-_TAG_CHARS:]


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
