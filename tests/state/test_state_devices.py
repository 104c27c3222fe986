"""map_location as `torch.load` understands it, and the CPU where a recorded device is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_memory import bits

from thinpoint.errors import BackendUnavailableError, UsageError
from thinpoint.state.devices import place, resolve_device
from thinpoint.state.flatten import flatten

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@no_cuda
@pytest.mark.parametrize("recorded", ["cuda:0", "cuda:7", "npu:0", "meta", "no such device", ""])
def test_a_recorded_device_that_is_not_here_gives_the_cpu(recorded: str) -> None:
    assert resolve_device(recorded) == torch.device("cpu")
    assert resolve_device(recorded, {"cuda:99": "cpu"}) == torch.device("cpu")


@pytest.mark.parametrize(
    "wanted", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {torch.device("cuda:0"): "cpu"}]
)
def test_a_device_by_name_object_or_dict(wanted: Any) -> None:
    assert resolve_device("cuda:0", wanted) == torch.device("cpu")


def test_the_meta_device_can_be_asked_for() -> None:
    assert resolve_device("cpu", "meta") == torch.device("meta")


@no_cuda
def test_a_device_asked_for_that_is_not_here_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="cuda:1"):
        resolve_device("cpu", "cuda:1")


@pytest.mark.parametrize("wanted", ["gpu please", 3.5, ["cpu"]])
def test_nonsense_is_an_error(wanted: Any) -> None:
    with pytest.raises(UsageError, match="map_location"):
        resolve_device("cpu", wanted)


def test_a_callable_gets_the_cpu_storage_and_the_recorded_location() -> None:
    storage = torch.UntypedStorage(8)
    seen = []

    def locate(found: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        seen.append((found, location))
        return None if location == "cpu" else torch.UntypedStorage(16)

    assert resolve_device("cuda:3", locate) == torch.device("cpu")
    assert place(storage, "cuda:3", locate).nbytes() == 16
    assert place(storage, "cpu", locate) is storage
    assert seen == [(storage, "cuda:3"), (storage, "cpu")]
    assert place(storage, "cuda:3", "cpu") is storage


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_gpu_storages_are_read_in_ranges_and_keep_their_device() -> None:
    tensor = torch.arange(1000.0, device="cuda")[100:]
    (source,) = flatten(tensor).storages
    assert source.device == "cuda:0"
    assert source.read(40, 80).tobytes() == bits(tensor.cpu())[40:80]
    assert resolve_device("cuda:0") == torch.device("cuda:0")
