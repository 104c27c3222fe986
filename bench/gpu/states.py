"""The training states that are measured: models trained on this machine's GPU, and what is derived from them.

Text is the source of Python's standard library, byte by byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench.gpu.model import ModelConfig
from bench.gpu.training import Recipe, Trainer
from torch import Tensor

from thinpoint.demo.corpus import corpus_bytes

Tensors = dict[str, Tensor]

COMPONENTS = ("w", "m", "v", "w bf16", "g bf16", "w fp8")
"""Weights, first and second moments in FP32; weights and gradients in BF16; weights in FP8 E4M3."""

_TEXT_BYTES = 64_000_000
_TUNING_TEXT_BYTES = 2_000_000
_FP8_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Recipes of all trained states; the fine-tune begins at the dense model's weights, rounded to BF16."""

    dense: Recipe
    large: Recipe
    moe: Recipe
    tune: Recipe
    num_small: int
    max_small_elems: int


_DENSE = ModelConfig(width=1024, num_layers=10, num_heads=16, hidden=3072, context=512)
_LARGE = ModelConfig(width=2048, num_layers=24, num_heads=16, hidden=5632, context=512)
_MOE = ModelConfig(width=512, num_layers=6, num_heads=8, hidden=1280, context=512, num_experts=16)

FULL = Recipes(
    dense=Recipe(model=_DENSE, num_steps=600, batch=32, learning_rate=6e-4),
    large=Recipe(model=_LARGE, num_steps=200, batch=16, learning_rate=3e-4, max_seconds=40.0),
    moe=Recipe(model=_MOE, num_steps=400, batch=32, learning_rate=6e-4),
    tune=Recipe(model=_DENSE, num_steps=100, batch=32, learning_rate=2e-5, max_seconds=30.0),
    num_small=2000,
    max_small_elems=1_000_000,
)
"""136M parameters, 1.2B, 195M, and the first again."""

QUICK = replace(
    FULL,
    dense=replace(FULL.dense, num_steps=100),
    large=replace(FULL.large, num_steps=20),
    moe=replace(FULL.moe, num_steps=100),
    tune=replace(FULL.tune, num_steps=20),
)

_TINY_DENSE = ModelConfig(width=16, num_layers=1, num_heads=2, hidden=32, context=32)

TINY = Recipes(
    dense=Recipe(model=_TINY_DENSE, num_steps=16, batch=4, learning_rate=1e-3),
    large=Recipe(model=replace(_TINY_DENSE, num_layers=2), num_steps=4, batch=4, learning_rate=1e-3),
    moe=Recipe(
        model=replace(_TINY_DENSE, num_experts=4),
        num_steps=16,
        batch=4,
        learning_rate=1e-3,
    ),
    tune=Recipe(model=_TINY_DENSE, num_steps=4, batch=4, learning_rate=1e-4),
    num_small=6,
    max_small_elems=2000,
)
"""For trying the benchmark out on a CPU: Triton's interpreter takes a millisecond a value."""


@dataclass(frozen=True, kw_only=True)
class State:
    """One training state.

    Attributes:
        name: "dense", "large", "fine-tune", "moe" or "small".
        about: how it came to be: steps done, last loss, number of parameters; JSON values.
        components: for some of COMPONENTS, tensors by parameter name; contiguous, on one device, each with a storage
            of its own. `m` and `v` have the names of `w`.
    """

    name: str
    about: dict[str, Any]
    components: dict[str, Tensors]

    @property
    def device(self) -> torch.device:
        return next(iter(next(iter(self.components.values())).values())).device

    def training_state(self, max_parameters: int | None = None) -> dict[str, Any]:
        """w, m and v as a state dict for a checkpoint, with AdamW's step counts on the CPU."""
        w, m, v = (self.components[key] for key in ("w", "m", "v"))
        w = dict(list(w.items())[:max_parameters])
        steps = float(self.about["num_steps"])
        moments = {
            name: {"step": torch.tensor(steps), "exp_avg": m[name], "exp_avg_sq": v[name]} for name in w
        }
        groups = [{"lr": self.about["recipe"]["learning_rate"], "params": list(w)}]
        return {"model": w, "optimizer": {"state": moments, "param_groups": groups}}


def zero_percent(tensors: Tensors) -> float:
    """How many percent of the values have all bits zero."""
    zeros = sum(int((tensor.flatten() == 0).sum()) for tensor in tensors.values())
    return 100 * zeros / sum(tensor.numel() for tensor in tensors.values())


def text(device: torch.device, tuning: bool) -> Tensor:
    """Text as uint8 on the device: the end of the corpus for fine-tuning, the rest for training."""
    data = torch.frombuffer(bytearray(corpus_bytes(_TEXT_BYTES)), dtype=torch.uint8)
    part = data[-_TUNING_TEXT_BYTES:] if tuning else data[:-_TUNING_TEXT_BYTES]
    return part.to(device)


def train(recipe: Recipe, data: Tensor, start: Mapping[str, Tensor] | None = None) -> State:
    """A state with components w, m, v and g bf16 (the last step's gradients, clipped).

    Args:
        data: uint8, flat, on the device to train on.
        start: weights by parameter name; else they are drawn.
    """
    trainer = Trainer(recipe, data, start)
    begin = time.perf_counter()
    while trainer.num_steps < recipe.num_steps and time.perf_counter() - begin < recipe.max_seconds:
        trainer.step()
    last_loss = trainer.loss.item()
    named = trainer.named
    moments = {name: trainer.optimizer.state[parameter] for name, parameter in named.items()}
    components = {
        "w": {name: parameter.detach() for name, parameter in named.items()},
        "m": {name: values["exp_avg"] for name, values in moments.items()},
        "v": {name: values["exp_avg_sq"] for name, values in moments.items()},
        "g bf16": {name: p.grad.bfloat16() for name, p in named.items() if p.grad is not None},
    }
    about = {
        "recipe": asdict(recipe),
        "num_parameters": sum(parameter.numel() for parameter in named.values()),
        "num_steps": trainer.num_steps,
        "loss": last_loss,
        "seconds": time.perf_counter() - begin,
    }
    return State(name="", about=about, components=components)


def fp8(tensor: Tensor) -> Tensor:
    """The values as E4M3, scaled so that the largest is the format's."""
    scale = _FP8_MAX / tensor.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return (tensor * scale).to(torch.float8_e4m3fn)


def make_dense(recipes: Recipes, device: torch.device) -> State:
    """The dense model, with its weights also in BF16 and FP8."""
    state = train(recipes.dense, text(device, tuning=False))
    w = state.components["w"]
    more = {
        "w bf16": {name: tensor.bfloat16() for name, tensor in w.items()},
        "w fp8": {name: fp8(tensor) for name, tensor in w.items()},
    }
    return replace(state, name="dense", components={**state.components, **more})


def make_large(recipes: Recipes, device: torch.device) -> State:
    """A larger dense model, after fewer steps: tensors as long as those of the models that people train."""
    state = train(recipes.large, text(device, tuning=False))
    return replace(state, name="large", components={key: state.components[key] for key in "wmv"})


def make_moe(recipes: Recipes, device: torch.device) -> State:
    """The mixture of experts."""
    return replace(train(recipes.moe, text(device, tuning=False)), name="moe")


def make_tune(recipes: Recipes, dense: State) -> State:
    """A fine-tune that begins at the dense weights rounded to BF16, with its weights also in BF16."""
    start = {name: tensor.bfloat16().float() for name, tensor in dense.components["w"].items()}
    state = train(recipes.tune, text(dense.device, tuning=True), start)
    rounded = {name: tensor.bfloat16() for name, tensor in state.components["w"].items()}
    return replace(state, name="fine-tune", components={**state.components, "w bf16": rounded})


def make_small(recipes: Recipes, dense: State) -> State:
    """Many small tensors cut from w, m and v in turn: 1,000 to `max_small_elems` elements, log-uniform.

    Cuts of at least two rows are whole rows and keep their width.
    """
    draws = torch.Generator().manual_seed(2)

    def draw() -> float:
        return float(torch.rand((), generator=draws))

    pieces: dict[str, Tensors] = {"w": {}, "m": {}, "v": {}}
    sources = [name for name, tensor in dense.components["w"].items() if tensor.numel() >= 1000]
    for i in range(recipes.num_small):
        component = "wmv"[i % 3]
        source = dense.components[component][sources[int(draw() * len(sources))]]
        num_elems = min(int(1000 * (recipes.max_small_elems / 1000) ** draw()), source.numel())
        if source.dim() == 2 and num_elems >= 2 * source.shape[1]:
            num_rows = num_elems // source.shape[1]
            first = int(draw() * (source.shape[0] - num_rows + 1))
            piece = source[first : first + num_rows]
        else:
            first = int(draw() * (source.numel() - num_elems + 1))
            piece = source.flatten()[first : first + num_elems]
        pieces[component][f"small.{i}"] = piece.clone()
    about = {"num_tensors": recipes.num_small, "max_elems": recipes.max_small_elems}
    return State(name="small", about=about, components=pieces)


def cached(make: Callable[[], State], name: str, recipes: Recipes, folder: Path | None) -> State:
    """The state from the folder if it holds one made by these recipes; else made and, with a folder, stored there."""
    path = folder / f"{name}.pt" if folder else None
    if path and path.exists():
        stored = torch.load(path, weights_only=True)
        if stored["recipes"] == repr(recipes):
            return State(name=name, about=stored["about"], components=stored["components"])
    state = make()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"recipes": repr(recipes), "about": state.about, "components": state.components}
        torch.save(stored, path)
    return state
