"""A small transformer, sharded in several ways, and its state after a step of AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, WIDTH, HIDDEN = 38, 24, 20
"""Not what 4 or 3 ranks divide evenly; the biases of 2 rows below leave ranks without any."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(query @ key.transpose(-1, -2), -1) @ value
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(mesh: DeviceMesh | None, way: str) -> Model:
    """A model with other weights than any other: "plain", "fsdp" (also HSDP on two dimensions), "tp", "fsdp+tp"."""
    model = Model()
    if way in ("tp", "fsdp+tp"):
        assert mesh is not None
        along = mesh if mesh.ndim == 1 else mesh["tp"]
        for block in model.blocks:
            parallelize_module(block, along, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if way in ("fsdp", "fsdp+tp"):
        assert mesh is not None
        along = mesh["dp"] if way == "fsdp+tp" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=along)
        fully_shard(model, mesh=along)
    return model


def stepped(model: Model, seed: int) -> torch.optim.Optimizer:
    """AdamW after a step with gradients of that seed; those are given, not computed: gloo does not scatter sums everywhere."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        grad = torch.randn(local.shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                grad,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
                run_check=False,
            )
        else:
            parameter.grad = grad
    optimizer.step()
    return optimizer


def state_of(mesh: DeviceMesh | None, way: str, seed: int) -> dict[str, Any]:
    """`{"model": ..., "optim": ...}` as DCP saves and loads it."""
    torch.manual_seed(seed)
    model = sharded(mesh, way)
    optimizer = stepped(model, seed)
    return {
        "model": dict(get_model_state_dict(model)),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def full(value: Any) -> Any:
    """The state with every tensor whole, copied; a collective call."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return value


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves by their dotted names."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in flat(item, f"{path}.{key}"[not path :]).items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    """Every tensor of the same dtype, shape and bits; everything else equal."""
    left, right = flat(actual), flat(expected)
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    for name, value in right.items():
        other = left[name]
        if isinstance(value, torch.Tensor):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert bits(other) == bits(value), name
        else:
            assert other == value, name
