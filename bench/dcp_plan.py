"""What a checkpoint of very many ranks costs beside its tensors: DCP with thinpoint's storage beside DCP with its own files.

    python bench/dcp_plan.py [--ranks 1024] [--items 2000]

All ranks' plans are made in one process: FSDP2 with AdamW, every tensor cut over all ranks along its rows. DCP's own global
plan is made once. Then, each in a forked process, the writers do what the coordinator of a save does with plans and with
results, but no tensor is written: the ranks' files hold next to nothing. Last, in processes of their own, readers do what
every rank does before it plans a load. Memory is the kernel's high-water mark beyond what was held before.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dcp_plan_writers import READERS, WRITERS, Ready
from memory import release_free_memory, reset_peak, status_bytes
from results import describe, write
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Row = dict[str, Any]

_LAYER = {
    "attention.wq.weight": (4, 4096),
    "attention.wk.weight": (1, 4096),
    "attention.wv.weight": (1, 4096),
    "attention.wo.weight": (4, 4096),
    "feed_forward.w1.weight": (14, 4096),
    "feed_forward.w2.weight": (4, 14336),
    "feed_forward.w3.weight": (14, 4096),
    "attention_norm.weight": (4,),
    "ffn_norm.weight": (4,),
}
"""The parameters of a layer and the shape of a shard."""

_OBJECTS = ("lr", "betas", "weight_decay", "eps", "fused")


def shards(num_items: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The keys that lead to each tensor of the state, and the shape of every rank's shard."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    layer = 0
    while len(found) < num_items:
        for name, shape in _LAYER.items():
            fqn = f"layers.{layer}.{name}"
            found["model", fqn] = shape
            for moment in ("exp_avg", "exp_avg_sq"):
                found["optimizer", "state", fqn, moment] = shape
        layer += 1
    return dict(list(found.items())[:num_items])


def make_plan(rank: int, num_ranks: int, num_items: int) -> SavePlan:
    """What a rank's planner makes of its state; no object in it is shared with another rank's plan."""
    items = []
    mappings: dict[str, tuple[Any, ...]] = {}
    for keys, shape in shards(num_items).items():
        fqn = ".".join(keys)
        mappings[fqn] = keys
        offsets = torch.Size((rank * shape[0], *[0] * (len(shape) - 1)))
        items.append(
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shape)),
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size((num_ranks * shape[0], *shape[1:])),
                ),
            )
        )
    for name in _OBJECTS:
        keys = "optimizer", "param_groups", 0, name
        fqn = ".".join(map(str, keys))
        mappings[fqn] = keys
        items.append(WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO))
    return SavePlan(items, planner_data=mappings)


def timed(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Row, Any]:
    """Seconds on the clock and of CPU time and peak extra MiB of a call, and its result."""
    release_free_memory()
    before = status_bytes("VmRSS")
    reset_peak()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = function(*arguments, **named)
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    return {**found, "extra_mib": (status_bytes("VmHWM") - before) / 2**20}, result


def coordinate(ready: Ready, plans: list[SavePlan], global_plans: list[SavePlan], metadata: Any) -> Row:
    """What one writer takes for its part of a save, on the coordinator."""
    writer = ready.writer
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local, _ = timed(writer.prepare_local_plan, plans[0])
    prepare, prepared = timed(writer.prepare_global_plan, global_plans)
    results = ready.results(prepared)
    message = pickle.dumps(results[0])
    finish, _ = timed(writer.finish, metadata, results)
    if ".metadata" in ready.puts:
        finish["metadata_s"] = ready.puts[".metadata"][1] - ready.puts["layout"][1]
    return {
        "prepare_local_plan": local,
        "prepare_global_plan": prepare,
        "results_message_bytes": len(message),
        "finish": finish,
        "file_bytes": ready.file_bytes(),
    }


def in_a_fork(function: Callable[..., Row], *arguments: Any) -> Row:
    """The function's result, from a process that has this one's memory and gives its own back at its end."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def target() -> None:
        sending.send(function(*arguments))

    process = context.Process(target=target)
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a measuring process ended with status {process.exitcode}") from None
    finally:
        process.join()


def open_alone(name: str, folder: Path, num_repeats: int) -> Row:
    """What a rank takes to open the checkpoint, in new processes; medians."""
    command = [sys.executable, __file__, "--open", name, "--folder", str(folder)]
    rows = [json.loads(subprocess.check_output(command, text=True)) for _ in range(num_repeats)]
    return {key: median(row[key] for row in rows) for key in rows[0]}


def measure(num_ranks: int, num_items: int, folder: Path, num_repeats: int) -> Row:
    """Every writer and reader."""
    gc.disable()
    plans = [make_plan(rank, num_ranks, num_items) for rank in range(num_ranks)]
    gc.enable()
    found: Row = {"plan_message_bytes": len(pickle.dumps(plans[0])), "rows": {}}
    planner = DefaultSavePlanner()
    found["planner"], (global_plans, metadata) = timed(planner.create_global_plan, plans)
    for name, make in WRITERS.items():
        place = folder / name.replace(" ", "-")

        def run(make: Callable[[Path], Ready] = make, place: Path = place) -> Row:
            return coordinate(make(place), plans, global_plans, metadata)

        found["rows"][name] = in_a_fork(run)
    for name in READERS:
        place = folder / name.replace(" ", "-")
        found["rows"][name]["read_metadata"] = open_alone(name, place, num_repeats)
    return found


def as_table(found: Row) -> Table:
    """Writers in columns."""
    names = list(found["rows"])
    table = Table(
        title=f"{found['num_ranks']:,} ranks, {found['num_items']:,} tensors each", title_justify="left"
    )
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")

    def line(label: str, cell: Callable[[Row], str]) -> None:
        table.add_row(label, *(cell(row) for row in found["rows"].values()))

    for step in ("prepare_local_plan", "prepare_global_plan", "finish", "read_metadata"):
        line(f"{step}, s", lambda row, step=step: f"{row[step]['seconds']:.3f}")
        line("  of the CPU, s", lambda row, step=step: f"{row[step]['cpu_seconds']:.3f}")
        line("  MiB", lambda row, step=step: f"{row[step]['extra_mib']:.0f}")
    line(
        "of that .metadata, s", lambda row: f"{row['finish'].get('metadata_s', row['finish']['seconds']):.3f}"
    )
    line("results sent by a rank, kB", lambda row: f"{row['results_message_bytes'] / 1e3:.0f}")
    for label in dict.fromkeys(name for row in found["rows"].values() for name in row["file_bytes"]):
        line(f"{label}, MB", lambda row, label=label: f"{row['file_bytes'].get(label, 0) / 1e6:.2f}")
    planner = found["planner"]
    table.caption = (
        f"DCP's global plan, the same for all: {planner['seconds']:.1f} s, {planner['extra_mib']:.0f} MiB"
    )
    return table


def main() -> None:
    """Measure, print a table, write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--items", type=int, default=2000, help="tensors of the state, each on all ranks")
    parser.add_argument("--repeats", type=int, default=3, help="times that the checkpoint is opened")
    parser.add_argument("--out", type=Path, help="a JSON file instead of one in bench/results")
    parser.add_argument("--open", choices=list(READERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        reader = READERS[options.open](options.folder)
        print(json.dumps(timed(reader.read_metadata)[0]))
        return
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    console = Console(highlight=False)
    console.print(describe())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.ranks, options.items, Path(folder), options.repeats)
    found = {"num_ranks": options.ranks, "num_items": options.items, **found}
    console.print(as_table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    path = options.out or write("dcp-plan", found)
    console.print(f"Written: {os.fspath(path)}")


if __name__ == "__main__":
    main()
