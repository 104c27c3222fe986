"""The ways to save a checkpoint that are put beside each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import thinpoint
from thinpoint.proof.tables import ASYNC, OVERLAP


@dataclass(frozen=True, kw_only=True)
class Saver:
    """A way to save.

    Attributes:
        name: for people.
        begin: state, path -> a future that is done when the checkpoint is durable; None if it is on return.
        load: path -> the state, to compare; None where that is not ours to show.
        close: gives back what all saves shared.
    """

    name: str
    begin: Callable[[Any, Path], Future[Any] | None]
    load: Callable[[Path], Any] | None = None
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A way to save that cannot be measured here, and why."""

    name: str
    reason: str


def savers(device: torch.device) -> list[Saver | Unavailable]:
    """All of them, in the order in which they are shown."""
    return [
        _thin(ASYNC),
        _thin(OVERLAP, overlap=True),
        _thin("thinpoint.async_save, codec raw", codec="raw"),
        Saver(name="torch.save", begin=_torch_save),
        dcp_async_save(device),
    ]


def _thin(name: str, **options: Any) -> Saver:
    def begin(state: Any, path: Path) -> Future[Any]:
        return thinpoint.async_save(state, path, **options).upload_completion

    return Saver(name=name, begin=begin, load=thinpoint.load)


def _torch_save(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_async_save(device: torch.device) -> Saver | Unavailable:
    """torch.distributed.checkpoint.async_save in one process, staged in page-locked memory that all saves share."""
    import torch.distributed.checkpoint as dcp

    name = "dcp.async_save"
    try:
        # Not in every version that thinpoint runs with.
        from thinpoint.proof.stock_stager import SharedStager
    except ImportError as error:
        return Unavailable(name=name, reason=str(error))
    stager = SharedStager(device)

    def begin(state: Any, path: Path) -> Future[Any]:
        future: Any = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(path, thread_count=8),
            async_stager=stager,
            no_dist=True,
        )
        return getattr(future, "upload_completion", future)

    return Saver(name=name, begin=begin, close=stager.end)
