"""Checkpoints of many ranks through `torch.distributed.checkpoint`: a storage writer, reader and stager (`docs/dcp.md`).

`dcp.save(state, storage_writer=ThinWriter(path))` and `dcp.load(state, storage_reader=ThinReader(path))`; `ThinFolder` looks
into such a folder without a process group. Importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "PerRank": "thinpoint.dcp.rank_state",
    "RankState": "thinpoint.dcp.rank_state",
    "ThinFolder": "thinpoint.dcp.folder",
    "ThinReader": "thinpoint.dcp.reader",
    "ThinStager": "thinpoint.dcp.staging",
    "ThinWriter": "thinpoint.dcp.writer",
}

__all__ = ["PerRank", "RankState", "ThinFolder", "ThinReader", "ThinStager", "ThinWriter"]

if TYPE_CHECKING:
    from thinpoint.dcp.folder import ThinFolder
    from thinpoint.dcp.rank_state import PerRank, RankState
    from thinpoint.dcp.reader import ThinReader
    from thinpoint.dcp.staging import ThinStager
    from thinpoint.dcp.writer import ThinWriter


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thinpoint.dcp' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
