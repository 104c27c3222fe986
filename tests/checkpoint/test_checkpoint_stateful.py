"""Models and optimizers are given as they are, to save and to restore."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import thinpoint
from thinpoint.checkpoint.stateful import state_of


def run(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "rest": [optimizer, {"step": 0}]}


def train(state: dict[str, Any]) -> None:
    optimizer, counter = state["rest"]
    state["model"](torch.randn(8, 40)).pow(2).sum().backward()
    optimizer.step()
    counter["step"] += 1


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    state = run(0)
    with thinpoint.Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert checkpointer.restore(state) is None
        for step in (1, 2):
            train(state)
            checkpointer.maybe_save(lambda: state, step)
    other = run(1)
    with thinpoint.Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.restore(other)
        assert report is not None and report.step == 2
        # Nothing was pickled.
        stored = checkpointer.load(weights_only=True)
    assert other["rest"][1] == {"step": 2}
    expected, found = state_of(state), state_of(other)
    for one, two in ((expected, found), (expected, stored)):
        for key, value in one["model"].items():
            assert value.numpy().tobytes() == two["model"][key].numpy().tobytes()
        for parameter, moments in one["rest"][0]["state"].items():
            for name, value in moments.items():
                assert value.numpy().tobytes() == two["rest"][0]["state"][parameter][name].numpy().tobytes()


def test_only_what_stands_for_a_state_dict_is_replaced() -> None:
    model = torch.nn.Linear(2, 2)
    plain = {"a": [1, (2, torch.ones(2))], "b": OrderedDict(c=torch.nn.Linear)}
    assert state_of(plain) is plain
    mixed = {"a": plain["a"], "m": (model, 3), "o": OrderedDict(m=model)}
    found = state_of(mixed)
    assert found["a"] is plain["a"]
    assert found["m"][1] == 3 and found["m"][0].keys() == model.state_dict().keys()
    assert type(found["o"]) is OrderedDict and mixed["m"][0] is model
    cycle: list[Any] = [model]
    cycle.append(cycle)
    assert state_of(cycle)[1] is cycle
