"""Measures checkpoints of FSDP2 training on several GPUs of one machine; prints a table last.

    python -m bench.gpu.sharded --out FOLDER --ranks 2
    python -m bench.gpu.sharded --out FOLDER --ranks 2 --device cpu --tiny

Starts a process for each rank itself. NCCL (on a CPU gloo) for training, gloo for the saves. One JSON file, written after
each case. Cases that would begin after --max-s are left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.gpu import fsdp, sharded_cases, states
from bench.gpu.end_to_end import tensors_of
from bench.gpu.measure import release
from bench.gpu.record import Record, attempt
from bench.gpu.sharded_cases import CASES, Case, Job
from bench.gpu.tables import render

import thinpoint
from thinpoint.proof.record import filesystem
from thinpoint.proof.stock_stager import SharedStager

TIMEOUT = datetime.timedelta(seconds=120)
"""A rank that fails alone leaves the others waiting for so long."""

NUM_SAVES = 4


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.sharded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the benchmark out")
    parser.add_argument("--max-s", type=float, default=150.0, help="begin nothing after so many seconds")
    parser.add_argument("--ram-dir", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument(
        "--disk-dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk"
    )
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Start the ranks, or be one of them."""
    options = arguments()
    if options.begin is not None:
        run_rank(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), "-m", "bench.gpu.sharded", *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.exit(subprocess.call([*command, "--begin", str(time.time())], env=environment))


def run_rank(options: argparse.Namespace) -> None:
    """One rank of the run."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    with process_group(options.device) as device:
        trainer = fsdp.ShardedTrainer(fsdp.recipe(options.tiny), states.text(device, tuning=False))
        job = Job(
            trainer=trainer,
            saving=dist.new_group(backend="gloo", timeout=TIMEOUT),
            agreeing=dist.new_group(backend="gloo", timeout=TIMEOUT),
            num_saves=NUM_SAVES,
            num_loads=NUM_SAVES - 1,
        )
        for _ in range(trainer.recipe.num_steps):
            trainer.step()
        warm_up(job)
        record = new_record(options, job) if dist.get_rank() == 0 else None
        measure_places(options, job, record)
        if record:
            print(render([record.values]), flush=True)
            print(f"Written: {record.path}")


@contextmanager
def process_group(device_type: str) -> Iterator[torch.device]:
    """The group of all ranks, and this rank's device."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def warm_up(job: Job) -> None:
    """Compile the kernels for this state, which is not to be measured."""
    shards = fsdp.map_state(job.trainer.state_dict(), fsdp.local)
    with tempfile.TemporaryFile() as file:
        thinpoint.save(shards, file)
        file.seek(0)
        thinpoint.load_into(file, fsdp.map_state(shards, fsdp.blank))


def new_record(options: argparse.Namespace, job: Job) -> Record:
    """The record of the run."""
    settings = {key: str(getattr(options, key)) for key in ("ranks", "device", "tiny", "max_s")}
    record = Record(options.out, "gpu-sharded", job.device, settings)
    num_parameters = sum(parameter.numel() for parameter in job.trainer.model.parameters())
    about = {
        "num_ranks": dist.get_world_size(),
        "num_parameters": num_parameters,
        "num_steps": job.trainer.num_steps,
        "loss": job.trainer.loss.item(),
    }
    record.values.update(state=about, places={}, skipped=[])
    return record


def measure_places(options: argparse.Namespace, job: Job, record: Record | None) -> None:
    """Every case on the RAM disk, then on the disk."""
    raw_bytes = global_bytes(job)
    for place, folder in (("RAM disk", options.ram_dir), ("disk", options.disk_dir)):
        rows: list[dict[str, Any]] = []
        if record:
            record.values["places"][place] = {"filesystem": filesystem(folder), "rows": rows}
        for name, make in CASES.items():
            if job.agreed(time.time() - options.begin > options.max_s):
                if record:
                    record.values["skipped"].append(f"{place}: {name}")
                    record.write()
                continue
            found = measure_case(job, make, folder, with_loads=place == "RAM disk")
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, found, group=job.agreeing)
            if record:
                rows.append({"name": name, **sharded_cases.summary(ranks, raw_bytes)})
                record.write()
                print(f"{place}, {name}: {rows[-1]}", flush=True)


def measure_case(
    job: Job, make: Callable[[torch.device], Case], folder: Path, with_loads: bool
) -> dict[str, Any]:
    """This rank's numbers of a case, or its error; what the case wrote is removed."""
    shared = [tempfile.mkdtemp(dir=folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0, group=job.agreeing)

    def measure() -> dict[str, Any]:
        case = make(job.device)
        try:
            found = sharded_cases.measure(job, case, Path(shared[0]), with_loads)
            found.pop("expected")
            return found
        finally:
            if isinstance(case.stager, SharedStager):
                case.stager.end()
            elif case.stager is not None:
                case.stager.close()

    found = attempt(measure)
    release(job.device)
    dist.barrier(job.agreeing)
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    return found


def global_bytes(job: Job) -> int:
    """Bytes of all tensors of the state, a sharded one's counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(job.trainer.state_dict()))


if __name__ == "__main__":
    main()
