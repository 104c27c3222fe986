"""Whether a run that is killed and resumed again and again ends with the bits of one that was never stopped."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinpoint.demo.compare import count, differences
from thinpoint.demo.model import ModelConfig
from thinpoint.demo.training import RunConfig
from thinpoint.errors import ThinpointError
from thinpoint.proof.lives import Killer, Life, Process
from thinpoint.proof.scale import Scale

IDENTICAL, DIFFERENT, INCONCLUSIVE = "identical", "different", "inconclusive"

SAVES_PER_KILL = 4
_LAST_KILL = 0.95
"""Of the run: the last process must have something left to do."""
_MAX_POINTS = 2000
_MANY_AHEAD, _MANY_CORES = 3, 8

Row = dict[str, Any]
Say = Callable[[str], object]


def run_config(scale: Scale, num_steps: int, num_kills: int) -> RunConfig:
    """The run: dropout, data in random order, a schedule of the learning rate; a save between any two kills."""
    return RunConfig(
        model=ModelConfig(
            width=scale.run_width, num_layers=scale.run_layers, num_heads=max(4, scale.run_width // 64)
        ),
        num_steps=num_steps,
        save_every=max(1, num_steps // (SAVES_PER_KILL * max(1, num_kills))),
        warmup_steps=max(1, num_steps // 20),
        corpus_bytes=scale.corpus_bytes,
        num_threads=scale.num_threads or RunConfig().num_threads,
    )


def measure_resume(
    scale: Scale,
    device: torch.device,
    folder: Path,
    num_steps: int,
    num_kills: int,
    seed: int,
    say: Say,
) -> Row:
    """The verdict, and what it rests on.

    Two runs that are never stopped and never saved, and one that is killed `num_kills` times, each a process of its own (the last
    one a chain of them); all at the same time, with deterministic kernels. Every loss that any process reports, that of steps
    trained again too, and all that is in the final states is compared as bits.

    Args:
        folder: where runs keep what they have, deleted in the end.
        seed: decides when the processes are killed.

    Raises:
        ThinpointError: a training process failed.
    """
    config = run_config(scale, num_steps, num_kills)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as inner:
        places = [Path(inner) / name for name in ("never-stopped", "never-stopped-again", "killed")]
        with ThreadPoolExecutor(2) as pool:
            say("resume: two runs that are never stopped begin")
            whole = [pool.submit(_live_once, place, config, str(device)) for place in places[:2]]
            lives, kills = kill_again_and_again(
                places[2], config, str(device), num_kills, random.Random(seed), say
            )
            say("resume: waiting for the runs that are never stopped")
            references = [each.result() for each in whole]
        states = [_load(place) for place in places]
        num_tensors, num_bytes = count(states[0])
        verdict, found = judged(states, references, lives)
    killed_losses = [loss for life in lives for loss in life.losses]
    return {
        "verdict": verdict,
        "differences": found[:20],
        "config": asdict(config),
        "num_parameters": references[0].num_parameters,
        "num_steps": num_steps,
        "num_kills": len(kills),
        "num_restores": sum(bool(life.start) for life in lives),
        "num_kills_in_save": sum(kill["in_save"] for kill in kills),
        "num_steps_again": len(killed_losses) - num_steps,
        "num_losses_compared": len(killed_losses),
        "num_checkpoints": sum(len(life.committed) for life in lives),
        "num_tensors": num_tensors,
        "num_bytes": num_bytes,
        "seed": seed,
        "seconds": time.perf_counter() - begin,
        "kills": kills,
        "last_start": lives[-1].start,
        "losses": _thinned([float.fromhex(loss) for _, loss in references[0].losses]),
        "first_loss": float.fromhex(references[0].losses[0][1]),
        "last_loss": float.fromhex(references[0].losses[-1][1]),
    }


def kill_again_and_again(
    folder: Path, config: RunConfig, device: str, num_kills: int, dice: random.Random, say: Say
) -> tuple[list[Life], list[Row]]:
    """One run in `num_kills` + 1 processes; the next one is started before it is needed, and begins when it may.

    Every second kill falls into a save, the others between two steps; where, is drawn from as many stretches of equal length.
    """
    lives: list[Life] = []
    kills: list[Row] = []
    save_s: list[float] = []
    with ExitStack() as stack:

        def start() -> Process:
            return stack.enter_context(Process(folder, config, device, saves=True))

        # Starting takes longer than living; the next ones stand ready, and have read nothing yet.
        ahead = _MANY_AHEAD if len(os.sched_getaffinity(0)) >= _MANY_CORES else 1
        waiting = deque(start() for _ in range(min(ahead, num_kills + 1)))
        for number in range(num_kills):
            process = waiting.popleft()
            if number + 1 + len(waiting) < num_kills + 1:
                waiting.append(start())
            place = _LAST_KILL * (number + dice.random()) / num_kills
            step = max(1, min(config.num_steps - 1, round(place * config.num_steps)))
            say(f"resume: process {number + 1} of {num_kills + 1} dies about training step {step}")
            killer = Killer(step, dice, save_s, in_save=number % 2 == 1, after_commit=number == 0)
            life = process.live(killer)
            lives.append(life)
            begun = life.saving[-1] if life.saving else None
            kills.append(
                {
                    "start": life.start,
                    "last_step": life.losses[-1][0] if life.losses else life.start,
                    "in_save": begun is not None and begun not in life.committed,
                }
            )
        say(f"resume: process {num_kills + 1} of {num_kills + 1} trains to the end")
        lives.append(waiting.popleft().live())
    return lives, kills


def judged(states: list[Any], references: list[Life], lives: list[Life]) -> tuple[str, list[str]]:
    """The verdict, and where bits differ.

    Args:
        states: final ones of both runs that were never stopped, then of the one that was killed.
        references: both runs that were never stopped.
        lives: the processes of the one that was killed.
    """
    found = differences(states[0], states[1], "never stopped") + wrong_losses(references[0], [references[1]])
    if found:
        return INCONCLUSIVE, found
    found = differences(states[0], states[2], "killed") + wrong_losses(references[0], lives)
    return (DIFFERENT if found else IDENTICAL), found


def wrong_losses(reference: Life, lives: list[Life]) -> list[str]:
    """The losses of a run in many processes that differ from those of the run in one; also a loss that is missing."""
    expected = dict(reference.losses)
    found = [
        f"loss of training step {step} in process {number}: {loss}, not {expected.get(step)}"
        for number, life in enumerate(lives, 1)
        for step, loss in life.losses
        if loss != expected.get(step)
    ]
    missing = expected.keys() - {step for life in lives for step, _ in life.losses}
    return found + [f"no loss of training step {step}" for step in sorted(missing)]


def _live_once(folder: Path, config: RunConfig, device: str) -> Life:
    with Process(folder, config, device, saves=False) as process:
        return process.live()


def _load(folder: Path) -> Any:
    """The final state of a run, as `torch.save` wrote it."""
    path = folder / "final.pt"
    if not path.exists():
        raise ThinpointError("a run left no final state", where=path)
    # Our own file, made a moment ago.
    state = torch.load(path, map_location="cpu", weights_only=False)
    shutil.rmtree(folder, ignore_errors=True)
    return state


def _thinned(values: list[float]) -> Row:
    """Every so many values, to draw them."""
    stride = -(-len(values) // _MAX_POINTS)
    return {"stride": stride, "values": values[::stride]}
