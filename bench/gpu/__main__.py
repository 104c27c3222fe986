"""Measures thinpoint on a GPU and writes JSON files; prints their tables last.

    python -m bench.gpu --out FOLDER                    # everything, on the first GPU
    python -m bench.gpu --out FOLDER --only codec       # states, codec or e2e
    TRITON_INTERPRET=1 python -m bench.gpu --out FOLDER --device cpu --tiny

To be started in the root of a checkout, with thinpoint importable. Files are written after each piece: what was
measured before a run is cut short is kept. Pieces that would begin after --max-s are left out and named.
The environment variable THINPOINT_COMMIT names the commit where there is no Git.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench.gpu import codec, end_to_end, states
from bench.gpu.measure import copy_rates, release
from bench.gpu.record import Record
from bench.gpu.states import State, cached, zero_percent
from bench.gpu.tables import render

from thinpoint.proof.record import filesystem

PARTS = ("states", "codec", "e2e")
STATES = ("dense", "small", "fine-tune", "moe", "large")


class Run:
    """One run of the benchmark: options, records, and what is to be left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.begin = time.perf_counter()
        self.recipes = states.TINY if options.tiny else states.QUICK if options.quick else states.FULL
        settings = codec.Settings(num_repeats=3 if options.quick else 5, with_others=not options.quick)
        if options.tiny:
            settings = codec.Settings(
                in_flight_bytes=(1 << 20,), modes=((False, False),), num_repeats=0, with_others=False
            )
        self.settings = settings
        self.wanted = [part for part in PARTS if options.only in (None, part) or part == "states"]
        chosen = {**vars_as_json(options), "codec": asdict(settings)}
        self.records = {part: Record(options.out, f"gpu-{part}", self.device, chosen) for part in self.wanted}
        self.records["states"].values["states"] = {}
        if "codec" in self.wanted:
            copies = copy_rates(self.device, 1 << 22 if options.tiny else 1 << 30)
            release(self.device)
            self.records["codec"].values.update(copy=copies, states={}, skipped=[])
        if "e2e" in self.wanted:
            self.records["e2e"].values.update(places={}, skipped=[])

    def late(self, kind: str, piece: str) -> bool:
        """Whether the time is up; then the piece is noted as left out."""
        if time.perf_counter() - self.begin <= self.options.max_s:
            return False
        say(f"left out for lack of time: {piece}")
        self.records[kind].values.setdefault("skipped", []).append(piece)
        self.records[kind].write()
        return True

    def states(self) -> Iterator[State]:
        """The wanted states, each as soon as it is made; only the dense one is kept for others to be made from."""
        names = [name for name in STATES if name in self.options.states.split(",")]
        if self.options.only == "e2e":
            names = ["dense"]
        folder = self.options.cache
        if {"dense", "small", "fine-tune"}.intersection(names):
            dense = self.made(
                cached(lambda: states.make_dense(self.recipes, self.device), "dense", self.recipes, folder)
            )
            if "dense" in names:
                yield dense
            if "small" in names:
                yield self.made(states.make_small(self.recipes, dense))
            if "fine-tune" in names and not self.late("states", "fine-tune"):
                yield self.made(
                    cached(lambda: states.make_tune(self.recipes, dense), "fine-tune", self.recipes, folder)
                )
            del dense
            release(self.device)
        if "moe" in names and not self.late("states", "moe"):
            yield self.made(
                cached(lambda: states.make_moe(self.recipes, self.device), "moe", self.recipes, folder)
            )
        if "large" in names and not self.late("states", "large"):
            yield self.made(states.make_large(self.recipes, self.device))

    def made(self, state: State) -> State:
        """Record what the state is."""
        about = dict(state.about)
        about["components"] = {
            name: {
                "num_tensors": len(tensors),
                "raw_bytes": sum(tensor.nbytes for tensor in tensors.values()),
                "zero_percent": zero_percent(tensors) if name != "w fp8" else None,
            }
            for name, tensors in state.components.items()
        }
        say(f"state {state.name}: {summary(about)}")
        self.records["states"].values["states"][state.name] = about
        self.records["states"].write()
        return state

    def measure_codec(self, state: State) -> None:
        """Every group of the state's components."""
        groups: dict[str, Any] = {}
        self.records["codec"].values["states"][state.name] = {"groups": groups}
        for group, components in codec.groups_of(state).items():
            if self.late("codec", f"{state.name} {group}"):
                continue
            say(f"codec: {state.name} {group}")
            groups[group] = codec.measure_group(state, group, components, self.settings)
            self.records["codec"].write()
            release(self.device)

    def measure_end_to_end(self, state: State) -> None:
        """Every saver on the RAM disk, then on the disk."""
        entrants = end_to_end.savers(self.device)
        fewer = 1 if self.options.quick or self.options.tiny else None
        for name, folder, num_rounds, drop_cache in (
            ("RAM disk", self.options.ram_dir, fewer or 5, False),
            ("disk", self.options.disk_dir, fewer or 3, True),
        ):
            rows: list[dict[str, Any]] = []
            values: dict[str, Any] = {"filesystem": filesystem(folder), "rows": rows}
            self.records["e2e"].values["places"][name] = values
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                place = end_to_end.Place(
                    name=name,
                    folder=Path(inner),
                    num_rounds=num_rounds,
                    max_case_s=8.0,
                    drop_cache=drop_cache,
                )
                for saver in entrants:
                    if self.late("e2e", f"{name}: {saver.name}"):
                        continue
                    say(f"end to end, {name}: {saver.name}")
                    rows += end_to_end.measure_place(state, place, [saver])
                    values["targets"] = end_to_end.targets(rows)
                    self.records["e2e"].write()

    def all(self) -> None:
        """Everything that was asked for."""
        for state in self.states():
            if "codec" in self.wanted:
                self.measure_codec(state)
            if "e2e" in self.wanted and state.name == "dense":
                self.measure_end_to_end(state)
            release(self.device)


def inexact(values: Any) -> bool:
    """Whether some row of thinpoint's reports that bits came back changed."""
    if isinstance(values, dict):
        ours = str(values.get("name", "")).startswith("thinpoint")
        if ours and str(values.get("error", "")).startswith("not exact"):
            return True
        return any(map(inexact, values.values()))
    return isinstance(values, list) and any(map(inexact, values))


def summary(about: dict[str, Any]) -> str:
    """What was made, in a line."""
    size = sum(each["raw_bytes"] for each in about["components"].values()) / 1e9
    steps = f", {about['num_steps']} steps, loss {about['loss']:.3f}" if "num_steps" in about else ""
    return f"{size:.2f} GB{steps}"


def vars_as_json(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is measured."""
    return {key: getattr(options, key) for key in ("device", "only", "states", "quick", "tiny", "max_s")}


def say(line: str) -> None:
    """A line of progress with nothing held back: a run that is cut short shows how far it came."""
    print(line, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--only", choices=PARTS, help="one part, and the states it needs")
    parser.add_argument("--states", default=",".join(STATES), help="which states, separated by commas")
    parser.add_argument("--cache", type=Path, help="folder that keeps trained states between runs")
    parser.add_argument("--quick", action="store_true", help="fewer steps, repeats and peers")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU, to try the benchmark out")
    parser.add_argument("--max-s", type=float, default=330.0, help="begin nothing after so many seconds")
    parser.add_argument("--ram-dir", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument(
        "--disk-dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk"
    )
    options = parser.parse_args()
    if unknown := set(options.states.split(",")).difference(STATES):
        parser.error(f"unknown states: {', '.join(sorted(unknown))}; there are {', '.join(STATES)}")
    return options


def main() -> None:
    """Measure, write, print; exit status 1 if thinpoint was not exact somewhere."""
    run = Run(arguments())
    run.all()
    records = [record.values for record in run.records.values()]
    print("\n" + render(records, brief=True))
    for record in run.records.values():
        print(f"Written: {record.path}")
    if any(map(inexact, records)):
        sys.exit(1)


if __name__ == "__main__":
    main()
