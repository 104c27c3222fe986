"""A training run with a `Checkpointer` for ckpt-chaos to kill: python chaos_training.py FOLDER [async]

Resumes from what is in the folder, prints the step, and leaves the final weights in FOLDER/final.bin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import thinpoint

NUM_STEPS, SAVE_EVERY = 12, 4


def main(folder: Path, *, is_async: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0, "rng": torch.get_rng_state()}
    with thinpoint.Checkpointer(folder / "checkpoints") as checkpoints:
        report = checkpoints.restore(state)
        if report is not None:
            torch.set_rng_state(state["rng"])
            print(f"resumed from step {report.step}")
        for step in range(int(state["step"]) + 1, NUM_STEPS + 1):
            x = torch.randn(32, 16)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0:
                state.update(step=step, rng=torch.get_rng_state())
                save = checkpoints.async_save if is_async else checkpoints.save
                save(state, step)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    (folder / "final.bin").write_bytes(weights.numpy().tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_async="async" in sys.argv)
