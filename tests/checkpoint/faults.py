"""Breaks the disk at every operation of a save, in every way, and looks at what is left: `make faults`.

    python tests/checkpoint/faults.py [--sample N] [--seed S] [--processes P]

Each fault point is a process that saves into a directory of two checkpoints while the disk breaks, and another that then
looks: the checkpoint before is intact bit for bit, whatever counts as a checkpoint is, and a run that goes on from there
saves, and leaves nothing behind. A process that takes longer than HANG_S hangs.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from broken_disk import KINDS, MODES, BrokenDisk

import thinpoint
from thinpoint.checkpoint import Checkpointer, catalog, lane
from thinpoint.checkpoint.names import save_id_in, step_folder
from thinpoint.store import LocalStore

HANG_S = 60.0
SCENARIOS = ("save", "async", "overwrite", "overwrite-async", "truncate")
OPTIONS: dict[str, Any] = {
    "keep_last": 2,
    "codec": "zstd",
    "backend": "cpu",
    "num_threads": 1,
    "delete_pause": 0,
}


@dataclass(frozen=True)
class Point:
    scenario: str
    mode: str
    at: int


def state(step: int, version: int = 0) -> dict[str, Any]:
    """The state at a training step: several parts, so that writes can be torn between and inside them."""
    generator = torch.Generator().manual_seed(1000 * version + step)
    return {
        "model": {f"w{i}": torch.randn(4000 + i, generator=generator) for i in range(3)},
        "step": step,
        "version": version,
    }


def act(folder: Path, scenario: str, options: dict[str, Any]) -> None:
    """What is under way when the disk breaks."""
    with Checkpointer(folder, timeout=20, retries=2, **options) as checkpointer:
        if scenario == "truncate":
            checkpointer.truncate_after(1)
            return
        step = 2 if scenario.startswith("overwrite") else 3
        save = checkpointer.async_save if scenario.endswith("async") else checkpointer.save
        save(state(step, version=1), step, overwrite=step == 2)


def check(folder: Path, scenario: str, succeeded: bool) -> None:
    """What must hold afterwards; raises AssertionError."""
    allowed = {1: {0}, 2: {0, 1} if scenario.startswith("overwrite") else {0}, 3: {1}}
    checkpointer = Checkpointer(folder, **OPTIONS)
    steps = checkpointer.steps()
    for step in steps:
        loaded = checkpointer.load(step)
        assert loaded["version"] in allowed[step], (step, loaded["version"])
        expected = state(step, loaded["version"])
        for name, tensor in expected["model"].items():
            assert torch.equal(tensor.view(torch.int32), loaded["model"][name].view(torch.int32)), (
                step,
                name,
            )
        path = folder / step_folder(step)
        for file in path.glob("*.thin"):
            if file.name in {f.name for f in catalog.read_manifest(LocalStore(str(folder)), step).files}:
                thinpoint.verify(file, deep=True)
    if scenario == "truncate":
        assert steps[0] == 1 and (not succeeded or steps == [1]), steps
    else:
        assert 2 in steps, steps
        wanted = 2 if scenario.startswith("overwrite") else 3
        if succeeded:
            assert max(steps) == wanted and checkpointer.load(wanted)["version"] == 1, steps
    newest = checkpointer.load()
    assert newest["step"] == steps[-1]
    go_on(folder, steps[-1])


def go_on(folder: Path, newest: int) -> None:
    """The next run saves, and nothing is left that belongs to no checkpoint."""
    with Checkpointer(folder, stale="fail", **OPTIONS) as checkpointer:
        restored = state(newest)
        report = checkpointer.restore(restored)
        assert report is not None and report.step == newest and not report.skipped
        checkpointer.save(state(10), 10)
    store = LocalStore(str(folder))
    assert checkpointer.steps() == [newest, 10], checkpointer.steps()
    named = {f"{step_folder(s)}/manifest.json" for s in (newest, 10)}
    for step in (newest, 10):
        named |= {f"{step_folder(step)}/{f.name}" for f in catalog.read_manifest(store, step).files}
    rest = {file.name for file in store.files()} - named
    assert {name for name in rest if not name.startswith("runs/")} == set(), rest
    assert len(rest) <= 2, rest
    # Without a save's id in its name, a torn manifest of a few bytes waits for its age.
    assert [file.name for file in store.leftovers() if save_id_in(file.name)] == []


def in_child(function: Callable[[], Any]) -> str:
    """ "done", "failed", "killed" or "hangs": the end of a process that was forked to call the function."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:  # noqa: BLE001
            if os.environ.get("FAULTS_VERBOSE"):
                traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "killed" if os.WIFSIGNALED(status) else "failed" if os.WEXITSTATUS(status) else "done"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


class Bench:
    """A place for fault points, on one file system, with the directory that each begins with.

    Args:
        place: a new folder.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._template = place / "template"
        self._work = place / "work"
        self._spare = place / "spare"
        self.kinds: set[str] = set()
        assert in_child(self._prepare) == "done", "the directory to begin with cannot be made"

    def num_operations(self, scenario: str) -> int:
        """Operations of the scenario on a disk that does not break."""
        counts = self._place / "count"

        def count() -> None:
            disk = BrokenDisk(-1, "fail", str(self._spare))
            disk.install()
            act(self._work, scenario, OPTIONS)
            counts.write_text(" ".join(disk.names))

        self._reset()
        assert in_child(count) == "done", scenario
        names = counts.read_text().split()
        self.kinds |= set(names)
        return len(names)

    def run(self, point: Point) -> tuple[str, str | None]:
        """(how the process ended, what is wrong, or None)."""
        self._reset()

        def broken() -> None:
            logging.disable()
            BrokenDisk(point.at, point.mode, str(self._spare)).install()
            act(self._work, point.scenario, OPTIONS)

        ended = in_child(broken)
        if ended == "hangs":
            return ended, "it hangs"
        said = self._place / "said"
        said.unlink(missing_ok=True)

        def look() -> None:
            logging.disable()
            try:
                check(self._work, point.scenario, ended == "done")
            except BaseException:
                said.write_text(traceback.format_exc())
                raise

        looked = in_child(look)
        if looked == "done":
            return ended, None
        return ended, said.read_text() if said.exists() else looked

    def _prepare(self) -> None:
        with Checkpointer(self._template, **OPTIONS) as checkpointer:
            for step in (1, 2):
                checkpointer.save(state(step), step)

    def _reset(self) -> None:
        for folder in (self._work, self._spare):
            shutil.rmtree(folder, ignore_errors=True)
        self._spare.mkdir()
        shutil.copytree(self._template, self._work)


def all_points(bench: Bench) -> list[Point]:
    """Every operation of every scenario, in every mode."""
    counts = {scenario: bench.num_operations(scenario) for scenario in SCENARIOS}
    # Otherwise the store does some of its work in a way that does not go through the broken disk.
    assert bench.kinds == KINDS, bench.kinds ^ KINDS
    return [
        Point(scenario, mode, at)
        for scenario in SCENARIOS
        for at in range(counts[scenario])
        for mode in MODES
    ]


def run_points(points: list[Point], place: Path) -> tuple[Counter[str], list[str]]:
    """How many processes ended how, and what was wrong."""
    bench = Bench(place)
    ends: Counter[str] = Counter()
    wrong = []
    for point in points:
        ended, problem = bench.run(point)
        ends[ended] += 1
        if problem is not None:
            wrong.append(f"{point}: the process: {ended}\n{problem}")
    return ends, wrong


def main() -> int:
    """Exit status 0 if nothing was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, help="so many points, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    # Pauses are what the faults would otherwise mostly consist of.
    lane.FIRST_PAUSE_S = 0.01
    torch.set_num_threads(1)
    warm()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thinpoint-faults-") as top:
        points = all_points(Bench(Path(top)))
        total = len(points)
        random.Random(arguments.seed).shuffle(points)
        points = points[: arguments.sample]
        ends, wrong = run_side_by_side(points, Path(top), arguments.processes)
    kinds = Counter((p.scenario, p.mode) for p in points)
    print(
        f"{len(points):,} of {total:,} fault points in {time.monotonic() - begin:.0f} s, {len(kinds)} kinds"
    )
    print("the process that saved:", ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items())))
    for problem in wrong[:10]:
        print(f"\nWRONG {problem}")
    print(f"{len(wrong):,} wrong")
    return 1 if wrong else 0


def warm() -> None:
    """Loads what processes would otherwise load one by one."""
    file = io.BytesIO()
    thinpoint.save(state(0), file, codec="zstd", backend="cpu", num_threads=1)
    file.seek(0)
    thinpoint.load(file, num_threads=1)
    file.seek(0)
    thinpoint.verify(file, deep=True, num_threads=1)


def run_side_by_side(points: list[Point], place: Path, processes: int) -> tuple[Counter[str], list[str]]:
    """As `run_points`, in several processes."""
    pids = []
    for i in range(processes):
        mine = place / f"process-{i}"
        mine.mkdir()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ends, wrong = run_points(points[i::processes], mine)
                (mine / "result.json").write_text(json.dumps([ends, wrong]))
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    ends, wrong = Counter[str](), []
    for i, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        if status:
            wrong.append(f"process {i} failed")
            continue
        some, more = json.loads((place / f"process-{i}" / "result.json").read_text())
        ends.update(some)
        wrong += more
    return ends, wrong


if __name__ == "__main__":
    raise SystemExit(main())
