"""The ten lines of the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1200, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(tokens))


def test_the_ten_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    before, found, after = code.group(1).partition("thinpoint.load_into")
    assert found
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1000}
    exec(before, names)
    names["model"] = Model()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    exec(found + after, names)
    assert names["model"].out.weight.equal(model.out.weight)
    assert names["rows"].equal(model.embedding.weight[1000:1010])
    moments = names["optimizer"].state_dict()["state"][0]["exp_avg"]
    assert moments.equal(optimizer.state_dict()["state"][0]["exp_avg"])
