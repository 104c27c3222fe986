"""Overlap on a GPU: reading runs on a stream of its own beside training, and the step's stream waits for it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from overlap_training import WAIT_S, Held, Normed, bytes_of, settings  # noqa: F401
from torch import nn

import thinpoint
from thinpoint.errors import StateChangedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class GpuTraining:
    def __init__(self, make: Any = torch.optim.AdamW, **options: Any) -> None:
        self.model = Normed().cuda()
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-2, **options})
        self.step()

    def compute(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, 128, device="cuda")).square().mean().backward()

    def step(self) -> None:
        self.compute()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.cuda.get_rng_state(),
        }


@pytest.mark.parametrize("codec", ["thin", "raw", "zstd"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_every_file_of_a_run_has_the_values_of_its_call(codec: str, options: dict[str, Any]) -> None:
    training = GpuTraining(**options)
    saved = []
    for _ in range(20):
        state, file = training.state(), io.BytesIO()
        expected = copy.deepcopy(state)
        saved.append((expected, file, thinpoint.async_save(state, file, overlap=True, codec=codec)))
        training.step()
    for expected, file, future in saved:
        report = future.result(WAIT_S)
        assert (report.mode, report.fallback) == ("overlap", None)
        direct = io.BytesIO()
        thinpoint.save(expected, direct, codec=codec)
        assert file.getvalue() == direct.getvalue()


def test_a_training_stream_of_its_own_is_waited_for_and_waits() -> None:
    training, stream = GpuTraining(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(10):
            training.step()
            # Work that is far from done when the call is made.
            torch.cuda._sleep(20_000_000)
            training.step()
            state, file = training.state(), io.BytesIO()
            expected = copy.deepcopy(state)
            future = thinpoint.async_save(state, file, overlap=True)
            training.step()
            assert future.result(WAIT_S).mode == "overlap"
            assert file.getvalue() == bytes_of(expected)


def test_a_change_while_the_state_is_read_fails_the_save() -> None:
    training, held = GpuTraining(), Held()
    future = thinpoint.async_save(training.state(), io.BytesIO(), overlap=True, progress=held)
    assert held.reached.wait(WAIT_S)
    training.model.first.weight.data.view(-1)[-1:] += 1
    held.opened.set()
    assert isinstance(future.exception(WAIT_S), StateChangedError)


def test_a_captured_step_falls_back() -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).sum().backward()
        optimizer.step()

    # The hook that sees the capture comes with the first save.
    state = {"model": model.state_dict()}
    assert thinpoint.async_save(state, io.BytesIO(), overlap=True).result(WAIT_S).mode == "overlap"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected, file = copy.deepcopy(state), io.BytesIO()
    future = thinpoint.async_save(state, file, overlap=True)
    graph.replay()
    report = future.result(WAIT_S)
    assert report.mode == "async" and "CUDA graph" in str(report.fallback)
    assert file.getvalue() == bytes_of(expected)
    assert not state["model"]["weight"].equal(expected["model"]["weight"])
