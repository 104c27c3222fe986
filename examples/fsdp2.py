"""FSDP2 training that saves through PyTorch's DCP, and carries on from the newest checkpoint when started again.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 --steps 40
torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 --steps 80    # resumes at step 40
torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 --steps 120 --background    # dcp.async_save

The three lines below `# thinpoint` are all that differs from the same script with PyTorch's own files.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

# thinpoint; without it: no such line
from thinpoint.dcp import ThinReader, ThinStager, ThinWriter

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--background", action="store_true", help="train on while a checkpoint is written")
options = parser.parse_args()


class Model(nn.Module):
    """Bytes in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each byte but the first. text: int64, (batch, length + 1)."""
        x = self.embedding(text[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class Training(Stateful):
    """What a checkpoint holds: sharded parameters, the optimizer's state, and the number of steps they have seen."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.step = state["step"]


def batch(step: int) -> torch.Tensor:
    """This rank's part of a step's data, the same whenever the step is run. int64, (8, 33)."""
    draws = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts, strides = torch.randint(256, (2, 8, 1), generator=draws)
    return ((starts + strides % 4 * torch.arange(33)) % 256).to(device)


def publish(step: int) -> None:
    """Note the checkpoint of a step as the newest, now that it is complete."""
    if dist.get_rank() == 0:
        (options.folder / "latest.new").write_text(f"step-{step:06d}")
        os.replace(options.folder / "latest.new", latest)


def train() -> None:
    """Train to the last step, from the newest checkpoint if there is one."""
    # Of its own: a checkpoint in the background must not meet training's messages.
    saving = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = Model().to(device)
    for block in [*model.layers, model]:
        fully_shard(block)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    options.folder.mkdir(parents=True, exist_ok=True)

    # thinpoint; without it: writer, stager = dcp.FileSystemWriter(options.folder), None
    writer, stager = ThinWriter(options.folder), ThinStager()
    if latest.exists():
        newest = options.folder / latest.read_text()
        # thinpoint; without it: dcp.load({"training": training}, checkpoint_id=newest, process_group=saving)
        dcp.load({"training": training}, storage_reader=ThinReader(newest), process_group=saving)
        if dist.get_rank() == 0:
            print(f"resumed at step {training.step}")

    under_way = None
    for step in range(training.step + 1, options.steps + 1):
        loss = model(batch(step))
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.step = step
        if step % options.save_every == 0:
            if under_way:
                under_way[1].result()
                publish(under_way[0])
            path = options.folder / f"step-{step:06d}"
            target = {"checkpoint_id": path, "storage_writer": writer, "process_group": saving}
            if options.background:
                under_way = step, dcp.async_save({"training": training}, **target, async_stager=stager)
            else:
                dcp.save({"training": training}, **target)
                publish(step)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.6f}")
    if under_way:
        under_way[1].result()
        publish(under_way[0])


on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
latest = options.folder / "latest"
train()
# Groups end with the last that uses them: threads of theirs must not outlive the interpreter.
dist.destroy_process_group()
