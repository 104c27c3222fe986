"""Host memory of a state that waits to be written by `dcp.async_save`: torch's stager beside ThinStager.

    python bench/dcp_staging.py [--gb 1] [--steps 100]

The state is that of the demo's model, trained here and repeated until it is large enough (weights, both moments of AdamW,
gradients), on the CPU. Each stager runs in a process of its own. What is measured: what the process holds more when the
state is staged (VmRSS), and the most that it held on the way (VmHWM), both less what it held before; and the time until
training may go on. Kernels are compiled before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from inputs import enlarge, items_of, read_state, state_of, train_state
from memory import release_free_memory, reset_peak, status_bytes
from results import describe, write
from rich.console import Console
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import thinpoint
from thinpoint.dcp import ThinStager

STAGERS = {
    "torch": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "thinpoint": ThinStager,
}
"""torch: what `dcp.async_save` uses unless it is given another."""

MIN_TENSOR_BYTES = 16 << 20


def measure(name: str, trained: Path, total_bytes: int) -> dict[str, Any]:
    """Stage in this process: memory and time."""
    state: dict[str, Any] = state_of(enlarge(items_of(read_state(trained)), total_bytes, MIN_TENSOR_BYTES))
    STAGERS[name]().stage({"warm": torch.randn(1 << 20)})
    release_free_memory()
    before = status_bytes("VmRSS")
    reset_peak()
    start = time.perf_counter()
    stager = STAGERS[name]()
    staged = stager.stage(state)
    seconds = time.perf_counter() - start
    peak = status_bytes("VmHWM") - before
    release_free_memory()
    held = status_bytes("VmRSS") - before
    assert len(staged) == len(state)
    stager.close()
    raw_bytes = sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())
    return {
        "stager": name,
        "raw_bytes": raw_bytes,
        "held_bytes": held,
        "peak_bytes": peak,
        "seconds": seconds,
    }


def main() -> None:
    """Measure both in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state, decimal")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--stager", choices=sorted(STAGERS), help=argparse.SUPPRESS)
    parser.add_argument("--trained", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stager:
        print(json.dumps(measure(options.stager, options.trained, int(options.gb * 1e9))))
        return
    console = Console(highlight=False)
    console.print(describe())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trained = f"{folder}/trained.thin"
        thinpoint.save(train_state(options.steps), trained)
        for name in STAGERS:
            command = [sys.executable, __file__, "--gb", str(options.gb), "--trained", trained]
            done = subprocess.run([*command, "--stager", name], check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout)
            rows.append(row)
            console.print(
                f"{name}: {row['raw_bytes'] / 1e9:.2f} GB staged in {row['held_bytes'] / 1e9:.3f} GB "
                f"({row['held_bytes'] / row['raw_bytes']:.3f} of it), peak {row['peak_bytes'] / 1e9:.3f} GB, "
                f"{row['seconds']:.2f} s"
            )
    console.print(f"Written: {write('dcp-staging', {'num_steps': options.steps, 'rows': rows})}")


if __name__ == "__main__":
    main()
