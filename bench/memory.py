"""Peak extra memory of save and load, on a state of 4 GB that holds one tensor of 2 GB.

    python bench/memory.py [--gb 4] [--dir DIR]

Each of the two runs in a process of its own. What is measured: the kernel's own high-water mark of resident
memory (VmHWM in /proc/self/status, reset through /proc/self/clear_refs after the state was made), less what
the process held before; for load also less the tensors that it returns. Imports and compiled kernels are
loaded before, by a small save and load. Pages of the file in the page cache belong to no process and are
not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results import describe, write
from rich.console import Console

import thinpoint

LIMIT_MIB = 512
_CHUNK_ELEMS = 1 << 24


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that is given in kB, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Set VmHWM back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def release_free_memory() -> None:
    """Give back what the allocator keeps for later, or it would hide as much of the peak."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def make_state(total_bytes: int) -> dict[str, Any]:
    """Values spread as a trained model's are: one tensor of half the bytes, the rest in 64 of equal size."""
    torch.manual_seed(0)
    num_rows = total_bytes // 2 // 4 // 4096
    state = {"model": {"large": torch.empty(num_rows, 4096)}, "optimizer": {}}
    state["optimizer"] = {"state": {i: {"exp_avg": torch.empty(num_rows // 64, 4096)} for i in range(64)}}
    for tensor in [state["model"]["large"], *(s["exp_avg"] for s in state["optimizer"]["state"].values())]:
        for piece in tensor.view(-1).split(_CHUNK_ELEMS):
            piece.normal_(std=0.02)
    return state


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors of `make_state`."""
    moments = sum(entry["exp_avg"].nbytes for entry in state["optimizer"]["state"].values())
    return state["model"]["large"].nbytes + moments


def measure(action: str, path: Path, total_bytes: int) -> dict[str, Any]:
    """Run one action in this process; its peak extra memory and its time."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.thin"
        thinpoint.save(make_state(1 << 24), small)
        thinpoint.load(small)
    release_free_memory()
    state = make_state(total_bytes) if action == "save" else {}
    before = status_bytes("VmRSS")
    reset_peak()
    start = time.perf_counter()
    if action == "save":
        thinpoint.save(state, path)
        returned = 0
    else:
        returned = state_bytes(thinpoint.load(path))
    seconds = time.perf_counter() - start
    extra = status_bytes("VmHWM") - before - returned
    return {
        "action": action,
        "extra_mib": extra / 2**20,
        "seconds": seconds,
        "state_bytes": state_bytes(state) if action == "save" else returned,
        "file_bytes": path.stat().st_size,
    }


def main() -> None:
    """Measure save and load in processes of their own; exit status 1 if one is beyond the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=4.0, help="size of the state, decimal")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the file goes (default: the temporary folder)"
    )
    parser.add_argument("--action", choices=["save", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    total_bytes = int(options.gb * 1e9)
    if options.action:
        print(json.dumps(measure(options.action, options.path, total_bytes)))
        return
    console = Console(highlight=False)
    console.print(describe())
    rows = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for action in ("save", "load"):
            command = [sys.executable, __file__, "--gb", str(options.gb), "--action", action]
            command += ["--path", f"{folder}/state.thin"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout)
            rows.append(row)
            console.print(
                f"{action}: {row['extra_mib']:.0f} MiB beyond the {row['state_bytes'] / 1e9:.2f} GB state, "
                f"{row['seconds']:.1f} s, file {row['file_bytes'] / 1e9:.2f} GB"
            )
    console.print(f"Written: {write('memory', {'limit_mib': LIMIT_MIB, 'rows': rows})}")
    if any(row["extra_mib"] > LIMIT_MIB for row in rows):
        console.print(f"Beyond the limit of {LIMIT_MIB} MiB")
        sys.exit(1)


if __name__ == "__main__":
    main()
