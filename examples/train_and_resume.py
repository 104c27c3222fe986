"""Train, save every few steps, and carry on from the newest checkpoint when started again.

python examples/train_and_resume.py runs/first --steps 100
python examples/train_and_resume.py runs/first --steps 200    # resumes at step 100
"""

import argparse
from pathlib import Path

import torch

import thinpoint

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=20)
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first_step = 0

checkpoints = sorted(options.folder.glob("step-*.thin"))
if checkpoints:
    state = thinpoint.load(checkpoints[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    first_step = state["step"]
    print(f"resumed at step {first_step}")

for step in range(first_step + 1, options.steps + 1):
    x = torch.randn(32, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % options.save_every == 0:
        print(f"step {step} loss {loss.item():.6f}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }
        thinpoint.save(state, options.folder / f"step-{step:06d}.thin")
