"""Filling a state that is already there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_classes import Config
from state_memory import Memory, bits
from state_tensors import Scaled
from torch.testing._internal.two_tensor import TwoTensor

from thinpoint.errors import StateMismatchError
from thinpoint.state.flatten import flatten
from thinpoint.state.into import IntoPlan, plan_into


def fill(memory: Memory, state: Any, **options: bool) -> IntoPlan:
    """What `load_into` will do: check, write the tensors in place, set the values."""
    plan = plan_into(memory.tree, memory.tensors, state)
    plan.check(**options)
    source = Memory.__new__(Memory)
    source.__dict__.update(memory.__dict__, fetched=[], ranges={})
    everything = source.load(weights_only=False)
    for pair in plan.pairs:
        stored = everything
        for step in pair.path:
            stored = stored[step] if not isinstance(stored, torch.Tensor) else getattr(stored, step)
        with torch.no_grad():
            pair.target.copy_(stored)
    if plan.value_paths:
        plan.set_values(memory.load(select=plan.value_paths))
    return plan


def trained(seed: int, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": steps}


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()
    }


@pytest.mark.parametrize("steps", [3, 0])
def test_modules_optimizers_and_schedulers_are_filled(steps: int) -> None:
    saved = trained(0)
    memory = Memory(flatten(state_dicts(saved)))
    live = trained(1, steps)
    addresses = [parameter.data_ptr() for parameter in live["model"].parameters()]
    plan = fill(memory, live)
    assert [parameter.data_ptr() for parameter in live["model"].parameters()] == addresses
    assert live["step"] == 2
    for name, tensor in saved["model"].state_dict().items():
        assert bits(live["model"].state_dict()[name]) == bits(tensor)
    found, expected = live["optimizer"].state_dict(), saved["optimizer"].state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for index, moments in expected["state"].items():
        for name, tensor in moments.items():
            assert bits(found["state"][index][name]) == bits(tensor)
    assert live["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert (plan.missing, plan.unexpected, plan.shapes, plan.dtypes) == ([], [], [], [])


def test_containers_and_tensors_keep_their_identity() -> None:
    memory = Memory(flatten({"a": {"x": torch.ones(2)}, "b": [torch.ones(1), 5], "c": (torch.ones(3), 1)}))
    live = {"a": {"x": torch.zeros(2)}, "b": [torch.zeros(1), 0], "c": [torch.zeros(3), 0]}
    tensor, inner, items = live["a"]["x"], live["a"], live["b"]
    fill(memory, live)
    assert live["a"] is inner and inner["x"] is tensor and tensor.tolist() == [1, 1]
    assert live["b"] is items and items[1] == 5 and live["c"][1] == 1


def test_other_strides_are_fine() -> None:
    memory = Memory(flatten({"x": torch.arange(6.0).view(2, 3)}))
    live = {"x": torch.zeros(3, 2).t()}
    fill(memory, live)
    assert live["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_differences_are_listed() -> None:
    memory = Memory(
        flatten(
            {"a": torch.ones(2), "b": torch.ones(3), "c": {"d": torch.ones(1), "e": 1}, "f": torch.ones(1)}
        )
    )
    live = {
        "a": torch.ones(3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "f": "text",
        "g": {"h": torch.ones(1), "i": 2},
    }
    with pytest.raises(StateMismatchError, match="2 missing") as caught:
        plan_into(memory.tree, memory.tensors, live).check()
    assert caught.value.missing == ["g.h", "g.i"]
    assert caught.value.unexpected == ["c.d", "c.e"]
    assert caught.value.mismatched == [
        "a: (2,) in the file, (3,) in the state",
        "f: a tensor in the file, str in the state",
        "b: float32 in the file, bfloat16 in the state",
    ]


def test_not_strict_ignores_names_but_not_shapes() -> None:
    memory = Memory(flatten({"a": torch.ones(2), "only here": 1}))
    fill(memory, {"a": torch.zeros(2), "only there": 1}, strict=False)
    with pytest.raises(StateMismatchError, match="1 mismatched"):
        fill(memory, {"a": torch.zeros(3)}, strict=False)


def test_cast_allows_another_dtype() -> None:
    memory = Memory(flatten({"a": torch.ones(2)}))
    live = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(StateMismatchError, match="cast=True"):
        fill(memory, live)
    fill(memory, live, cast=True)
    assert live["a"].tolist() == [1, 1]


def test_keys_that_are_no_strings() -> None:
    memory = Memory(flatten({1: torch.ones(1), ("a", 2): torch.ones(2), torch.float32: 5}))
    live = {1: torch.zeros(1), ("a", 2): torch.zeros(2), torch.float32: 0}
    fill(memory, live)
    assert live[1].item() == 1 and live[("a", 2)].tolist() == [1, 1] and live[torch.float32] == 5


def test_values_of_other_shapes_replace_what_is_there() -> None:
    memory = Memory(
        flatten(
            {"history": [1, 2, 3], "config": Config(0.5), "nothing": None, "pair": (1, 2), "long": [1] * 999}
        )
    )
    live: dict[str, Any] = {"history": [], "config": Config(0.1), "nothing": 3, "pair": (0, 0), "long": [0]}
    fill(memory, live)
    assert live == {
        "history": [1, 2, 3],
        "config": Config(0.5),
        "nothing": None,
        "pair": (1, 2),
        "long": [1] * 999,
    }


def test_shared_values_are_set_in_both_places() -> None:
    shared = {"lr": 0.1}
    memory = Memory(flatten({"a": shared, "b": shared}))
    live: dict[str, Any] = {"a": {"lr": 0.0}, "b": None}
    fill(memory, live)
    assert live == {"a": {"lr": 0.1}, "b": {"lr": 0.1}}


def test_wrapper_subclasses_are_filled_inside() -> None:
    memory = Memory(flatten({"x": TwoTensor(torch.ones(2), torch.full((2,), 5.0))}))
    live = {"x": TwoTensor(torch.zeros(2), torch.zeros(2))}
    fill(memory, live)
    assert live["x"].a.tolist() == [1, 1] and live["x"].b.tolist() == [5, 5]


@pytest.mark.parametrize("context", [{"block": 64}, None])
def test_a_subclass_made_in_another_way_is_not_filled(context: Any) -> None:
    memory = Memory(flatten({"x": Scaled(torch.ones(2), 3, {"block": 32})}))
    live = Scaled(torch.zeros(2), 3, context)
    with pytest.raises(StateMismatchError, match="made in another way"):
        fill(memory, {"x": live})
    assert not live.values.any()
    fill(memory, {"x": Scaled(torch.zeros(2), 3, {"block": 32})})


def test_a_subclass_of_another_class_is_not_filled() -> None:
    memory = Memory(flatten({"x": TwoTensor(torch.ones(2), torch.ones(2))}))
    with pytest.raises(StateMismatchError, match="another class"):
        fill(memory, {"x": Scaled(torch.zeros(2), 3)})


def test_sparse_tensors_cannot_be_filled() -> None:
    sparse = torch.eye(2).to_sparse()
    memory = Memory(flatten({"x": sparse}))
    with pytest.raises(StateMismatchError, match="cannot be filled in place"):
        fill(memory, {"x": torch.zeros(2, 2)})


def test_a_module_alone() -> None:
    saved, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fill(Memory(flatten(saved.state_dict())), live)
    assert bits(live.weight) == bits(saved.weight)
