"""Nothing keeps tensors alive after a save or a load: they may be most of the memory of a device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from state_classes import Plain
from state_memory import Memory
from state_tensors import Scaled

from thinpoint.errors import UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.flatten import flatten, key_step


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Only reference counts free memory while a test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_state() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = Plain("note")  # type: ignore[attr-defined]
    return {
        "plain": torch.ones(300),
        "parameter": parameter,
        "scaled": Scaled(torch.ones(4), Plain(1), (2,)),
        "object": Plain([parameter, torch.zeros(5)]),
    }


def watch(state: dict[str, Any]) -> list[weakref.ref[Any]]:
    parts = [*state.values(), state["scaled"].values, *state["object"].value]
    return [weakref.ref(part) for part in parts]


def test_a_flattened_state_dies_with_the_result() -> None:
    state = make_state()
    watched = watch(state)
    flat = flatten(state)
    del state, flat
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_state_that_was_refused_dies() -> None:
    state = make_state()
    watched = watch(state)
    try:
        flatten({**state, "lambda": lambda: None})
    except UnsupportedObjectError:
        del state
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_loaded_state_dies_with_its_last_reference() -> None:
    loaded = Memory(flatten(make_state())).load(weights_only=False)
    watched = watch(loaded)
    assert all(ref() is not None for ref in watched)
    del loaded
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_load_that_was_refused_leaves_no_storages() -> None:
    storages: list[weakref.ref[Any]] = []
    memory = Memory(flatten({"plain": torch.ones(300), "object": Plain(1)}))

    def fetch(storage_id: int, needed: list[tuple[int, int]]) -> torch.UntypedStorage:
        storage = Memory.fetch_storage(memory, storage_id, needed)
        storages.append(weakref.ref(storage))
        return storage

    memory.fetch_storage = fetch  # type: ignore[method-assign]
    try:
        memory.load()
    except UnsafeObjectError:
        pass
    else:
        raise AssertionError("a pickle was loaded")
    assert len(storages) == 1 and storages[0]() is None


def test_a_key_dies_with_its_last_reference() -> None:
    key = torch.ones(3)
    watched = weakref.ref(key)
    key_step(key)
    del key
    assert watched() is None
