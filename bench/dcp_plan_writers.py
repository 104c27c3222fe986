"""The storage writers and readers that `dcp_plan.py` measures, and the results of ranks that wrote next to nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from thinpoint.dcp import ThinReader, ThinWriter
from thinpoint.dcp.record import RankRecord
from thinpoint.folder.names import data_name, new_id
from thinpoint.store.local_store import LocalStore

_ITEM_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A writer, and what else a save needs.

    Attributes:
        writer: new.
        results: the plans that its `prepare_global_plan` gave -> what `write_data` would give on each rank.
        file_bytes: after `finish`, the sizes of what it wrote, by name.
        puts: after `finish`, for each of these files when it began to be written and when it was, in seconds.
    """

    writer: StorageWriter
    results: Callable[[list[SavePlan]], list[list[WriteResult]]]
    file_bytes: Callable[[], dict[str, int]]
    puts: dict[str, tuple[float, float]] = field(default_factory=dict)


def stock(folder: Path) -> Ready:
    """DCP's own files."""

    def results(plans: list[SavePlan]) -> list[list[WriteResult]]:
        return [
            [
                WriteResult(
                    index=_own(item.index),
                    size_in_bytes=_ITEM_BYTES,
                    storage_data=_StorageInfo(f"__{rank}_0.distcp", _ITEM_BYTES * place, _ITEM_BYTES),
                )
                for place, item in enumerate(plan.items)
            ]
            for rank, plan in enumerate(plans)
        ]

    return Ready(
        writer=FileSystemWriter(folder), results=results, file_bytes=lambda: _sizes(folder, (".metadata",))
    )


def thin(folder: Path) -> Ready:
    """thinpoint's."""
    store = _ClockedStore(folder)
    writer = ThinWriter(store)

    def results(plans: list[SavePlan]) -> list[list[WriteResult]]:
        model = _write_one(writer)
        found = []
        for rank, plan in enumerate(plans):
            record = _copy_for(model, rank, folder)
            items = [WriteResult(_own(item.index), _ITEM_BYTES, rank) for item in plan.items]
            found.append([*items, WriteResult(MetadataIndex(""), record.file.num_bytes, record)])
        return found

    return Ready(
        writer=writer,
        results=results,
        file_bytes=lambda: _sizes(folder, ("layout", "manifest.json", ".metadata")),
        puts=store.puts,
    )


class _ClockedStore(LocalStore):
    """A folder that notes when each of its small files was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(os.fspath(folder))
        self.puts: dict[str, tuple[float, float]] = {}

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        begin = time.perf_counter()
        super().put(name, data, if_absent=if_absent)
        self.puts[_kind(name)] = begin, time.perf_counter()


def _write_one(writer: ThinWriter) -> RankRecord:
    """Write a file of one small tensor, as the first rank."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"x": torch.zeros(4)}, is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    results = writer.write_data(writer.prepare_global_plan([plan])[0], planner).value()
    return results[-1].storage_data


def _copy_for(model: RankRecord, rank: int, folder: Path) -> RankRecord:
    """The record of another rank, whose file is the same."""
    if rank == 0:
        return model
    name = data_name(new_id(), rank)
    os.link(folder / model.file.name, folder / name)
    return replace(model, rank=rank, file=replace(model.file, name=name))


def _own(index: MetadataIndex) -> MetadataIndex:
    """A copy that shares nothing, as one that another rank sent."""
    return MetadataIndex(index.fqn[:1] + index.fqn[1:], index.offset, index.index)


def _kind(name: str) -> str:
    return "layout" if name.endswith("-layout.zst") else name


def _sizes(folder: Path, kinds: tuple[str, ...]) -> dict[str, int]:
    return {_kind(path.name): path.stat().st_size for path in folder.iterdir() if _kind(path.name) in kinds}


WRITERS: dict[str, Callable[[Path], Ready]] = {"FileSystemWriter": stock, "ThinWriter": thin}
READERS: dict[str, Callable[[Path], StorageReader]] = {
    "FileSystemWriter": FileSystemReader,
    "ThinWriter": ThinReader,
}
"""By the writer's name."""
