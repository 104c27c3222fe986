"""A training run as users write it: a model, AdamW, a schedule, data in random order, one state dict."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thinpoint
from thinpoint import errors
from thinpoint.demo.model import GPT, ModelConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the run: two runs with equal configs on one machine give equal bits."""

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 8
    num_steps: int = 160
    save_every: int = 20
    warmup_steps: int = 20
    learning_rate: float = 1e-3
    corpus_bytes: int = 8_000_000
    num_threads: int = 2
    seed: int = 1234

    def dumps(self) -> str:
        """The config as JSON, for a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> RunConfig:
        """The inverse of `dumps`."""
        values = json.loads(text)
        return RunConfig(**{**values, "model": ModelConfig(**values["model"])})


def make_deterministic(config: RunConfig) -> None:
    """Fix threads, kernels and seeds. CUBLAS_WORKSPACE_CONFIG must be set before the process starts."""
    torch.set_num_threads(config.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    random.seed(config.seed)


class Run:
    """A model in training and everything its next step depends on."""

    def __init__(self, config: RunConfig, text: bytes, device: str) -> None:
        make_deterministic(config)
        self.config = config
        self.device = device
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.model = GPT(config.model).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.order = torch.randperm(len(text) // config.model.context - 1)
        self.position = 0
        self.step = 0
        self.losses: list[float] = []

    def _rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.config.warmup_steps)
        return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / self.config.num_steps))))

    def _next_batch(self) -> Tensor:
        """The next windows of the shuffled text, moved by random offsets: int64, (batch, context + 1)."""
        context = self.config.model.context
        rows = []
        for _ in range(self.config.batch):
            window = int(self.order[self.position % len(self.order)])
            self.position += 1
            start = max(0, window * context - random.randrange(context))
            rows.append(self.text[start : start + context + 1])
        return torch.stack(rows).to(self.device, torch.int64)

    def train_step(self) -> float:
        """One optimizer step; its loss."""
        tokens = self._next_batch()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """The whole state, as a user would give it to `torch.save`. Tensors are those in use, not copies."""
        on_gpu = self.device.startswith("cuda")
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "cuda": torch.cuda.get_rng_state_all() if on_gpu else [],
            },
            "data": {"order": self.order, "position": self.position},
            "step": self.step,
            "losses": self.losses,
            "config": self.config,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken.

        Raises:
            ValueError: the state is of a run with another config.
        """
        if state["config"] != self.config:
            raise ValueError(f"the checkpoint is of another run: {state['config']}, not {self.config}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["lr_scheduler"])
        self.order = state["data"]["order"]
        self.position = state["data"]["position"]
        self.step = state["step"]
        self.losses = state["losses"]
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        if state["rng"]["cuda"]:
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])


def checkpoint_name(step: int) -> str:
    """The file name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:06d}.thin"


def load_newest(folder: Path) -> tuple[dict[str, Any] | None, Path | None, list[str]]:
    """The newest intact checkpoint (or None), its path, and what was wrong with newer ones."""
    damaged: list[str] = []
    for path in sorted(folder.glob("step-*.thin"), reverse=True):
        try:
            return thinpoint.load(path), path, damaged
        except errors.DamagedFileError as error:
            damaged.append(f"{path.name}: {error}")
    return None, None, damaged
