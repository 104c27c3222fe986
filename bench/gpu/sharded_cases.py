"""How long FSDP2 training stands still for a checkpoint of all ranks: DCP with thinpoint's storage beside DCP with its own.

All ranks call every function here together. The device is idle and the ranks are level when a save is called. The stall is
the time until the call returns. Training goes on until the future is done, which is looked at after each step: then the
checkpoint counts as durable. What it costs training is the stall, and how much longer those steps take than as many alone. Of
all the slowest rank's time counts. The first save of each kind makes memory that later ones use again; it stands apart. The
last checkpoint of each kind is loaded by all ranks, and by one rank into whole tensors, and every bit compared with a copy
taken before the call.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.gpu.end_to_end import bytes_on_disk, same, tensors_of
from bench.gpu.fsdp import ShardedTrainer, blank, local, map_state, whole
from bench.gpu.measure import PeakMemory, release, synchronize
from bench.results import spread

from thinpoint.proof.stock_stager import SharedStager

STEPS_BETWEEN = 5
"""Steps of training before each save."""

STOCK_THREADS = 8

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all cases share.

    Attributes:
        saving: gloo; what the checkpoints' messages go through.
        agreeing: gloo; the benchmark's own.
        num_saves, num_loads: of each kind.
    """

    trainer: ShardedTrainer
    saving: dist.ProcessGroup
    agreeing: dist.ProcessGroup
    num_saves: int
    num_loads: int

    @property
    def device(self) -> torch.device:
        return self.trainer.data.device

    def level(self) -> None:
        """Wait until all ranks are here and their devices idle."""
        synchronize(self.device)
        dist.barrier(self.agreeing)

    def agreed(self, value: bool) -> bool:
        """The first rank's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.agreeing)
        return values[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to save, and to load what it saved.

    Attributes:
        writer: path -> StorageWriter.
        reader: path -> StorageReader.
        stager: for saves in the background, one for all of them; None saves while training waits.
    """

    writer: Callable[[Path], Any]
    reader: Callable[[Path], Any]
    stager: Any = None

    def save(self, job: Job, state: Row, path: Path) -> Future[Any] | None:
        """Save; a future that is done when the checkpoint is durable, or None if it is."""
        writer = self.writer(path)
        if self.stager is None:
            dcp.save(state, storage_writer=writer, process_group=job.saving)
            return None
        future = dcp.async_save(
            state, storage_writer=writer, process_group=job.saving, async_stager=self.stager
        )
        return getattr(future, "upload_completion", future)


def _stock(extensions: tuple[Any, ...] = (), stager: Any = None) -> Case:
    def writer(path: Path) -> Any:
        return dcp.FileSystemWriter(path, thread_count=STOCK_THREADS, _extensions=extensions or None)

    return Case(writer=writer, reader=dcp.FileSystemReader, stager=stager)


def _stock_zstd(device: torch.device) -> Case:
    from torch.distributed.checkpoint._extension import ZStandard

    return _stock((ZStandard(),))


def _stock_background(device: torch.device) -> Case:
    return _stock(stager=SharedStager(device))


def _thin(device: torch.device, background: bool = False) -> Case:
    from thinpoint.dcp import ThinReader, ThinStager, ThinWriter

    return Case(writer=ThinWriter, reader=ThinReader, stager=ThinStager() if background else None)


CASES: dict[str, Callable[[torch.device], Case]] = {
    f"dcp.save, {STOCK_THREADS} threads": lambda device: _stock(),
    "dcp.save, ThinWriter": _thin,
    f"dcp.async_save, pinned staging, {STOCK_THREADS} threads": _stock_background,
    "dcp.async_save, ThinWriter and ThinStager": lambda device: _thin(device, background=True),
    f"dcp.save, ZStandard, {STOCK_THREADS} threads": _stock_zstd,
}
"""Name -> device -> the case; the slowest last."""


class MachineMemory:
    """Peak memory in use on the machine beyond that at the start, in MiB; page cache and RAM disks do not count.

    Page-locked memory, which the driver may hold, is in it. A context manager.
    """

    PERIOD_S = 0.005

    def __enter__(self) -> MachineMemory:
        self._begin = self._peak = _machine_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            self._peak = max(self._peak, _machine_bytes())

    @property
    def peak_mib(self) -> float:
        """So far."""
        return (self._peak - self._begin) / 2**20


def _machine_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemTotal"] - sum(found[key] for key in ("MemFree", "Buffers", "Cached", "SReclaimable"))


def measure(job: Job, case: Case, folder: Path, with_loads: bool) -> Row:
    """This rank's times and memory of all saves and loads."""
    found: Row = {"stall": [], "durable": [], "alone": [], "meanwhile": [], "wrong": []}
    path = folder / "checkpoint"
    release(job.device)
    memory = PeakMemory(job.device)
    job.level()
    with MachineMemory() as machine:
        memory.start()
        for _ in range(job.num_saves):
            _save_once(job, case, path, found)
        found["host_mib"], _ = memory.stop()
        found["machine_mib"] = machine.peak_mib
    found["stored_bytes"] = bytes_on_disk(path)
    if with_loads:
        _load_all(job, case, path, found)
    return found


def _save_once(job: Job, case: Case, path: Path, found: Row) -> None:
    """One save in the place of the one before; what was saved is kept in `found` for loads to be compared with."""
    trainer = job.trainer
    found["alone"] += [_seconds(trainer.step, job.device) for _ in range(STEPS_BETWEEN)]
    state = trainer.state_dict()
    found.pop("expected", None)
    found["expected"] = map_state(state, lambda tensor: tensor.detach().clone())
    if dist.get_rank() == 0 and path.exists():
        shutil.rmtree(path)
    job.level()
    begin = time.perf_counter()
    saved = case.save(job, state, path)
    found["stall"].append(time.perf_counter() - begin)
    found["meanwhile"].append([])
    # All ranks take as many steps; the first is the last to be done, as it commits.
    while saved is not None and not job.agreed(saved.done()):
        found["meanwhile"][-1].append(_seconds(trainer.step, job.device))
    if saved is not None:
        saved.result()
    found["durable"].append(time.perf_counter() - begin)
    job.level()


def _load_all(job: Job, case: Case, path: Path, found: Row) -> None:
    """Load by all ranks, then whole tensors by the first alone."""
    expected = found["expected"]
    found["load"], found["load_by_one"] = [], []
    for _ in range(job.num_loads):
        target = map_state(expected, blank)
        job.level()
        begin = time.perf_counter()
        dcp.load(target, storage_reader=case.reader(path), process_group=job.saving)
        synchronize(job.device)
        found["load"].append(time.perf_counter() - begin)
        _compare(map_state(expected, local), map_state(target, local), "load by all ranks", found)
        del target
    reference = map_state(expected, whole)
    for _ in range(job.num_loads if dist.get_rank() == 0 else 0):
        target = map_state(reference, blank)
        begin = time.perf_counter()
        dcp.load(target, storage_reader=case.reader(path), no_dist=True)
        synchronize(job.device)
        found["load_by_one"].append(time.perf_counter() - begin)
        _compare(reference, target, "load by one rank", found)
        del target
    job.level()


def _compare(expected: Row, actual: Row, what: str, found: Row) -> None:
    """Note what came back changed, in tensors or elsewhere."""
    objects = [map_state(value, lambda tensor: torch.empty(0)) for value in (expected, actual)]
    if not same(tensors_of(expected), tensors_of(actual)) or str(objects[0]) != str(objects[1]):
        found["wrong"].append(what)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def summary(ranks: list[Row], raw_bytes: int) -> Row:
    """One row from all ranks': the slowest's times, the largest memory, and sums where ranks add up."""
    for rank, row in enumerate(ranks):
        if "error" in row:
            return {"error": f"rank {rank}: {row['error']}"}
        if row["wrong"]:
            return {"error": f"not exact: rank {rank}, {', '.join(row['wrong'])}"}

    def slowest(key: str) -> list[float]:
        return [max(values) for values in zip(*(row[key] for row in ranks if row.get(key)), strict=True)]

    stall, durable, alone = slowest("stall"), slowest("durable"), statistics.median(slowest("alone"))
    # For each save the slowest rank's time of each step.
    meanwhile = [
        [max(step) for step in zip(*of_save, strict=True)]
        for of_save in zip(*(row["meanwhile"] for row in ranks), strict=True)
    ]
    cost = [waited + sum(steps) - len(steps) * alone for waited, steps in zip(stall, meanwhile, strict=True)]
    all_steps = [step for steps in meanwhile for step in steps]
    row: Row = {
        "raw_bytes": raw_bytes,
        "stored_bytes": ranks[0]["stored_bytes"],
        "first": {"stall": stall[0], "durable": durable[0]},
        "stall": asdict(spread(stall[1:])),
        "durable": asdict(spread(durable[1:])),
        "cost": asdict(spread(cost[1:])),
        "step_alone": alone,
        "steps_meanwhile": asdict(spread(all_steps)) if all_steps else None,
        "machine_mib": max(row["machine_mib"] for row in ranks),
    }
    host_mib = [row["host_mib"] for row in ranks]
    row["host_mib"] = None if None in host_mib else max(host_mib)
    for key in ("load", "load_by_one"):
        times = slowest(key)
        row[key] = asdict(spread(times)) if times else None
    return row
