"""What two ranks check of saves that fail, of damage, and of what ranks must agree on."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_support import run_as_rank
from small_model import assert_same, bits, full
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from thinpoint.dcp import PerRank, ThinFolder, ThinReader, ThinWriter
from thinpoint.errors import (
    AlreadyExistsError,
    DamagedFileError,
    IncompleteSaveError,
    NoSpaceError,
    UsageError,
    from_os_error,
)
from thinpoint.store import LocalStore

MIB = 1 << 20


def state_of(seed: int, num_elems: int = 100_000) -> dict[str, Any]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    # Random bits: they do not shrink, whatever codes them.
    whole = torch.randint(-(2**31), 2**31, (num_elems,), dtype=torch.int32)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": seed}


def loaded(folder: Path) -> Any:
    state = state_of(seed=50)
    state["w"].to_local().zero_()
    dcp.load(state, storage_reader=ThinReader(folder))
    return full(state)


def failure_of(save: Any) -> dict[int, BaseException]:
    """For each rank that failed its error, as every rank is told."""
    try:
        save()
    except CheckpointException as error:
        return {rank: cause for rank, (cause, _) in error.failures.items()}
    raise AssertionError("the save did not fail")


def data_files(folder: Path) -> set[str]:
    dist.barrier()
    found = {name for name in os.listdir(folder) if name.endswith(".thin")}
    dist.barrier()
    return found


class FullDisk(LocalStore):
    """A disk on which a data file does not find room; small files do."""

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        with super().sink(name, overwrite=overwrite) as sink:
            yield sink
            if name.endswith(".thin"):
                full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise from_os_error(full_disk, "cannot write the file", where=name)


def a_full_disk_on_one_rank(folder: Path) -> None:
    before = state_of(seed=1)
    dcp.save(before, storage_writer=ThinWriter(folder))
    names = data_files(folder)
    for full_rank in (0, 1):
        store = FullDisk(folder) if dist.get_rank() == full_rank else folder
        failures = failure_of(
            lambda store=store: dcp.save(state_of(seed=2), storage_writer=ThinWriter(store))
        )
        assert set(failures) == {full_rank}
        assert isinstance(failures[full_rank], NoSpaceError), failures
        assert failures[full_rank].errno == errno.ENOSPC
        assert_same(loaded(folder), full(before))
        assert names <= data_files(folder)


def a_file_that_the_system_cuts_short(folder: Path) -> None:
    before = state_of(seed=1)
    dcp.save(before, storage_writer=ThinWriter(folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        failures = failure_of(
            lambda: dcp.save(state_of(seed=2, num_elems=MIB), storage_writer=ThinWriter(folder))
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(failures) == {1} and isinstance(failures[1], NoSpaceError), failures
    assert_same(loaded(folder), full(before))


class LosingWriter(ThinWriter):
    """A folder that loses the file of rank 1 once it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        results = super().write_data(plan, planner)
        if dist.get_rank() == 1:
            os.unlink(Path(os.fspath(self.checkpoint_id)) / results.value()[-1].storage_data.file.name)
        return results


class ForgettingWriter(ThinWriter):
    """Rank 1 leaves out one of the tensors that it was to write."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if dist.get_rank() == 1:
            plan = SavePlan(plan.items[1:], plan.storage_data, plan.planner_data)
        return super().write_data(plan, planner)


def a_file_or_a_tensor_that_is_missing(folder: Path) -> None:
    before = state_of(seed=1)
    dcp.save(before, storage_writer=ThinWriter(folder))
    failures = failure_of(lambda: dcp.save(state_of(seed=2), storage_writer=LosingWriter(folder)))
    assert isinstance(failures[0], IncompleteSaveError) and "rank 1" in str(failures[0]), failures
    failures = failure_of(lambda: dcp.save(state_of(seed=2), storage_writer=ForgettingWriter(folder)))
    assert isinstance(failures[0], IncompleteSaveError), failures
    assert "w" in str(failures[0])
    assert_same(loaded(folder), full(before))
    # What the coordinator knew of is gone again.
    assert len(data_files(folder)) == 2


def folders_that_are_not_shared(folder: Path) -> None:
    own = folder / f"disk-of-{dist.get_rank()}"
    failures = failure_of(lambda: dcp.save(state_of(seed=1), storage_writer=ThinWriter(own)))
    assert isinstance(failures[0], IncompleteSaveError) and "same folder" in str(failures[0]), failures
    assert not (own / "manifest.json").exists()


def ranks_with_other_options(folder: Path) -> None:
    codec = ("zstd", "thin")[dist.get_rank()]
    failures = failure_of(lambda: dcp.save(state_of(seed=1), storage_writer=ThinWriter(folder, codec=codec)))
    text = str(failures[0])
    assert isinstance(failures[0], UsageError), failures
    assert "rank 0: codec zstd" in text and "rank 1: codec thin" in text, text
    # Before anything was written.
    assert data_files(folder) == set()


def a_corrupted_shard(folder: Path) -> None:
    state = state_of(seed=1)
    dcp.save(state, storage_writer=ThinWriter(folder))
    with ThinFolder(folder) as opened:
        name = opened.manifest.files[1].name
    if dist.get_rank() == 0:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
    dist.barrier()
    failures = failure_of(lambda: loaded(folder))
    assert set(failures) == {1}
    error = failures[1]
    assert isinstance(error, DamagedFileError) and name in str(error) and "tensors.w" in str(error), error
    with ThinFolder(folder) as opened:
        try:
            opened.verify()
        except DamagedFileError as found:
            assert name in str(found) and "tensors.w" in str(found), found
        else:
            raise AssertionError("verify did not see it")


def not_to_be_overwritten(folder: Path) -> None:
    before = state_of(seed=1)
    dcp.save(before, storage_writer=ThinWriter(folder, overwrite=False))
    writer = ThinWriter(folder, overwrite=False)
    failures = failure_of(lambda: dcp.save(state_of(seed=2), storage_writer=writer))
    assert isinstance(failures[0], AlreadyExistsError), failures
    assert_same(loaded(folder), full(before))


def plans_are_cached_over_several_saves(folder: Path) -> None:
    writer = ThinWriter(folder)
    for seed in range(3):
        state = state_of(seed)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, planner=planner)
        assert_same(loaded(folder), full(state))
        # Those of the save before are gone.
        assert len(data_files(folder)) == 2
    assert SavePlanner._cached_final_save_plan, "no plan was cached"


def in_the_background(folder: Path) -> None:
    state = state_of(seed=3)
    # Before: the save uses the same group, from another thread.
    before = full(state)
    future = dcp.async_save(state, storage_writer=ThinWriter(folder))
    state["w"].to_local().zero_()
    future.result()
    assert_same(loaded(folder), before)


def state_of_each_rank(folder: Path) -> None:
    own = {"seed": torch.tensor([dist.get_rank()] * 5), "position": dist.get_rank()}
    dcp.save({"loader": PerRank(dict(own)), "n": 1}, storage_writer=ThinWriter(folder))
    found: dict[str, Any] = {"seed": None, "position": None}
    dcp.load({"loader": PerRank(found), "n": 0}, storage_reader=ThinReader(folder))
    assert_same(found, own)
    if dist.get_rank() == 0:
        merged: list[Any] = []
        target: dict[str, Any] = {"seed": None, "position": None}

        def merge(values: list[Any], rank: int, world_size: int) -> Any:
            merged.extend(value["position"] for value in values)
            return values[1]

        group = dist.new_group([0], use_local_synchronization=True)
        state = {"loader": PerRank(target, merge, process_group=group)}
        dcp.load(state, storage_reader=ThinReader(folder), process_group=group)
        assert merged == [0, 1] and target["position"] == 1
        assert bits(target["seed"]) == bits(torch.tensor([1] * 5))
    dist.barrier()
    if dist.get_rank() == 0:
        dcp.save(
            {"loader": PerRank(dict(own), process_group=group)},
            storage_writer=ThinWriter(folder),
            process_group=group,
        )
    dist.barrier()
    merges: list[Any] = []
    found = {"position": None}
    state = {"loader": PerRank(found, lambda *told: merges.append(told) or {"position": told[1]})}
    dcp.load(state, storage_reader=ThinReader(folder))
    assert found == {"position": dist.get_rank()}
    assert [(len(values), rank, ranks) for values, rank, ranks in merges] == [(1, dist.get_rank(), 2)]


CHECKS = [
    a_full_disk_on_one_rank,
    a_file_that_the_system_cuts_short,
    a_file_or_a_tensor_that_is_missing,
    folders_that_are_not_shared,
    ranks_with_other_options,
    a_corrupted_shard,
    not_to_be_overwritten,
    plans_are_cached_over_several_saves,
    in_the_background,
    state_of_each_rank,
]

if __name__ == "__main__":
    run_as_rank(CHECKS)
