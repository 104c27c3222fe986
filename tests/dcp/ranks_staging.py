"""What two ranks check of asynchronous saves with ThinStager."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_support import run_as_rank
from small_model import assert_same, flat, full, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from thinpoint.dcp import PerRank, ThinFolder, ThinReader, ThinStager, ThinWriter
from thinpoint.errors import NoSpaceError, NotEnoughMemoryError, from_os_error
from thinpoint.store import LocalStore


def async_save(state: dict[str, Any], folder: Any, **options: Any) -> Any:
    return dcp.async_save(state, storage_writer=ThinWriter(folder), async_stager=ThinStager(), **options)


def overwrite(state: dict[str, Any]) -> None:
    """As training does: every tensor in place."""
    for value in flat(state).values():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                (value.to_local() if isinstance(value, DTensor) else value).fill_(77)


def file_of_this_rank(folder: Path) -> bytes:
    (found,) = folder.glob(f"*-rank{dist.get_rank():05d}.thin")
    return found.read_bytes()


def what_was_staged_is_saved(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for way in ("fsdp", "tp", "plain"):
        state = state_of(mesh, way, seed=1)
        expected = full(state)
        (folder / way).mkdir(exist_ok=True)
        dcp.save(state, storage_writer=ThinWriter(folder / way / "sync"))
        future = async_save(state, folder / way / "async")
        overwrite(state)
        future.result()
        target = state_of(mesh, way, seed=2)
        dcp.load(target, storage_reader=ThinReader(folder / way / "async"))
        assert_same(full(target), expected)
        dist.barrier()
        assert file_of_this_rank(folder / way / "async") == file_of_this_rank(folder / way / "sync"), way


def replicated_and_empty_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    state = {
        "replicated": distribute_tensor(torch.randn(6, 5), mesh, [Replicate()]),
        "one_row": distribute_tensor(torch.randn(1, 5), mesh, [Shard(0)]),
        "uneven": distribute_tensor(torch.randn(5, 3), mesh, [Shard(1)]),
        "scalar": torch.tensor(3.0),
        "tied": {"a": torch.arange(5.0), "b": None},
        "own": PerRank({"seed": torch.full((3,), dist.get_rank())}),
        "objects": {"lr": 0.1, "list": [1, 2, 3]},
    }
    state["tied"]["b"] = state["tied"]["a"]
    expected = full({name: value for name, value in state.items() if name != "own"})
    future = async_save(state, folder / "step")
    overwrite({name: value for name, value in state.items() if name != "own"})
    state["objects"]["list"].append(4)
    future.result()
    with ThinFolder(folder / "step") as saved:
        assert saved.read("replicated").numpy().tobytes() == expected["replicated"].numpy().tobytes()
        assert saved.load_object("objects.list") == [1, 2, 3]
        assert [len(saved.tensors[name].chunks) for name in ("replicated", "uneven", "tied.b")] == [1, 2, 1]
        saved.verify(deep=True)
    mine: dict[str, Any] = {"seed": torch.zeros(3, dtype=torch.int64)}
    target = full({name: value for name, value in state.items() if name != "own"})
    dcp.load({**target, "own": PerRank(mine)}, storage_reader=ThinReader(folder / "step"))
    assert target.pop("objects") == {"lr": 0.1, "list": [1, 2, 3]} and expected.pop("objects")
    assert_same(target, expected)
    assert mine["seed"].tolist() == [dist.get_rank()] * 3


class FullDisk(LocalStore):
    """A disk on which a data file does not find room; small files do."""

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        with super().sink(name, overwrite=overwrite) as sink:
            yield sink
            if name.endswith(".thin"):
                full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise from_os_error(full_disk, "cannot write the file", where=name)


def an_error_while_writing_is_in_the_future_of_every_rank(folder: Path) -> None:
    state = {"w": torch.randn(1000), "v": torch.randn(1000)}
    future = async_save(state, FullDisk(folder) if dist.get_rank() == 1 else folder)
    error = future.exception()
    assert isinstance(error, CheckpointException), error
    assert set(error.failures) == {1} and isinstance(error.failures[1][0], NoSpaceError), error
    async_save(state, folder).result()
    with ThinFolder(folder) as saved:
        assert saved.read("w").numpy().tobytes() == state["w"].numpy().tobytes()


def an_error_while_staging_is_raised_at_once(folder: Path) -> None:
    state = {"w": torch.randn(3000), "v": torch.randint(0, 100, (3000,))}
    for stager in (ThinStager(host_memory=1000), ThinStager(host_memory=1)):
        try:
            dcp.async_save(state, storage_writer=ThinWriter(folder), async_stager=stager)
        except NotEnoughMemoryError as error:
            assert "the state is unchanged" in str(error)
        else:
            raise AssertionError("nothing was raised")
    dist.barrier()
    assert not list(folder.iterdir())


def plans_are_cached_over_several_saves(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for step in range(3):
        state = {"w": distribute_tensor(torch.full((100, 3), float(step)), mesh, [Shard(0)])}
        future = async_save(
            state, folder / f"step{step}", planner=DefaultSavePlanner(enable_plan_caching=True)
        )
        overwrite(state)
        future.result()
        with ThinFolder(folder / f"step{step}") as saved:
            assert saved.read("w").unique().tolist() == [step]
        dist.barrier()


def another_process_is_refused(folder: Path) -> None:
    state = {"w": torch.randn(100)}
    future = async_save(state, folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    error = future.exception()
    assert "AsyncCheckpointerType.THREAD" in str(error), error
    dist.barrier()
    assert not list(folder.iterdir())


CHECKS = [
    what_was_staged_is_saved,
    replicated_and_empty_shards,
    an_error_while_writing_is_in_the_future_of_every_rank,
    an_error_while_staging_is_raised_at_once,
    plans_are_cached_over_several_saves,
    another_process_is_refused,
]

if __name__ == "__main__":
    run_as_rank(CHECKS)
