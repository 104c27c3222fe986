"""Overlap from within: whose tensors are whose, copies, and the proof that nothing changed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_backend import CopyingBackend, on_cpu, zoo
from torch import nn

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.engine.backends import Backends, Devices
from thinpoint.engine.encode import MakeParts
from thinpoint.engine.overlap import OverlapSaving
from thinpoint.engine.overlap_check import CheckedFlow, InPlace
from thinpoint.engine.overlap_copies import copied
from thinpoint.engine.overlap_owners import (
    Owned,
    has_stepped,
    known_optimizers,
    owned_by,
    storage_key,
    tensors_of,
    why_not_in_place,
)
from thinpoint.engine.overlap_reading import Reading
from thinpoint.engine.save import run
from thinpoint.engine.workers import Workers
from thinpoint.errors import StateChangedError
from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import FlatState
from thinpoint.store import open_sink

HOST = get_backend("cpu")


class Nested(torch.optim.SGD):
    """Keeps state in lists and dicts, and of the whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        first = self.param_groups[0]["params"][0]
        self.state[first] = {"a": [torch.zeros(3), {"b": (torch.zeros(4),)}], "n": 5}
        self.state["all"] = torch.zeros(6)  # type: ignore[index]
        self.state["sparse"] = torch.zeros(7).to_sparse()  # type: ignore[index]


def test_all_strided_tensors_of_an_optimizer_are_its_own() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Nested([parameter])
    assert [tuple(t.shape) for t in tensors_of(optimizer)] == [(2,), (3,), (4,), (6,)]
    keys = {storage_key(t) for t in tensors_of(optimizer)}
    assert storage_key(parameter.detach()[1:]) in keys and storage_key(torch.zeros(2)) not in keys


def test_optimizers_own_only_what_is_in_the_state() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizers = [torch.optim.SGD([one]), torch.optim.SGD([other])]
    key = storage_key(one)
    owned = owned_by(optimizers, {key} if key is not None else set())
    assert owned.optimizers == optimizers[:1] and list(owned.tensors) == [key]
    assert owned_by([], {1}) == Owned()


def test_optimizers_are_known_once_they_stepped_or_were_searched_for() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    assert not any(each is optimizer for each in known_optimizers())
    assert any(each is optimizer for each in known_optimizers(search=True))
    assert any(each is optimizer for each in known_optimizers())


def test_a_step_that_was_captured_forbids_reading_in_place() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    has_stepped(optimizer, in_graph=False)
    assert why_not_in_place([optimizer]) is None
    has_stepped(optimizer, in_graph=True)
    assert "CUDA graph" in str(why_not_in_place([optimizer]))


def test_copies_have_the_same_bytes_and_their_own_memory() -> None:
    state = flatten(zoo())
    copies = [copied(storage) for storage in state.storages]
    before = [_bytes(storage) for storage in copies]
    assert before == [_bytes(storage) for storage in state.storages]
    for storage in state.storages:
        if storage.view is not None:
            storage.view(0, storage.num_bytes).bitwise_not_()
    assert [_bytes(storage) for storage in copies] == before
    for one, other in zip(copies, state.storages, strict=True):
        assert (one.num_bytes, one.device, one.regions) == (other.num_bytes, other.device, other.regions)
        assert (one.view is None) == (other.view is None)


def _bytes(storage: Any) -> list[bytes]:
    return [storage.read(r.start_bytes, r.end_bytes).tobytes() for r in storage.regions]


def in_place_of(state: FlatState) -> InPlace:
    places = [i for i, storage in enumerate(state.storages) if storage.view and storage.regions]
    return InPlace(state.storages, places, [[] for _ in places])


def saving_of(state: FlatState, in_place: InPlace, devices: Devices) -> OverlapSaving:
    own = in_place.sources()
    storages = [own.get(i, storage) for i, storage in enumerate(state.storages)]
    return OverlapSaving(
        FlatState(tree=state.tree, tensors=state.tensors, storages=storages),
        Backends(HOST, devices),
        in_place=in_place,
        reading=Reading(Owned(), []),
        host_bytes=1 << 30,
        may_fill_budget=True,
    )


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_kind_of_tensor_read_in_place_gives_the_file_of_save(
    is_on_device: bool, num_threads: int
) -> None:
    objects, direct, file = zoo(), io.BytesIO(), io.BytesIO()
    thinpoint.save(objects, direct)
    state = flatten(objects)
    saving = saving_of(state, in_place_of(state), on_cpu(CopyingBackend()) if is_on_device else Devices())
    with Workers(num_threads) as workers:
        run(saving, open_sink(file), workers)
    assert file.getvalue() == direct.getvalue()


def test_the_digests_of_the_live_bytes_are_those_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that does not belong to the bytes encoded fails the save, whichever part it is of."""
    objects = {"a": torch.randn(70_000), "b": torch.randn(300), "c": torch.zeros(5000)}
    state = flatten(objects)
    in_place = in_place_of(state)
    with Workers(1) as workers:
        found = in_place.check(workers, Devices(), lambda: None)
    assert set(found) == {(0, 0), (1, 0), (2, 0)}
    for place, name in enumerate(objects):
        saving = saving_of(state, in_place, Devices())
        wrong = {**found, (place, 0): found[place, 0] ^ 1}
        monkeypatch.setattr(saving, "_check", lambda workers, wrong=wrong: wrong)
        with Workers(1) as workers, pytest.raises(StateChangedError) as caught:
            run(saving, nullcontext(_Nowhere()), workers)  # type: ignore[arg-type]
        assert caught.value.tensor == name


class _Nowhere(io.BytesIO):
    def write_all(self, buffers: list[Any], *, map: Any) -> None:
        """Takes everything."""


def test_an_error_of_the_check_ends_both_sides_of_the_flow() -> None:
    state = flatten([torch.randn(5000)])
    flow = CheckedFlow(1000, in_place_of(state))

    def broken() -> dict[tuple[int, int], int]:
        raise StateChangedError("changed")

    flow.check_read = broken
    used: list[MakeParts] = []
    with pytest.raises(StateChangedError):
        flow.close()
    flow.stop(StateChangedError("changed"))
    with pytest.raises(StateChangedError):
        flow.drain(used.append)
    assert not used


def test_a_step_under_capture_waits_on_the_host_until_reading_is_over() -> None:
    parameter = nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.SGD([parameter])
    key = storage_key(parameter)
    assert key is not None
    reading = Reading(owned_by([optimizer], {key}), [torch.device("cpu")])
    reading.begin()
    waiting = threading.Thread(target=lambda: reading.hold(optimizer, in_graph=True))
    try:
        waiting.start()
        with reading.on_streams():
            reading.launched()
            reading.hold(optimizer, in_graph=False)
            waiting.join(0.2)
            assert waiting.is_alive()
    finally:
        reading.end()
    waiting.join(30)
    assert not waiting.is_alive() and reading.held_s >= 0
    reading.end()


_INTERPRETED = """
import copy, io
import torch, thinpoint
from thinpoint.digest import digest
from thinpoint.engine.backends import Devices
from thinpoint.engine.jobs import part_jobs
from thinpoint.engine.overlap_check import _begin_digests
from thinpoint.state.flatten import flatten
model = torch.nn.Linear(40, 40)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 40)).sum().backward()
state = {"model": model.state_dict()}
direct, file = io.BytesIO(), io.BytesIO()
thinpoint.save(copy.deepcopy(state), direct, backend="cpu")
future = thinpoint.async_save(state, file, overlap=True, backend="triton")
optimizer.step()
report = future.result(100)
assert (report.mode, report.backend) == ("overlap", "triton"), report
assert file.getvalue() == direct.getvalue()
storages = flatten([torch.randn(5000), torch.randn(3), torch.randn(1001).half()]).storages
jobs = list(part_jobs(storages, Devices()))
found = dict(_begin_digests(torch.device("cpu"), jobs)())
assert found == {(j.storage_index, j.start): digest(j.storage.read(j.start, j.end)) for j in jobs}
"""


@pytest.mark.slow
def test_the_devices_own_kernels_encode_and_digest_what_is_read_in_place() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
