"""What two ranks check of asynchronous saves that another process writes, staged by torch's own stager."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_support import run_as_rank
from small_model import assert_same, flat, full, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from thinpoint.dcp import PerRank, ThinFolder, ThinReader, ThinWriter
from thinpoint.errors import StorageError


def shared_memory_stager() -> DefaultStager:
    """Copies on a thread into memory that another process can read; without options that need an accelerator."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )


def save_from_process(state: dict[str, Any], folder: Path, stager: DefaultStager) -> Any:
    """Returns when the state is staged: the future of the save."""
    response = dcp.async_save(
        state,
        storage_writer=ThinWriter(folder),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=stager,
    )
    response.staging_completion.result(timeout=60)
    return response.upload_completion


def overwrite(state: dict[str, Any], value: int) -> None:
    """As training does: every tensor in place."""
    with torch.no_grad():
        for tensor in flat(state).values():
            if isinstance(tensor, torch.Tensor):
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(value)


def what_was_staged_is_saved(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    stager = shared_memory_stager()
    for way in ("fsdp", "plain"):
        state = state_of(mesh, way, seed=1)
        state["extra"] = {
            "half": torch.randn(33, 5).bfloat16(),
            "step": torch.tensor(3),
            "nan": torch.full((7,), float("nan")),
        }
        own = {"seed": torch.full((3,), dist.get_rank()), "text": f"rank {dist.get_rank()}"}
        # The second save goes into the stager's memory of the first, and to the same process.
        for step in (1, 2):
            expected = full(state)
            below = folder / f"{way}{step}"
            upload = save_from_process({**state, "own": PerRank(own)}, below, stager)
            overwrite(state, 77 + step)
            own["seed"].fill_(-1)
            upload.result(timeout=120)
            assert len(multiprocessing.active_children()) == 1, "there is a process that writes"

            target = {**state_of(mesh, way, seed=2), "extra": full(state["extra"])}
            mine: dict[str, Any] = {}
            dcp.load({**target, "own": PerRank(mine)}, storage_reader=ThinReader(below))
            assert_same(full(target), expected)
            assert mine["text"] == f"rank {dist.get_rank()}"
            assert mine["seed"].tolist() == [dist.get_rank() if step == 1 else -1] * 3
            with ThinFolder(below) as saved:
                saved.verify(deep=True)
    stager.close()


def an_error_in_the_process_is_in_the_future_of_every_rank(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "file").touch()
    dist.barrier()
    stager = shared_memory_stager()
    state = {"w": torch.arange(1000.0)}
    error = save_from_process(state, folder / "file" / "below", stager).exception(timeout=120)
    assert isinstance(error, CheckpointException), error
    causes = [cause for cause, _ in error.failures.values()]
    assert causes and all(isinstance(cause, StorageError) for cause in causes), causes
    # The process goes on.
    save_from_process(state, folder / "good", stager).result(timeout=120)
    target = {"w": torch.zeros(1000)}
    dcp.load(target, storage_reader=ThinReader(folder / "good"))
    assert_same(target, state)
    stager.close()


CHECKS = [what_was_staged_is_saved, an_error_in_the_process_is_in_the_future_of_every_rank]

if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    run_as_rank(CHECKS)
