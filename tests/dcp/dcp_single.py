"""Saves and loads of one process, and folders changed afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from thinpoint.dcp import ThinReader, ThinWriter
from thinpoint.dcp.folder import ThinFolder
from thinpoint.folder.layout import Layout
from thinpoint.folder.layout_file import dump_layout
from thinpoint.folder.manifest import Manifest, dump_manifest


def save(state: dict[str, Any], folder: Any, *, planner: Any = None, **options: Any) -> None:
    call(lambda: dcp.save(state, storage_writer=ThinWriter(folder, **options), planner=planner, no_dist=True))


def load(state: dict[str, Any], folder: Any, *, planner: Any = None, **options: Any) -> None:
    call(lambda: dcp.load(state, storage_reader=ThinReader(folder, **options), planner=planner, no_dist=True))


def call(function: Callable[[], Any]) -> Any:
    """Without DCP's warning that it is alone; the error itself instead of DCP's wrapping."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            return function()
        except CheckpointException as error:
            raise error.failures[0][0] from error


def rewrite(
    folder: Path,
    layout: Callable[[Layout], Layout] = lambda layout: layout,
    manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> None:
    """Another layout and manifest, consistent in themselves, as someone would write who means harm."""
    with ThinFolder(folder) as opened:
        before, record = opened.manifest, opened.manifest.layout
        assert record is not None
        data, record = dump_layout(layout(opened.layout), name=record.name)
    (folder / record.name).write_bytes(data)
    (folder / "manifest.json").write_bytes(dump_manifest(manifest(replace(before, layout=record))))
