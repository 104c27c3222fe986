"""A small training run to save while it goes on, and a way to hold the reading of its state up."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import thinpoint
from thinpoint.engine import background, overlap, overlap_reading
from thinpoint.engine import encode as engine_encode
from thinpoint.engine import jobs as engine_jobs

WAIT_S = 60


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("THINPOINT_DISABLE_ASYNC", "THINPOINT_HOST_MEMORY", "THINPOINT_EXIT_WAIT"):
        monkeypatch.delenv(name, raising=False)
    for module in (engine_jobs, engine_encode):
        monkeypatch.setattr(module, "PART_BYTES", 1 << 18)
    overlap.log_fallback.cache_clear()
    torch.manual_seed(0)
    yield
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (background._under_way or threads()):
        time.sleep(0.01)
    assert not background._under_way and not overlap_reading._under_way and not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("thinpoint")]


class Training:
    """A model, its optimizer and a step of each kind, with everything that a checkpoint holds."""

    def __init__(
        self, model: nn.Module | None = None, make: Callable[..., Any] = torch.optim.AdamW, **options: Any
    ) -> None:
        self.model = model or nn.Sequential(nn.Linear(128, 600), nn.ReLU(), nn.Linear(600, 128))
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-2, **options})
        self.step_number = 0
        self.step()

    def compute(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 128)).square().mean().backward()

    def step(self) -> None:
        self.compute()
        self.optimizer.step()
        self.step_number += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_number,
            "rng": torch.get_rng_state(),
        }


def bytes_of(state: Any) -> bytes:
    file = io.BytesIO()
    thinpoint.save(state, file)
    return file.getvalue()


class Held:
    """A `progress` that lets reading go on only when it is told to."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, done: int) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.first(x).unsqueeze(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(128, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))
