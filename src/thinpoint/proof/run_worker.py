"""The training process of a run that is killed: `python -m thinpoint.proof.run_worker FOLDER CONFIG_JSON DEVICE saves|never`.

With "saves" it resumes from the newest checkpoint in FOLDER/checkpoints, and saves in the background while it trains; with
"never" it does not touch thinpoint. It tells its parent what it does in JSON lines on standard output, begins and ends when it
reads a line, and knows nothing of being killed.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import thinpoint
from thinpoint.checkpoint import Checkpointer
from thinpoint.demo.corpus import corpus_bytes
from thinpoint.demo.training import Run, RunConfig

_KEPT = 3
_lock = threading.Lock()


def tell(event: str, **values: Any) -> None:
    """One JSON line to the parent, whole whatever thread it comes from."""
    line = json.dumps({"event": event, **values}) + "\n"
    with _lock:
        sys.stdout.write(line)
        sys.stdout.flush()


def main(folder: Path, config: RunConfig, device: str, *, saves: bool) -> None:
    """Train to the end, from the newest intact checkpoint if there is one."""
    text = corpus_bytes(config.corpus_bytes)
    if saves:
        # Before the seeds are set: what saving and restoring load and compile.
        _warm_up(device)
    run = Run(config, text, device)
    tell("ready", num_parameters=sum(parameter.numel() for parameter in run.model.parameters()))
    sys.stdin.readline()
    if saves:
        _train_and_save(run, folder / "checkpoints")
    else:
        tell("start", step=0)
        while run.step < config.num_steps:
            _step(run)
    tell("trained")
    sys.stdin.readline()
    # What the runs are compared by does not go through thinpoint.
    torch.save(run.state(), folder / "final.pt")
    tell("done")


def _step(run: Run) -> None:
    loss = run.train_step()
    tell("step", step=run.step, loss=loss.hex())


def _train_and_save(run: Run, folder: Path) -> None:
    with Checkpointer(
        folder,
        every_steps=run.config.save_every,
        keep_last=_KEPT,
        on_committed=lambda step, path: tell("committed", step=step),
    ) as checkpointer:
        state = checkpointer.load()
        if state is not None:
            run.load_state(state)
        tell("start", step=run.step)
        while run.step < run.config.num_steps:
            _step(run)
            if run.step % run.config.save_every == 0:
                tell("saving", step=run.step)
            checkpointer.maybe_save(run.state, run.step)


def _warm_up(device: str) -> None:
    state = {"w": torch.randn(512, 512, device=device)}
    file = io.BytesIO()
    thinpoint.save(state, file)
    file.seek(0)
    thinpoint.load_into(file, state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), RunConfig.loads(sys.argv[2]), sys.argv[3], saves=sys.argv[4] == "saves")
