"""A directory of checkpoints: many saves, committed one by one, never losing one.

Importing it imports no torch: listing and cleaning up need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Checkpointer": "thinpoint.checkpoint.checkpointer",
    "CheckpointFuture": "thinpoint.checkpoint.future",
    "CheckpointReport": "thinpoint.checkpoint.report",
    "RestoreReport": "thinpoint.checkpoint.report",
    "SkippedStep": "thinpoint.checkpoint.report",
}

__all__ = ["CheckpointFuture", "CheckpointReport", "Checkpointer", "RestoreReport", "SkippedStep"]

if TYPE_CHECKING:
    from thinpoint.checkpoint.checkpointer import Checkpointer
    from thinpoint.checkpoint.future import CheckpointFuture
    from thinpoint.checkpoint.report import CheckpointReport, RestoreReport, SkippedStep


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thinpoint.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
