"""How long training stands still for a checkpoint of CPU tensors: thinpoint beside torch.save and DCP.

    python bench/stall.py [--gb 1] [--repeat 5] [--dir DIR]

A state as AdamW leaves it (weights, first and second moments, FP32) is saved to a folder again and again, by all contestants
in turn. *Stall* is the time until the call returns and the state may change; *durable* until the last byte is on the disk (for
torch.save and DCP, which do not wait for it, an fsync of their files is added). The first save of each is told apart from
the following ones. After each asynchronous save all tensors are changed in place at once; that what was written are the old
values is checked at the end, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import describe, spread, write
from rich.console import Console
from rich.table import Table

import thinpoint

State = dict[str, Any]
Wait = Callable[[], object]


def make_state(total_bytes: int) -> State:
    """Weights and moments, spread as a trained model's are, in 24 tensors."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, total_bytes // 24 // 4 // 1024)

    def values(scale: float) -> torch.Tensor:
        scales = torch.exp(torch.randn(rows, 1, generator=generator)) * scale
        return torch.randn(rows, 1024, generator=generator) * scales

    weights = {f"layer{i}.weight": values(0.02) for i in range(8)}
    moments = {i: {"exp_avg": values(1e-4), "exp_avg_sq": values(1e-4).square_()} for i in range(8)}
    return {"model": weights, "optimizer": {"state": moments}}


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in tensors(value)]


def sync(path: Path) -> None:
    """Make a file, or all files of a folder, durable."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            fd = os.open(each, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def torch_save(state: State, path: Path) -> Wait:
    torch.save(state, path)
    return lambda: sync(path)


def dcp_save(state: State, path: Path) -> Wait:
    from torch.distributed import checkpoint

    checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return lambda: sync(path)


def dcp_async_save(state: State, path: Path) -> Wait:
    from torch.distributed import checkpoint

    future = checkpoint.async_save(state, checkpoint_id=path, no_dist=True)
    return lambda: (getattr(future, "upload_completion", future).result(), sync(path))


def thinpoint_save(codec: str) -> Callable[[State, Path], Wait]:
    def save(state: State, path: Path) -> Wait:
        thinpoint.save(state, path, codec=codec)
        return lambda: None

    return save


def thinpoint_async_save(codec: str) -> Callable[[State, Path], Wait]:
    def save(state: State, path: Path) -> Wait:
        return thinpoint.async_save(state, path, codec=codec).result

    return save


CONTESTANTS: dict[str, Callable[[State, Path], Wait]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "dcp.async_save": dcp_async_save,
    "thinpoint.save": thinpoint_save("thin"),
    "thinpoint.async_save": thinpoint_async_save("thin"),
    "thinpoint.save, raw": thinpoint_save("raw"),
    "thinpoint.async_save, raw": thinpoint_async_save("raw"),
}


def measure(save: Callable[[State, Path], Wait], state: State, path: Path) -> tuple[float, float, int]:
    """Seconds of stall, seconds until it is durable, and bytes; the state is changed in between."""
    begin = time.perf_counter()
    wait = save(state, path)
    stall_s = time.perf_counter() - begin
    for tensor in tensors(state):
        tensor.neg_()
    wait()
    durable_s = time.perf_counter() - begin
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return stall_s, durable_s, sum(file.stat().st_size for file in files)


def check(state: State, folder: Path) -> None:
    """Raise unless an asynchronous save holds the values from before the change that follows its return."""
    expected = [tensor.clone() for tensor in tensors(state)]
    measure(CONTESTANTS["thinpoint.async_save"], state, folder / "check")
    for old, loaded in zip(expected, tensors(thinpoint.load(folder / "check")), strict=True):
        if not torch.equal(old.view(torch.int32), loaded.view(torch.int32)):
            raise SystemExit("values that changed after async_save had returned reached the file")


def main() -> None:
    """Measure all contestants in turn, print a table and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state, decimal")
    parser.add_argument("--repeat", type=int, default=5, help="saves of each, besides the first")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where files go (default: the temporary folder)"
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(describe())
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    state = make_state(int(options.gb * 1e9))
    raw_bytes = sum(tensor.nbytes for tensor in tensors(state))
    runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        for i in range(options.repeat + 1):
            for contestant, save in CONTESTANTS.items():
                path = folder / f"{i}"
                runs[contestant].append(measure(save, state, path))
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        check(state, folder)
    table = Table("", "first stall, s", "stall, s", "durable, s", "ratio", title=f"{raw_bytes / 1e9:.2f} GB")
    rows = []
    for contestant, measured in runs.items():
        later = measured[1:] or measured
        stall, durable = spread([run[0] for run in later]), spread([run[1] for run in later])
        ratio = raw_bytes / measured[-1][2]
        table.add_row(contestant, f"{measured[0][0]:.2f}", str(stall), str(durable), f"{ratio:.3f}")
        rows.append({"name": contestant, "stall_and_durable_s_and_bytes": measured})
    console.print(table)
    console.print(f"Written: {write('stall', {'raw_bytes': raw_bytes, 'rows': rows})}")


if __name__ == "__main__":
    main()
