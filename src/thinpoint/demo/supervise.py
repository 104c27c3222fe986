"""Starts the training process, follows what it says, and kills it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Event = dict[str, Any]
Killer = Callable[[subprocess.Popen[str], Event], None]
"""Called for every event; kills the process or leaves it."""


class TrainingFailedError(RuntimeError):
    """The training process ended otherwise than it should have."""


def _environment() -> dict[str, str]:
    # cuBLAS needs a fixed workspace and MKL a fixed number of threads to repeat a sum in the same order.
    return os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}


def follow(folder: Path, config_json: str, kill: Killer | None = None) -> Iterator[Event]:
    """Run the training process in `folder` and yield its events until it ends.

    Args:
        folder: where it keeps its checkpoints; made if missing.
        config_json: its `RunConfig`.
        kill: decides at every event whether the process dies now. None lets it finish.

    Raises:
        TrainingFailedError: it failed, or ended before `kill` got it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "thinpoint.demo.worker", str(folder), config_json]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                # The last line of a killed process may be cut short.
                if not line.endswith("\n"):
                    break
                event: Event = json.loads(line)
                if kill is not None:
                    kill(process, event)
                yield event
        except BaseException:
            process.kill()
            raise
    expected = -signal.SIGKILL if kill else 0
    if process.returncode != expected:
        raise TrainingFailedError(
            f"the training process ended with status {process.returncode}, not {expected}"
        )


def unfinished_files(folder: Path) -> set[str]:
    """What was begun and never got its final name: all that ends neither in .thin nor in .pt."""
    return {path.name for path in folder.iterdir() if path.suffix not in (".thin", ".pt")}


def kill_while_saving(folder: Path, step: int, dice: random.Random) -> Killer:
    """Kills at a moment drawn from the first half of the save of `step`, timed by those before."""
    # The least: the first save also loads the kernels.
    save_s: list[float] = []
    left_before: set[str] = set()

    def kill(process: subprocess.Popen[str], event: Event) -> None:
        if event["event"] == "start":
            left_before.update(unfinished_files(folder))
        if event["event"] == "saved":
            save_s.append(event["seconds"])
        if event["event"] != "saving" or event["step"] != step:
            return
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (folder / event["file"]).exists():
            if unfinished_files(folder) - left_before:
                time.sleep(dice.uniform(0, min(save_s, default=0.0) / 2))
                break
            time.sleep(0.0002)
        process.kill()

    return kill


def kill_at_random(after_step: int, dice: random.Random) -> Killer:
    """Kills at a moment drawn from the duration of the two steps that follow `after_step`."""
    began: list[float] = []

    def kill(process: subprocess.Popen[str], event: Event) -> None:
        if event["event"] != "step":
            return
        began.append(time.monotonic())
        if event["step"] == after_step:
            # The median: a step with a save in it takes far longer than the others.
            durations = [end - start for start, end in pairwise(began)] or [0.0]
            time.sleep(dice.uniform(0, 2 * median(durations)))
            process.kill()

    return kill
