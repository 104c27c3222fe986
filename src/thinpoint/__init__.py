"""Exact training checkpoints, a fifth to a third smaller, on any machine.

`save` and `load` stand in for `torch.save` and `torch.load`. Importing this package imports neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinpoint.version import __version__

_PUBLIC = {
    "save": "thinpoint.api",
    "async_save": "thinpoint.api",
    "load": "thinpoint.api",
    "load_into": "thinpoint.api",
    "open": "thinpoint.api",
    "verify": "thinpoint.api",
    "SaveReport": "thinpoint.api",
    "SaveFuture": "thinpoint.api",
    "LoadIntoReport": "thinpoint.api",
    "VerifyReport": "thinpoint.api",
    "Checkpointer": "thinpoint.checkpoint",
    "CheckpointReport": "thinpoint.checkpoint",
    "RestoreReport": "thinpoint.checkpoint",
    "ThinFile": "thinpoint.opened",
    "StoredTensor": "thinpoint.opened",
    "ThinpointError": "thinpoint.errors",
}

__all__ = [
    "CheckpointReport",
    "Checkpointer",
    "LoadIntoReport",
    "RestoreReport",
    "SaveFuture",
    "SaveReport",
    "StoredTensor",
    "ThinFile",
    "ThinpointError",
    "VerifyReport",
    "__version__",
    "async_save",
    "errors",
    "load",
    "load_into",
    "open",
    "save",
    "verify",
]

if TYPE_CHECKING:
    from thinpoint import errors
    from thinpoint.api import (
        LoadIntoReport,
        SaveFuture,
        SaveReport,
        VerifyReport,
        async_save,
        load,
        load_into,
        open,
        save,
        verify,
    )
    from thinpoint.checkpoint import Checkpointer, CheckpointReport, RestoreReport
    from thinpoint.errors import ThinpointError
    from thinpoint.opened import StoredTensor, ThinFile


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("thinpoint.errors")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thinpoint' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
