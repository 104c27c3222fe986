"""How long a training loop stands still for a checkpoint: thinpoint's saves beside PyTorch's, of one model in training.

The device is idle when a save is called, so that what is measured is the save. The stall is the time until the call
returns; training then goes on, and what follows is the time until the checkpoint is durable and the length of the steps
meanwhile. The first save of each kind makes memory that later ones use again; it stands apart. The last checkpoint of each
kind is loaded, and every bit compared with a copy taken before the call.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.gpu.end_to_end import blank_copy, bytes_on_disk, remove, same, tensors_of
from bench.gpu.measure import release, synchronize
from bench.gpu.record import attempt
from bench.gpu.training import Trainer
from bench.results import spread

import thinpoint

STEPS_BETWEEN = 3
"""Steps of training before each save."""

Row = dict[str, Any]
Wait = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to save.

    Attributes:
        name: for people.
        save: state, path -> what waits until the checkpoint is durable and returns the report, if there is one.
        load: path, a state of the same structure -> state.
        close: gives back what all saves shared.
        is_async: training goes on before the checkpoint is durable.
    """

    name: str
    save: Callable[[Any, Path], Wait]
    load: Callable[[Path, Any], Any]
    close: Callable[[], object] = lambda: None
    is_async: bool = False


def thin_save(name: str, **options: Any) -> Case:
    """thinpoint.save."""

    def save(state: Any, path: Path) -> Wait:
        report = thinpoint.save(state, path, **options)
        return lambda: report

    return Case(name=name, save=save, load=lambda path, _: thinpoint.load(path))


def thin_async_save(name: str, **options: Any) -> Case:
    """thinpoint.async_save."""
    return Case(
        name=name,
        save=lambda state, path: thinpoint.async_save(state, path, **options).result,
        load=lambda path, _: thinpoint.load(path),
        is_async=True,
    )


def torch_save() -> Case:
    """torch.save and an fsync."""

    def save(state: Any, path: Path) -> Wait:
        torch.save(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return lambda: None

    return Case(name="torch.save", save=save, load=lambda path, _: torch.load(path, weights_only=True))


def dcp_save() -> Case:
    """torch.distributed.checkpoint.save in one process."""
    import torch.distributed.checkpoint as dcp

    def save(state: Any, path: Path) -> Wait:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=8), no_dist=True)
        return lambda: None

    return Case(name="dcp.save, 8 threads", save=save, load=_dcp_load)


def dcp_async_save(device: torch.device) -> Case:
    """torch.distributed.checkpoint.async_save, staged in page-locked memory that all saves share."""
    import torch.distributed.checkpoint as dcp

    from thinpoint.proof.stock_stager import SharedStager

    stager = SharedStager(device)

    def save(state: Any, path: Path) -> Wait:
        future = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(path, thread_count=8),
            async_stager=stager,
            no_dist=True,
        )
        return getattr(future, "upload_completion", future).result

    return Case(
        name="dcp.async_save, pinned staging, 8 threads",
        save=save,
        load=_dcp_load,
        close=stager.end,
        is_async=True,
    )


def _dcp_load(path: Path, like: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    dcp.load(like, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return like


def cases(device: torch.device) -> list[Case]:
    """Everything that is measured."""
    return [
        thin_save("thinpoint.save"),
        thin_async_save("thinpoint.async_save"),
        dcp_save(),
        dcp_async_save(device),
        thin_save("thinpoint.save, codec raw", codec="raw"),
        thin_async_save("thinpoint.async_save, codec raw", codec="raw"),
        torch_save(),
    ]


def measure(trainer: Trainer, entrant: Case, folder: Path, num_saves: int) -> Row:
    """Stall, seconds until durable, and steps meanwhile, of one way to save."""
    device = trainer.data.device
    stalls, durable, meanwhile, alone, stages = [], [], [], [], []
    num_bytes = raw_bytes = 0
    try:
        for number in range(num_saves):
            alone += [_seconds(trainer.step, device) for _ in range(STEPS_BETWEEN)]
            state = trainer.state_dict()
            last = number == num_saves - 1
            before = [tensor.clone() for tensor in tensors_of(state)] if last else []
            raw_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
            path = folder / f"{number}.out"
            synchronize(device)
            begin = time.perf_counter()
            wait = entrant.save(state, path)
            stalls.append(time.perf_counter() - begin)
            if entrant.is_async:
                meanwhile += [_seconds(trainer.step, device) for _ in range(STEPS_BETWEEN)]
            stages.append(getattr(wait(), "stages", {}))
            durable.append(time.perf_counter() - begin)
            num_bytes = bytes_on_disk(path)
            if last:
                loaded = entrant.load(path, blank_copy(state))
                if not same(before, tensors_of(loaded)):
                    return {"error": "not exact: bits came back changed"}
            remove(path)
    finally:
        entrant.close()
        release(device)
    return {
        "raw_bytes": raw_bytes,
        "stored_bytes": num_bytes,
        "first": {"stall": stalls[0], "durable": durable[0]},
        "stall": asdict(spread(stalls[1:])),
        "durable": asdict(spread(durable[1:])),
        "stages": {name: statistics.median(each[name] for each in stages[1:]) for name in stages[-1]},
        "step_alone": statistics.median(alone),
        "steps_meanwhile": asdict(spread(meanwhile)) if meanwhile else None,
    }


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def measure_all(
    trainer: Trainer, folder: Path, num_saves: int, chosen: Callable[[Case], bool] = lambda case: True
) -> Iterator[Row]:
    """A row for every way to save.

    Args:
        chosen: whether a way is to be measured, asked when its turn comes.
    """
    for entrant in cases(trainer.data.device):
        if chosen(entrant):
            count = max(2, num_saves // 2) if entrant.name == "torch.save" else num_saves
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                row = attempt(lambda e=entrant, f=inner, n=count: measure(trainer, e, Path(f), n))
            yield {"name": entrant.name, **row}


def target(rows: list[Row], link_bytes_per_s: float) -> Row:
    """How near thinpoint's asynchronous save comes to the link; empty if it was not measured.

    Args:
        link_bytes_per_s: measured rate of copies to page-locked host memory.
    """
    found: Row = {"link_gb_per_s": link_bytes_per_s / 1e9}
    for row in rows:
        if row["name"] == "thinpoint.async_save" and "error" not in row:
            least = row["stored_bytes"] / link_bytes_per_s
            found["target"] = {
                "compressed_over_link_s": least,
                "stall_over_that": row["stall"]["median"] / least,
                "met": row["stall"]["median"] <= 1.15 * least,
            }
    return found
