"""The logger of checkpoints: every record names the rank."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

_rank: int | None = None


def set_rank(rank: int) -> None:
    """From here on this is the rank of this process, whatever RANK says."""
    global _rank  # noqa: PLW0603
    _rank = rank


def rank() -> int:
    """The rank of this process: in torch.distributed, once a group saves, else as launchers state it in RANK, else 0."""
    if _rank is not None:
        return _rank
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    # Python 3.10 knows it without parameters only.
    _Adapter = logging.LoggerAdapter


class _WithRank(_Adapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        extra = {**(kwargs.get("extra") or {}), "rank": rank()}
        return f"rank {extra['rank']}: {msg}", {**kwargs, "extra": extra}


log = _WithRank(logging.getLogger("thinpoint"), {})
"""Logger "thinpoint"; records have the attribute `rank`, and their text begins with it."""
