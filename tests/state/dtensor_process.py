"""Saves and loads DTensors of one gloo process in the working directory; prints what each check found, as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from state_classes import Plain
from state_memory import bits
from torch.distributed.device_mesh import init_device_mesh

import thinpoint
from thinpoint.errors import UnsafeObjectError, UnsupportedObjectError

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import (  # type: ignore[no-redef]
        DTensor,
        Replicate,
        Shard,
        distribute_tensor,
    )

PATH = "state.thin"


@dataclass(frozen=True)
class Saved:
    """A state of DTensors and where it was saved."""

    state: dict[str, Any]
    report: thinpoint.SaveReport


def make_state() -> dict[str, Any]:
    """A model of DTensors after one step, with NaNs and -0.0 in it, its optimizer and some plain data."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 3))
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6, where FSDP2 needs a GPU
        for layer in model:
            for name, parameter in list(layer.named_parameters()):
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                setattr(layer, name, torch.nn.Parameter(sharded))
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, parameter.placements)
    optimizer.step()
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42])
    odd.view(torch.int32)[0] = 0x7F81_2345
    weights = model.state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "parameter": next(model.parameters()),
        "tied": weights["0.weight"],
        "odd": distribute_tensor(odd, mesh, [Replicate()]),
        "step": 7,
    }


def assert_same(found: Any, expected: Any) -> None:
    """Equal in structure, and in every bit, placement and size of the DTensors in it."""
    assert type(found) is type(expected), (type(found), type(expected))
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements and found.device_mesh == expected.device_mesh
        assert (found.shape, found.stride(), found.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        assert found.requires_grad == expected.requires_grad
        assert bits(found._local_tensor) == bits(expected._local_tensor)
    elif isinstance(expected, torch.Tensor):
        assert bits(found) == bits(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def loading_needs_trust(saved: Saved) -> None:
    try:
        thinpoint.load(PATH)
    except UnsafeObjectError as error:
        message = str(error)
    else:
        raise AssertionError("pickled device meshes were loaded with weights_only=True")
    for part in ("Weights only load failed: model.0.weight", "DeviceMesh", "weights_only=False"):
        assert part in message, message


def a_selection_of_plain_data_needs_none(saved: Saved) -> None:
    assert thinpoint.load(PATH, names=["step"]) == {"step": 7}


def loads_bit_for_bit(saved: Saved) -> None:
    assert isinstance(saved.state["model"]["0.weight"], DTensor)
    assert_same(thinpoint.load(PATH, weights_only=False), saved.state)


def tied_tensors_and_meshes_stay_shared(saved: Saved) -> None:
    loaded = thinpoint.load(PATH, weights_only=False)
    assert loaded["tied"] is loaded["model"]["0.weight"]
    assert loaded["odd"].device_mesh is not None
    assert loaded["model"]["1.weight"].device_mesh is loaded["model"]["0.weight"].device_mesh
    parameter = loaded["parameter"]._local_tensor
    assert parameter.data_ptr() == loaded["tied"]._local_tensor.data_ptr()


def parameters_stay_parameters(saved: Saved) -> None:
    loaded = thinpoint.load(PATH, weights_only=False)["parameter"]
    assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad
    assert not isinstance(thinpoint.load(PATH, weights_only=False)["tied"], torch.nn.Parameter)


def moments_keep_their_roles(saved: Saved) -> None:
    moment_bytes = 4 * sum(tensor.numel() for tensor in saved.state["model"].values())
    assert saved.report.roles["first_moment"][0] == moment_bytes
    assert saved.report.roles["second_moment"][0] == moment_bytes


def inside_a_pickle(saved: Saved) -> None:
    tensor = saved.state["model"]["0.weight"]
    for state in ({"object": Plain(tensor), "tree": tensor}, {"tree": tensor, "object": Plain(tensor)}):
        thinpoint.save(state, "pickle.thin")
        loaded = thinpoint.load("pickle.thin", weights_only=False)
        assert_same(loaded["object"].value, tensor)
        assert_same(loaded["tree"], tensor)


def fills_in_place_without_trust(saved: Saved) -> None:
    live = make_state()
    expected = {name: bits(tensor._local_tensor) for name, tensor in saved.state["model"].items()}
    with torch.no_grad():
        for tensor in [*live["model"].values(), live["odd"]]:
            tensor._local_tensor.zero_()
    report = thinpoint.load_into(PATH, live)
    assert not report.missing and not report.unexpected
    assert {name: bits(tensor._local_tensor) for name, tensor in live["model"].items()} == expected
    assert_same(live, saved.state)


def without_pickle_it_is_refused(saved: Saved) -> None:
    try:
        thinpoint.save(saved.state, "refused.thin", allow_pickle=False)
    except UnsupportedObjectError as error:
        message = str(error)
    else:
        raise AssertionError("a device mesh was stored without pickle")
    assert message.startswith("model.0.weight.") and "only be stored by pickle" in message, message
    assert not Path("refused.thin").exists()


CHECKS: list[Callable[[Saved], None]] = [
    loading_needs_trust,
    a_selection_of_plain_data_needs_none,
    loads_bit_for_bit,
    tied_tensors_and_meshes_stay_shared,
    parameters_stay_parameters,
    moments_keep_their_roles,
    inside_a_pickle,
    fills_in_place_without_trust,
    without_pickle_it_is_refused,
]


def outcome(check: Callable[[Saved], None], saved: Saved) -> str:
    """ "passed", or what went wrong."""
    try:
        check(saved)
    except Exception:  # noqa: BLE001 - whatever it is, the test that asked shows it
        return traceback.format_exc()
    return "passed"


def main() -> None:
    store = Path("store").resolve()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        state = make_state()
        saved = Saved(state, thinpoint.save(state, PATH))
        found = {check.__name__: outcome(check, saved) for check in CHECKS}
    finally:
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
