"""Measures what a training loop waits for: stalls of saves, and saves and loads at storage of given rates.

    python -m bench.gpu.saving --out FOLDER
    python -m bench.gpu.saving --out FOLDER --device cpu --tiny

A large model is one of 1.2B parameters. One JSON file for each of the two, written as soon as it is measured. Pieces
that would begin after --max-s are left out and named.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench.gpu import stall, states, throttled
from bench.gpu.measure import copy_rates
from bench.gpu.record import Record
from bench.gpu.tables import render
from bench.gpu.training import Trainer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.saving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the benchmark out")
    parser.add_argument("--model", choices=("dense", "large"), default="dense")
    parser.add_argument("--only", choices=("stall", "throttled"))
    parser.add_argument("--steps", type=int, default=100, help="steps of training before the first save")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")
    parser.add_argument(
        "--async-only", action="store_true", help="stalls of asynchronous saves only: the others take long"
    )
    parser.add_argument("--max-s", type=float, default=240.0, help="begin nothing after so many seconds")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints go")
    return parser.parse_args()


def main() -> None:
    """Train, then measure both."""
    options = arguments()
    begin = time.perf_counter()
    device = torch.device(options.device)
    recipes = states.TINY if options.tiny else states.FULL
    trainer = Trainer(getattr(recipes, options.model), states.text(device, tuning=False))
    for _ in range(1 if options.tiny else options.steps):
        trainer.step()
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "folder")}
    about = {
        "num_parameters": sum(parameter.numel() for parameter in trainer.named.values()),
        "num_steps": trainer.num_steps,
        "loss": trainer.loss.item(),
    }
    if options.only != "throttled":
        measure_stalls(options, trainer, settings, about, begin)
    if options.only != "stall":
        measure_throttled(options, trainer, settings, about, begin)


def measure_stalls(
    options: argparse.Namespace,
    trainer: Trainer,
    settings: dict[str, str],
    about: dict[str, Any],
    begin: float,
) -> None:
    """How long saves keep training waiting."""
    device = torch.device(options.device)
    link = copy_rates(device, 1 << 20 if options.tiny else 1 << 30)["device_to_host"]
    stalls = Record(options.out, "gpu-stall", device, settings)
    stalls.values.update(state=about, rows=[], skipped=[])
    rows = stalls.values["rows"]

    def chosen(case: stall.Case) -> bool:
        if options.async_only and not case.is_async:
            return False
        if time.perf_counter() - begin > options.max_s:
            stalls.values["skipped"].append(case.name)
            return False
        return True

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in stall.measure_all(trainer, Path(folder), options.saves, chosen):
            rows.append(row)
            stalls.values.update(stall.target(rows, link["wall_gb_per_s"]["median"] * 1e9))
            stalls.write()
    stalls.write()
    print(render([stalls.values]), flush=True)
    print(f"Written: {stalls.path}")


def measure_throttled(
    options: argparse.Namespace,
    trainer: Trainer,
    settings: dict[str, str],
    about: dict[str, Any],
    begin: float,
) -> None:
    """Saves and loads at storage of given rates."""
    device = torch.device(options.device)
    rates = Record(options.out, "gpu-throttled", device, settings)
    rates.values.update(state=about, rows=[], skipped=[])

    def late(piece: str) -> bool:
        if time.perf_counter() - begin <= options.max_s:
            return False
        rates.values["skipped"].append(piece)
        return True

    for row in throttled.measure_all(trainer.state_dict(), device, 3, late):
        rates.values["rows"].append(row)
        rates.write()
    print(render([rates.values]), flush=True)
    print(f"Written: {rates.path}")


if __name__ == "__main__":
    main()
