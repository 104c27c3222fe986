"""The training process of the demo: `python -m thinpoint.demo.worker FOLDER CONFIG_JSON`.

It resumes from the newest good checkpoint in its folder, saves one every few steps, and tells its parent
what it does in JSON lines on standard output. It knows nothing of being killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import thinpoint
from thinpoint.demo.corpus import corpus_bytes
from thinpoint.demo.training import Run, RunConfig, checkpoint_name, load_newest


def tell(event: str, **values: Any) -> None:
    """One JSON line to the parent."""
    print(json.dumps({"event": event, **values}), flush=True)


def main(folder: Path, config: RunConfig) -> None:
    """Train to the end, from the newest good checkpoint in `folder` if there is one."""
    run = Run(config, corpus_bytes(config.corpus_bytes), "cuda" if torch.cuda.is_available() else "cpu")
    state, path, damaged = load_newest(folder)
    if state is not None:
        run.load_state(state)
    tell(
        "start",
        step=run.step,
        source=path.name if path else None,
        damaged=damaged,
        device=torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        num_parameters=sum(p.numel() for p in run.model.parameters()),
    )
    while run.step < config.num_steps:
        loss = run.train_step()
        tell("step", step=run.step, loss=loss)
        if run.step % config.save_every == 0:
            name = checkpoint_name(run.step)
            tell("saving", step=run.step, file=name)
            start = time.perf_counter()
            thinpoint.save(run.state(), folder / name)
            tell("saved", step=run.step, file=name, seconds=time.perf_counter() - start)
    # What the runs are compared by does not go through thinpoint.
    torch.save(run.state(), folder / "final.pt")
    tell("done", step=run.step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), RunConfig.loads(sys.argv[2]))
