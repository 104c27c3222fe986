"""Objects that only pickle can take: stored with their tensors outside, refused on load unless trusted."""

from __future__ import annotations

import base64
import functools
import io
import os
import pickle
import threading
from typing import Any

import pytest
import torch
from state_classes import Plain
from state_memory import Memory, assert_same_tensor, bits, round_trip

from thinpoint.errors import MalformedFileError, UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.flatten import flatten


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_whole_module_with_its_tensors_outside_the_pickle() -> None:
    model, _ = trained()
    memory = Memory(flatten({"model": model}))
    assert len(memory.tensors) == len(model.state_dict())
    loaded = memory.load(weights_only=False)["model"]
    for name, tensor in model.state_dict().items():
        assert_same_tensor(loaded.state_dict()[name], tensor)
    assert isinstance(loaded[0].weight, torch.nn.Parameter)


def test_module_optimizer_and_scheduler_stay_connected() -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "weight": model[0].weight}
    loaded = round_trip(state, weights_only=False)
    assert loaded["scheduler"].optimizer is loaded["optimizer"]
    assert loaded["optimizer"].param_groups[0]["params"][0] is loaded["model"][0].weight
    assert loaded["weight"] is loaded["model"][0].weight
    before = loaded["weight"].detach().clone()
    loaded["model"](torch.ones(2, 4)).sum().backward()
    loaded["optimizer"].step()
    assert bits(before) != bits(loaded["model"][0].weight)


def test_selecting_one_pickle_reads_those_before_it() -> None:
    model, optimizer = trained()
    memory = Memory(flatten({"model": model, "optimizer": optimizer, "other": torch.ones(3)}))
    loaded = memory.load(weights_only=False, select={("optimizer",)})
    assert set(loaded) == {"optimizer"}
    parameter = loaded["optimizer"].param_groups[0]["params"][0]
    assert bits(parameter) == bits(model[0].weight)


def test_partials_and_functions() -> None:
    loaded = round_trip(functools.partial(os.path.join, "a"), weights_only=False)
    assert loaded("b") == os.path.join("a", "b")


def test_an_attribute_that_needs_pickle_on_a_tensor_inside_a_pickle() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = Plain(5)  # type: ignore[attr-defined]
    loaded = round_trip(Plain([parameter]), weights_only=False)
    assert loaded.value[0].note.value == 5


def test_lambdas_are_refused_with_their_path() -> None:
    with pytest.raises(
        UnsupportedObjectError, match=r"hooks\.0 is a builtins\.function, which cannot be pickled"
    ):
        flatten({"hooks": [lambda x: x]})


def test_objects_that_refuse_to_be_pickled_name_their_path() -> None:
    with pytest.raises(UnsupportedObjectError, match=r"log is a _thread\.lock, which cannot be pickled"):
        flatten({"log": threading.Lock()})


def test_a_cycle_that_pickle_cannot_bound_is_an_error_and_no_crash() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = Plain(deep)
    with pytest.raises(UnsupportedObjectError, match="cannot be pickled"):
        flatten(deep)
    # Unwinds the chain from the outside, since the destructor would recurse.
    while deep is not None:
        deep = deep.value


def test_the_refusal_says_what_where_and_what_to_do() -> None:
    memory = Memory(flatten({"run": {"args": Plain(Plain)}}))
    with pytest.raises(UnsafeObjectError) as caught:
        memory.load()
    message = str(caught.value)
    for part in (
        "Weights only load failed",
        "run.args",
        "state_classes.Plain",
        "weights_only=False",
        "arbitrary code",
        "only if you trust the source",
    ):
        assert part in message
    assert caught.value.exit_code == 5


def test_a_refused_pickle_does_not_run() -> None:
    memory = Memory(flatten([Plain(1)]))
    stream = io.BytesIO()
    pickle.dump(Bomb(), stream)
    memory.tree[0]["pickle"]["data"] = base64.b64encode(stream.getvalue()).decode()
    with pytest.raises(UnsafeObjectError):
        memory.load()
    assert Bomb.exploded == 0
    memory.load(weights_only=False)
    assert Bomb.exploded == 1


class Bomb:
    exploded = 0

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> int:
    Bomb.exploded += 1
    return Bomb.exploded


def test_a_selection_without_the_pickle_needs_no_trust() -> None:
    memory = Memory(flatten({"args": Plain(1), "weight": torch.ones(2)}))
    assert list(memory.load(select={("weight",)})) == ["weight"]


def test_a_pickle_may_only_use_the_tensors_that_it_lists() -> None:
    memory = Memory(flatten([Plain(torch.ones(2))]))
    memory.tree[0]["pickle"]["tensors"] = []
    with pytest.raises(MalformedFileError, match="does not list"):
        memory.load(weights_only=False)


@pytest.mark.parametrize("field", ["index", "type", "classes", "tensors", "data"])
@pytest.mark.parametrize("value", [None, -1, "x", [None], {}, 7, True])
def test_malformed_pickles(field: str, value: object) -> None:
    memory = Memory(flatten([Plain(torch.ones(2))]))
    memory.tree[0]["pickle"][field] = value
    if field == "type" and value == "x":
        return
    with pytest.raises((MalformedFileError, UnsupportedObjectError)):
        memory.load(weights_only=False)
