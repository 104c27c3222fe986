"""What the benchmarks measure: training state from files or from a model trained here, by component."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thinpoint
from thinpoint.demo.corpus import corpus_bytes
from thinpoint.demo.training import Run, RunConfig
from thinpoint.state.storages import row_elems

ROLES = {"w": "weight", "m": "first_moment", "v": "second_moment", "g": "gradient"}
"""Component, as the field's papers call it -> role, as thinpoint does."""

_KEYS = {"w": "model", "m": "exp_avg", "v": "exp_avg_sq", "g": "grad"}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_RANDOM_LOW_BITS = {torch.float32: 12, torch.bfloat16: 3, torch.float16: 4}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor. tensor: any floating dtype, CPU, contiguous."""

    name: str
    component: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def words(self) -> np.ndarray:
        """The tensor's elements as flat unsigned words of their width; a view."""
        flat = self.tensor.reshape(-1).view(torch.uint8).numpy()
        return flat.view(_WORDS[self.tensor.element_size()])

    @property
    def row_elems(self) -> int:
        return row_elems(tuple(self.tensor.shape))


def read_state(path: Path) -> Any:
    """The object in a .safetensors, .thin or torch file, on the CPU. Runs no code from the file."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".thin":
        return thinpoint.load(path, map_location="cpu")
    return torch.load(path, map_location="cpu", weights_only=True)


def train_state(num_steps: int) -> dict[str, Any]:
    """The state of the demo's model after `num_steps` steps of AdamW, with its last gradients."""
    config = RunConfig(num_steps=max(160, num_steps))
    run = Run(config, corpus_bytes(config.corpus_bytes), "cpu")
    for _ in range(num_steps):
        run.train_step()
    torch.use_deterministic_algorithms(False)
    state = run.state()
    gradients = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    return {"model": state["model"], "optimizer": state["optimizer"], "grad": gradients}


def component_of(keys: tuple[Any, ...]) -> str:
    """ "w", "m", "v" or "g", from the names of AdamW's state and the prefixes in common use."""
    words = ".".join(map(str, keys)).split(".")
    if "exp_avg_sq" in words:
        return "v"
    if "exp_avg" in words or "momentum_buffer" in words:
        return "m"
    return "g" if words[0] in ("grad", "grads", "gradients") else "w"


def items_of(state: Any) -> list[Item]:
    """Every floating-point tensor of a state with at least one dimension and one element; tied ones once."""
    seen: set[tuple[int, torch.Size]] = set()
    items = []
    for keys, tensor in _tensors(state, ()):
        identity = (tensor.data_ptr(), tensor.shape)
        if not tensor.is_floating_point() or not tensor.dim() or not tensor.numel() or identity in seen:
            continue
        seen.add(identity)
        name = ".".join(map(str, keys))
        items.append(Item(name=name, component=component_of(keys), tensor=tensor.detach().contiguous()))
    return items


def _tensors(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _tensors(child, (*keys, key))
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _tensors(child, (*keys, i))


def enlarge(items: list[Item], min_bytes: int, min_tensor_bytes: int) -> list[Item]:
    """The largest items with rows, each repeated to `min_tensor_bytes`, until together they have `min_bytes`.

    The lowest bits of the copies are drawn anew (zeros stay): a dictionary coder would find the repetition.
    """
    by_size = (
        sorted((item for item in items if item.row_elems), key=lambda item: -item.tensor.nbytes) or items
    )
    large: list[Item] = []
    while sum(item.tensor.nbytes for item in large) < min_bytes:
        item = by_size[len(large) % len(by_size)]
        large.append(_repeat(item, math.ceil(min_tensor_bytes / item.tensor.nbytes), seed=len(large)))
    return large


def _repeat(item: Item, factor: int, seed: int) -> Item:
    words = np.tile(item.words, factor)
    low = _RANDOM_LOW_BITS.get(item.tensor.dtype, 0)
    if low:
        noise = np.random.default_rng(seed).integers(0, 1 << low, words.size).astype(words.dtype)
        words ^= np.where(words & words.dtype.type((1 << low) - 1), noise, words.dtype.type(0))
    rows, *rest = item.tensor.shape
    tensor = torch.from_numpy(words.view(np.uint8)).view(item.tensor.dtype).reshape(factor * rows, *rest)
    return Item(name=f"{item.name}.{seed}", component=item.component, tensor=tensor)


def state_of(items: list[Item]) -> dict[str, dict[str, torch.Tensor]]:
    """The items as a state dict whose keys tell their roles."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for item in items:
        state.setdefault(_KEYS[item.component], {})[item.name] = item.tensor
    return state
