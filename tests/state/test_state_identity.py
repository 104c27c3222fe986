"""What was one object stays one object: ties, shared containers, cycles; depth is bounded."""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
import pytest
import torch
from state_memory import Memory, assert_same_tensor, bits, round_trip

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.flatten import flatten
from thinpoint.state.tree import MAX_NESTING


def test_one_tensor_object_in_many_places() -> None:
    tensor = torch.arange(5.0)
    memory = Memory(flatten({"a": tensor, "b": [tensor]}))
    loaded = memory.load()
    assert loaded["a"] is loaded["b"][0] and len(memory.tensors) == 1


def test_tied_weights_share_memory_and_are_stored_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    state = model.state_dict()
    memory = Memory(flatten(state))
    loaded = memory.load()
    assert len(memory.stored) == 1 and memory.stored[0].size == 160
    loaded["0.weight"][3, 1] = 7.0
    assert loaded["1.weight"][3, 1] == 7.0


def test_overlapping_views_and_views_of_another_dtype_share_memory() -> None:
    base = torch.arange(20, dtype=torch.int32)
    state = {
        "head": base[:12],
        "tail": base[8:],
        "bytes": base.view(torch.uint8)[4:],
        "float": base.view(torch.float32),
    }
    memory = Memory(flatten(state))
    loaded = memory.load()
    assert len(memory.stored) == 1
    for key, value in state.items():
        assert_same_tensor(loaded[key], value)
    loaded["head"][10] = -1
    assert loaded["tail"][2] == -1 and bits(loaded["float"])[40:44] == b"\xff" * 4


def test_shared_lists_and_dicts_stay_shared() -> None:
    inner: list[Any] = [1]
    state = {"a": inner, "b": (inner, {"c": inner})}
    loaded = round_trip(state)
    loaded["a"].append(2)
    assert loaded["b"][0] == [1, 2] and loaded["b"][1]["c"] is loaded["a"]


@pytest.mark.parametrize(
    "shared",
    [
        (1,),
        frozenset({1}),
        bytearray(b"x"),
        b"x" * 5000,
        np.zeros(3),
        collections.deque([1]),
        {1},
        collections.OrderedDict(a=1),
        [1] * 1000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_stay_shared(shared: Any) -> None:
    first, second = round_trip([shared, shared])
    assert first is second


def test_equal_objects_stay_apart() -> None:
    first, second = round_trip([[1], [1]])
    assert first is not second


def test_sharing_does_not_multiply_size() -> None:
    state: Any = (1,)
    for _ in range(90):
        state = (state, state)
    assert len(json.dumps(flatten(state).tree)) < 10_000
    loaded = round_trip(state)
    assert loaded[0] is loaded[1]


def test_cycles_through_lists_and_dicts() -> None:
    state: dict[str, Any] = {"list": []}
    state["list"].append(state)
    state["self"] = state
    loaded = round_trip(state)
    assert loaded["self"] is loaded and loaded["list"][0] is loaded


def test_a_cycle_through_a_tuple_is_refused() -> None:
    inner: list[Any] = []
    state = (inner,)
    inner.append(state)
    with pytest.raises(UnsupportedObjectError, match="contains itself"):
        flatten(state)


def test_a_cycle_from_a_list_through_a_tuple_is_kept() -> None:
    state: list[Any] = []
    state.append((state,))
    loaded = round_trip(state)
    assert loaded[0][0] is loaded


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: (x,), lambda x: collections.OrderedDict(k=x)]
)
def test_nesting_up_to_the_limit_works_and_beyond_it_is_refused(wrap: Any) -> None:
    state: Any = 1
    for _ in range(MAX_NESTING):
        state = wrap(state)
    assert round_trip(state) == state
    with pytest.raises(UnsupportedObjectError, match="nested more than"):
        flatten(wrap(state))


def test_attributes_that_lead_to_tensors_in_a_long_chain_need_no_stack() -> None:
    first = last = torch.zeros(1)
    for i in range(2000):
        last.next = torch.full((1,), float(i))  # type: ignore[attr-defined]
        last = last.next  # type: ignore[attr-defined]
    loaded = round_trip(first)
    for i in range(2000):
        loaded = loaded.next
        assert loaded.item() == i


def test_a_tensor_in_a_cycle_with_its_attributes() -> None:
    tensor = torch.zeros(1)
    tensor.home = {"tensor": tensor}  # type: ignore[attr-defined]
    loaded = round_trip({"x": tensor})
    assert loaded["x"].home["tensor"] is loaded["x"]
