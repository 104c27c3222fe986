"""Where reading in place is not safe, `async_save(overlap=True)` saves as without, and says why."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_training import WAIT_S, Training, bytes_of, settings  # noqa: F401
from torch import nn

import thinpoint
from thinpoint.engine import overlap


def assert_falls_back(
    state: Any, reason: str, caplog: pytest.LogCaptureFixture, **options: Any
) -> thinpoint.SaveReport:
    expected, file = copy.deepcopy(state), io.BytesIO()
    future = thinpoint.async_save(state, file, overlap=True, **options)
    assert future.staging_completion.done()
    report = future.result(WAIT_S)
    assert report.mode == "async" and report.fallback is not None and reason in report.fallback
    assert sum(reason in record.message for record in caplog.records) == 1
    assert file.getvalue() == bytes_of(expected)
    assert "copy" not in report.stages
    return report


def test_an_optimizer_in_backward_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(128, 128)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.randn(2, 128)).sum().backward()
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers.values()]}
    assert_falls_back(state, "hooks in backward", caplog)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_own_optimizer_in_backward_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(128, 128)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert_falls_back({"model": model.state_dict()}, "hooks in backward", caplog)


def test_a_step_that_may_be_in_a_cuda_graph_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(128, 128)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_falls_back(state, "CUDA graph", caplog)


def test_a_step_pre_hook_of_the_optimizers_own_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    handle = training.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    assert_falls_back(training.state(), "step pre-hooks of its own", caplog)
    handle.remove()
    assert thinpoint.async_save(training.state(), io.BytesIO(), overlap=True).result(WAIT_S).fallback is None


def test_an_optimizer_that_is_none_of_torchs_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(128, 128)
    moments = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = {"model": model.state_dict(), "moments": moments}
    assert_falls_back(state, "belongs to a torch optimizer", caplog)


def test_more_than_may_be_copied_falls_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "MAX_COPY_BYTES", 100_000)
    training = Training()
    assert_falls_back({**training.state(), "ema": torch.randn(50_000)}, "too much on cpu", caplog)
    report = thinpoint.async_save(
        {**training.state(), "ema": torch.randn(5_000)}, io.BytesIO(), overlap=True
    ).result(WAIT_S)
    assert report.mode == "overlap"


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: passes everything on, and has no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_a_wrapper_is_no_owner_but_what_it_wraps_is(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    wrapper = Wrapper(training.optimizer)
    assert thinpoint.async_save(training.state(), io.BytesIO(), overlap=True).result(WAIT_S).mode == "overlap"
    assert_falls_back(training.state(), "calls no hooks", caplog, optimizers=wrapper)


_SHARDED = """
import sys, io, threading
import torch, torch.distributed as dist, thinpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
store, how = sys.argv[1:]
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(128, 600), nn.ReLU(), nn.Linear(600, 128))
if how == "fsdp2":
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
else:
    model = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=how == "fsdp1 as they were"
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    model(torch.randn(2, 128)).square().mean().backward()
    optimizer.step()
step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
direct, file, held = io.BytesIO(), io.BytesIO(), threading.Event()
thinpoint.save(state, direct)
future = thinpoint.async_save(state, file, overlap=True, progress=lambda done: held.wait(0.1))
step()
report = future.result(60)
assert file.getvalue() == direct.getvalue()
print(report.mode, report.fallback)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("fsdp2", "overlap None"),
        ("fsdp1", "async AdamW: its parameters are gathered"),
        ("fsdp1 as they were", "async AdamW: its parameters are gathered"),
    ],
)
def test_local_shards_are_read_in_place_and_gathered_parameters_fall_back(
    tmp_path: Path, how: str, expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDED, str(tmp_path / "store"), how],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)
