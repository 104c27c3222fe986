"""A language model in FSDP2 training, and the plain nested dicts of DTensors that its checkpoints are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from bench.gpu.measure import POISON
from bench.gpu.model import LanguageModel, ModelConfig
from bench.gpu.states import TINY
from bench.gpu.training import Recipe, learning_rate
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

FULL = Recipe(
    model=ModelConfig(width=1024, num_layers=24, num_heads=16, hidden=2816, context=512),
    num_steps=60,
    batch=16,
    learning_rate=3e-4,
)
"""309M parameters; the batch is each rank's."""


class ShardedTrainer:
    """A model in training: FP32 parameters sharded over all ranks, BF16 in the layers, FP32 reductions, AdamW.

    Args:
        data: uint8, flat, on the device to train on; the same on all ranks, which draw different parts of it.
    """

    def __init__(self, recipe: Recipe, data: Tensor) -> None:
        self.recipe = recipe
        self.data = data
        self.num_steps = 0
        self.loss = torch.zeros(())
        torch.manual_seed(0)
        self.model = LanguageModel(recipe.model).to(data.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in [*self.model.layers, self.model]:
            fully_shard(block, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=data.device.type == "cuda",
        )
        self._draws = torch.Generator().manual_seed(1 + dist.get_rank())
        self._window = torch.arange(recipe.model.context + 1, device=data.device)

    def step(self) -> None:
        """One step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.num_steps)
        starts = torch.randint(
            len(self.data) - len(self._window), (self.recipe.batch, 1), generator=self._draws
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.model(self.data[starts.to(self.data.device) + self._window].long())
        self.loss.backward()
        self.optimizer.step()
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, in plain dicts and lists; the tensors are the training's own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return map_state({"model": model, "optimizer": optimizer}, lambda tensor: tensor)


def recipe(tiny: bool) -> Recipe:
    """The recipe to train by."""
    return TINY.large if tiny else FULL


def map_state(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The state in plain dicts and lists, with the function's result in the place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_state(child, function) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [map_state(child, function) for child in value]
    return value


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """All shards of a DTensor together, to be called by all ranks; any other tensor as it is."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def blank(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and sharding, poisoned."""
    made = torch.empty_like(tensor.detach())
    local(made).reshape(-1).view(torch.uint8).fill_(POISON)
    return made
