"""The names in a directory of checkpoints."""

from __future__ import annotations

import re

from thinpoint.folder.names import (
    MANIFEST,
    MAX_STEP,
    data_name,
    is_id,
    new_id,
    save_id_in,
    save_id_of,
    tag_of,
)

__all__ = [
    "MANIFEST",
    "MAX_STEP",
    "RUNS",
    "TRASH",
    "data_name",
    "is_id",
    "manifest_name",
    "new_id",
    "run_id_of",
    "run_name",
    "save_id_in",
    "save_id_of",
    "step_folder",
    "step_of",
    "tag_of",
    "trash_label",
]

TRASH = "trash/"
RUNS = "runs/"

_STEP = re.compile(r"step-([0-9]{10,19})")
_RUN = re.compile(rf"{RUNS}([0-9a-f]+)\.json")


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
    return found[1] if found and is_id(found[1]) else None
