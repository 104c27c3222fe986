"""Training a language model step by step: FP32 parameters under BF16 autocast, AdamW with betas 0.9 and 0.95."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from bench.gpu.model import LanguageModel, ModelConfig
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a state is made.

    Attributes:
        model: the model's shape.
        num_steps: steps of the optimizer; fewer if `max_seconds` pass before.
        batch: sequences of the model's context in a step.
        learning_rate: the highest, after `num_steps` / 8 steps of warm-up; a cosine takes it to a tenth.
        max_seconds: of training.
    """

    model: ModelConfig
    num_steps: int
    batch: int
    learning_rate: float
    max_seconds: float = 90.0


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of a step, counted from 0."""
    warm = min(1.0, (step + 1) / max(1, recipe.num_steps // 8))
    return recipe.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / recipe.num_steps))


class Trainer:
    """A model in training.

    Args:
        data: uint8, flat, on the device to train on.
        start: weights by parameter name; else they are drawn.
    """

    def __init__(self, recipe: Recipe, data: Tensor, start: Mapping[str, Tensor] | None = None) -> None:
        self.recipe = recipe
        self.data = data
        self.num_steps = 0
        self.loss = torch.zeros(())
        torch.manual_seed(0)
        self.model = LanguageModel(recipe.model).to(data.device)
        if start is not None:
            self.model.load_state_dict(start)
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.named.values(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=data.device.type == "cuda",
        )
        self._draws = torch.Generator().manual_seed(1)
        self._window = torch.arange(recipe.model.context + 1, device=data.device)

    def step(self) -> None:
        """One step of the optimizer; does not wait for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.num_steps)
        starts = torch.randint(
            len(self.data) - len(self._window), (self.recipe.batch, 1), generator=self._draws
        ).to(self.data.device)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.data.device.type, torch.bfloat16):
            self.loss = self.model(self.data[starts + self._window].long())
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.num_steps += 1

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint holds; the tensors are the training's own."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
