"""Processes that train: started ahead, followed, and killed at chosen moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from thinpoint.demo.training import RunConfig
from thinpoint.errors import ThinpointError

Event = dict[str, Any]
_MAX_WAIT_S = 2.0


class TrainingFailedError(ThinpointError):
    """A training process ended otherwise than it should have."""


@dataclass(kw_only=True)
class Life:
    """What one training process told.

    Attributes:
        start: the training step from which it went on.
        losses: (training step, loss as hexadecimal text) in the order in which it trained.
        saving: training steps of which a save began.
        committed: training steps of which a checkpoint was in place.
        num_parameters: of its model.
    """

    start: int | None = None
    losses: list[tuple[int, str]] = field(default_factory=list)
    saving: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    num_parameters: int = 0

    def hear(self, event: Event) -> None:
        """Take in what the process told."""
        match event["event"]:
            case "ready":
                self.num_parameters = event["num_parameters"]
            case "start":
                self.start = event["step"]
            case "step":
                self.losses.append((event["step"], event["loss"]))
            case "saving":
                self.saving.append(event["step"])
            case "committed":
                self.committed.append(event["step"])


class Process:
    """A training process, which waits before it begins and before it ends. A context manager: leaving it kills the process.

    Args:
        folder: where it keeps what it has; made if missing.
        config: its run.
        device: "cpu", "cuda:0", ...
        saves: whether it saves and resumes.
    """

    def __init__(self, folder: Path, config: RunConfig, device: str, *, saves: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(folder), config.dumps(), device, "saves" if saves else "never"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinpoint.proof.run_worker", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(config.num_threads),
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def go_on(self) -> None:
        """Let it begin, or end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            # It has ended; what follows says how.
            pass

    def events(self) -> Iterator[Event]:
        """What it tells, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # The last line of a killed process may be cut short.
            if line.endswith("\n"):
                yield json.loads(line)

    def live(self, until: Callable[[Event], bool] | None = None) -> Life:
        """Let it begin and follow it to its end; or kill it, with SIGKILL, as soon as `until` says so of an event.

        Raises:
            TrainingFailedError: it ended otherwise.
        """
        self.go_on()
        life, killed = Life(), False
        for event in self.events():
            life.hear(event)
            if until is not None and not killed and until(event):
                self.process.kill()
                killed = True
            elif event["event"] == "trained" and until is None:
                self.go_on()
        found, expected = self.process.wait(), 0 if until is None else -signal.SIGKILL
        if found != expected:
            raise TrainingFailedError(
                "a training process ended otherwise than it should", expected=expected, actual=found
            )
        return life


class Killer:
    """Says when a process is to die: shortly after a training step, or while a save is under way.

    Args:
        step: after this one; for a save the first one from there on.
        in_save: which of both.
        after_commit: not before this process has a checkpoint in place.
        dice: draws the moment: within the time of two steps, or of a save.
        save_s: seconds of saves so far; those of this process are added.
    """

    def __init__(
        self, step: int, dice: random.Random, save_s: list[float], *, in_save: bool, after_commit: bool
    ) -> None:
        self._step, self._dice, self._save_s, self._in_save = step, dice, save_s, in_save
        self._may_kill = not after_commit
        self._steps_at: list[float] = []
        self._saving_at = 0.0

    def __call__(self, event: Event) -> bool:
        now = time.monotonic()
        match event["event"]:
            case "saving":
                self._saving_at = now
            case "committed":
                self._save_s.append(now - self._saving_at)
                self._may_kill = True
            case "step":
                self._steps_at.append(now)
        awaited = "saving" if self._in_save else "step"
        is_it = event["event"] == awaited and event["step"] >= self._step and self._may_kill
        if is_it:
            time.sleep(self._dice.uniform(0, min(self._longest(), _MAX_WAIT_S)))
        # A process that has come to its end waits there: it dies in any case.
        return is_it or event["event"] == "trained"

    def _longest(self) -> float:
        if self._in_save:
            return median(self._save_s) if self._save_s else 0.05
        steps = self._steps_at
        return 2 * (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 0.05


def _environment(num_threads: int) -> dict[str, str]:
    # cuBLAS needs a fixed workspace, and MKL and OpenMP a fixed number of threads, to repeat a sum in the same order.
    return os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": str(num_threads),
    }
