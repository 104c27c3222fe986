"""Wrapper subclasses: parts that are no tensors, inside pickles, filled in place, and DTensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from state_classes import Frozen, Plain
from state_memory import Memory, assert_same_tensor, bits, round_trip
from state_tensors import Scaled

from thinpoint.errors import MalformedFileError, UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.flatten import flatten
from thinpoint.state.into import plan_into


def test_parts_that_are_no_tensors_are_kept() -> None:
    shared = [1, 2]
    tensor = Scaled(torch.arange(6.0), {"by": shared, "also": shared}, context=(1, "x"))
    loaded = round_trip({"x": tensor, "values": tensor.values}, allow_pickle=False)
    assert type(loaded["x"]) is Scaled and loaded["x"].context == (1, "x")
    assert loaded["x"].scale == tensor.scale and loaded["x"].scale["by"] is loaded["x"].scale["also"]
    assert loaded["x"].values is loaded["values"]
    assert bits(loaded["values"]) == bits(tensor.values)


def test_a_part_that_needs_pickle_needs_trust_and_stays_shared() -> None:
    scale = Plain(0.5)
    memory = Memory(flatten([Scaled(torch.ones(2), scale), Scaled(torch.zeros(3), scale)]))
    with pytest.raises(UnsafeObjectError, match=r"0\.scale is a pickled state_classes\.Plain"):
        memory.load()
    first, second = Memory(flatten([Scaled(torch.ones(2), scale), Scaled(torch.zeros(3), scale)])).load(
        weights_only=False
    )
    assert first.scale is second.scale and first.scale.value == 0.5
    assert bits(second.values) == bits(torch.zeros(3))


@pytest.mark.parametrize(
    "objects", [None, [], [1], "x", {"dict": [1, 2]}, {"dict": ["values", 1]}, {"ref": 0}]
)
def test_malformed_objects_of_a_subclass(objects: Any) -> None:
    memory = Memory(flatten(Scaled(torch.ones(2), 1)))
    memory.tensors[0]["subclass"]["objects"] = objects
    with pytest.raises(MalformedFileError):
        memory.load()


def test_a_part_that_the_file_lacks_is_reported_by_the_class() -> None:
    memory = Memory(flatten(Scaled(torch.ones(2), 1)))
    del memory.tensors[0]["subclass"]["objects"]
    with pytest.raises(UnsupportedObjectError, match="__tensor_unflatten__ failed: 'scale'"):
        memory.load()


@pytest.mark.parametrize("scale", [1, Plain(1)])
@pytest.mark.parametrize("context", [None, Plain(2), Frozen(3)])
@pytest.mark.parametrize("order", [("tree", "object"), ("object", "tree")])
def test_a_subclass_inside_a_pickle(scale: Any, context: Any, order: tuple[str, str]) -> None:
    # Reading a pickle cannot wait for the pickled part of a tensor in it, which stands later in the stream.
    tensor = Scaled(torch.arange(500.0), scale, context)
    state = {"tree": tensor, "object": Plain([tensor, Scaled(tensor.values, 2)])}
    loaded = round_trip({name: state[name] for name in order}, weights_only=False)
    inside, other = loaded["object"].value
    for found in (loaded["tree"], inside):
        assert type(found) is Scaled and type(found.scale) is type(scale)
        assert type(found.context) is type(context)
        assert_same_tensor(found.values, tensor.values)
    assert other.values.untyped_storage().data_ptr() == inside.values.untyped_storage().data_ptr()
    assert loaded["tree"].values.untyped_storage().data_ptr() == inside.values.untyped_storage().data_ptr()


def test_the_tensors_inside_are_filled_in_place() -> None:
    flat = flatten({"x": Scaled(torch.ones(2), Plain(1))})
    live = {"x": Scaled(torch.zeros(2), Plain(2))}
    plan = plan_into(flat.tree, flat.tensors, live)
    plan.check()
    assert [pair.target for pair in plan.pairs] == [live["x"].values] and not plan.value_paths


CHECKS = [
    "loading_needs_trust",
    "a_selection_of_plain_data_needs_none",
    "loads_bit_for_bit",
    "tied_tensors_and_meshes_stay_shared",
    "parameters_stay_parameters",
    "moments_keep_their_roles",
    "inside_a_pickle",
    "fills_in_place_without_trust",
    "without_pickle_it_is_refused",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check of `dtensor_process.py` found, run in a process of its own: process groups are global."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    # Gloo would otherwise listen on the interface of the machine's host name.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dtensor_process.py"))],
        cwd=tmp_path_factory.mktemp("dtensor"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == sorted(CHECKS)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_dtensors(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == "passed", outcomes[check]
