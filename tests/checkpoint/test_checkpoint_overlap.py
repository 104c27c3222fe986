"""`Checkpointer(mode="overlap")`: training goes on while the state is read."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import FAST
from torch import nn

from thinpoint.checkpoint import Checkpointer
from thinpoint.engine.overlap_check import InPlace
from thinpoint.errors import UsageError


class Run:
    """A model with buffers that change in forward, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()

    def values(self) -> Any:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def bits(values: Any) -> list[bytes]:
    tensors = [values["model"][name] for name in sorted(values["model"])]
    for key in sorted(values["optimizer"]["state"]):
        tensors += [tensor for _, tensor in sorted(values["optimizer"]["state"][key].items())]
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def test_every_checkpoint_has_the_values_of_its_step(tmp_path: Path) -> None:
    run, expected, events = Run(), {}, []
    with Checkpointer(
        tmp_path, mode="overlap", every_steps=1, on_event=events.append, **FAST
    ) as checkpointer:
        for step in range(1, 9):
            run.step()
            expected[step] = bits(run.values())
            assert checkpointer.maybe_save(run.state, step) is not None
    assert [(event.saved.mode, event.saved.fallback) for event in events] == [("overlap", None)] * 8
    assert json.loads(events[0].to_json())["mode"] == "overlap"
    for event in events:
        assert event.stall_seconds >= event.saved.stages["hold"]
    with Checkpointer(tmp_path) as checkpointer:
        for step, values in expected.items():
            assert bits(checkpointer.load(step)) == values


def test_a_change_while_the_state_is_read_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, was_changed = Run(), threading.Event()
    check = InPlace.check

    def check_later(*arguments: Any) -> Any:
        assert was_changed.wait(60)
        return check(*arguments)

    with Checkpointer(tmp_path, mode="overlap", on_error="warn", **FAST) as checkpointer:
        checkpointer.save(run.state, 1)
        before = bits(run.values())
        run.step()
        monkeypatch.setattr(InPlace, "check", check_later)
        future = checkpointer.async_save(run.state, 2)
        assert not future.staging_completion.done()
        with torch.no_grad():
            run.model[0].weight += 1
        was_changed.set()
        report = future.result(60)
        assert report.outcome == "failed" and "StateChangedError" in str(report.error)
        assert checkpointer.latest() == 1
        run.step()
        assert checkpointer.async_save(run.state, 3).result(60).outcome == "committed"
    assert bits(Checkpointer(tmp_path).load(1)) == before


def test_without_an_optimizer_it_falls_back_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, mode="overlap", **FAST) as checkpointer:
        future = checkpointer.async_save({"w": torch.randn(3000)}, 1)
        assert future.staging_completion.result(0) is None
        report = future.result(60)
    assert report.saved is not None and report.saved.mode == "async"
    assert "belongs to a torch optimizer" in json.loads(report.to_json())["fallback"]
    with pytest.raises(UsageError, match="mode is not valid"):
        Checkpointer(tmp_path, mode="sync")  # type: ignore[arg-type]
