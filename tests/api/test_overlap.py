"""`async_save(overlap=True)`: training goes on while the state is read, and the file has the values of the call."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same
from overlap_training import WAIT_S, Held, Normed, Training, Transformer, bytes_of, settings  # noqa: F401
from torch import nn

import thinpoint
from thinpoint import errors
from thinpoint.engine import background


@pytest.mark.parametrize(
    ("model", "make", "options"),
    [
        (Transformer, torch.optim.AdamW, {}),
        (Normed, torch.optim.AdamW, {}),
        (Normed, torch.optim.AdamW, {"fused": True}),
        (Transformer, torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    ],
)
def test_every_file_of_a_run_has_the_values_of_its_call(
    tmp_path: Path, model: Any, make: Any, options: dict[str, Any]
) -> None:
    training = Training(model(), make, **options)
    saved = []
    for _ in range(20):
        path = tmp_path / f"{training.step_number}.thin"
        state = training.state()
        expected = copy.deepcopy(state)
        saved.append((path, expected, thinpoint.async_save(state, path, overlap=True)))
        training.step()
    for path, expected, future in saved:
        report = future.result(WAIT_S)
        assert (report.mode, report.fallback) == ("overlap", None)
        assert_same(thinpoint.load(path), expected)
        assert path.read_bytes() == bytes_of(expected)


def test_forward_and_backward_run_while_the_state_is_read_and_the_step_waits() -> None:
    training, held, file = Training(Normed()), Held(), io.BytesIO()
    expected = copy.deepcopy(training.state())
    future = thinpoint.async_save(training.state(), file, overlap=True, progress=held)
    assert held.reached.wait(WAIT_S)
    training.compute()
    assert not training.model.norm.running_mean.equal(expected["model"]["norm.running_mean"])
    assert not future.staging_completion.done()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive()
    assert training.model.first.weight.equal(expected["model"]["first.weight"])
    held.opened.set()
    stepping.join(WAIT_S)
    assert not stepping.is_alive()
    assert not training.model.first.weight.equal(expected["model"]["first.weight"])
    assert future.staging_completion.result(WAIT_S) is None
    report = future.result(WAIT_S)
    assert file.getvalue() == bytes_of(expected)
    assert report.stages["hold"] > 0.2 and report.stall_seconds > report.stages["hold"]
    own = {"copy", "check", "hold"}
    assert set(report.stages) == {"flatten", "encode", "wait", "write", "storage", "commit"} | own


def test_steps_of_other_optimizers_do_not_wait_and_new_ones_of_the_same_parameters_do() -> None:
    training, other, held = Training(), Training(), Held()
    future = thinpoint.async_save(training.state(), io.BytesIO(), overlap=True, progress=held)
    assert held.reached.wait(WAIT_S)
    other.step()
    assert not future.staging_completion.done()
    late = torch.optim.SGD(training.model.parameters(), lr=1.0)
    stepping = threading.Thread(target=late.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    held.opened.set()
    stepping.join(WAIT_S)
    assert future.result(WAIT_S).mode == "overlap"


def test_everything_that_no_optimizer_owns_is_copied_before_the_return() -> None:
    training, held, file = Training(), Held(), io.BytesIO()
    more: dict[str, Any] = {
        "ema": torch.randn(70_000),
        "gappy": torch.randn(300, 64)[::2, ::3],
        "array": torch.randn(5000).numpy(),
        "blob": bytearray(b"x" * 50_000),
        "numbers": list(range(1000)),
        "nested": [1, {"deep": torch.ones(3)}],
    }
    state = {**training.state(), **more}
    expected = copy.deepcopy(state)
    future = thinpoint.async_save(state, file, overlap=True, progress=held)
    for value in (more["ema"], more["gappy"], more["array"], more["nested"][1]["deep"]):
        value += 1
    more["blob"][:] = b"y" * 50_000
    more["numbers"][0] = 7
    more["nested"][0] = 2
    held.opened.set()
    assert future.result(WAIT_S).mode == "overlap"
    assert file.getvalue() == bytes_of(expected)


def by_torch(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1)[-1:] += 1


def past_torch(parameter: torch.Tensor) -> None:
    parameter.data.view(-1)[-1:] += 1


def past_torch_at_first(parameter: torch.Tensor) -> None:
    parameter.data.view(-1)[0] += 1


def freed(parameter: torch.Tensor) -> None:
    parameter.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "which", "name"),
    [
        (by_torch, 0, "model.0.weight"),
        (by_torch, -1, "model.2.weight"),
        (past_torch, 0, "model.0.weight"),
        (past_torch_at_first, -1, "model.2.weight"),
        (freed, -1, "model.2.weight"),
    ],
)
def test_a_change_while_the_state_is_read_fails_the_save_and_leaves_the_file_before(
    tmp_path: Path, change: Callable[[torch.Tensor], None], which: int, name: str
) -> None:
    """The first weight has been read by then, the last has not been begun."""
    training, held, path = Training(), Held(), tmp_path / "s.thin"
    path.write_bytes(b"before")
    state = {"model": {k: v for k, v in training.model.state_dict().items() if "weight" in k}}
    parameter = [p for n, p in training.model.named_parameters() if "weight" in n][which]
    future = thinpoint.async_save(state, path, overlap=True, progress=held, num_threads=1)
    assert held.reached.wait(WAIT_S)
    change(parameter)
    held.opened.set()
    error = future.exception(WAIT_S)
    assert isinstance(error, errors.StateChangedError) and error.tensor == name
    deadline = time.monotonic() + 30
    while background._under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("s.thin", b"before")]
    if change is not freed:
        training.step()
        assert thinpoint.async_save(training.state(), path, overlap=True).result(WAIT_S).mode == "overlap"


def test_only_what_the_given_optimizers_own_is_read_in_place() -> None:
    one, other, held, file = Training(), Training(), Held(), io.BytesIO()
    state = {"one": one.state(), "other": other.state()}
    expected = copy.deepcopy(state)
    future = thinpoint.async_save(state, file, overlap=True, optimizers=[one.optimizer], progress=held)
    assert held.reached.wait(WAIT_S)
    other.step()
    by_torch(other.model[0].weight)
    held.opened.set()
    assert future.result(WAIT_S).mode == "overlap"
    assert file.getvalue() == bytes_of(expected)


def test_an_optimizer_that_never_stepped_is_found() -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert thinpoint.async_save(state, io.BytesIO(), overlap=True).result(WAIT_S).mode == "overlap"


def test_wrong_options_raise_and_leave_the_turn(tmp_path: Path) -> None:
    training = Training()
    for optimizers in (training.optimizer.state_dict(), 5, [training.model]):
        with pytest.raises(errors.UsageError, match="optimizers= is not valid"):
            thinpoint.async_save([1], tmp_path / "s.thin", overlap=True, optimizers=optimizers)
    with pytest.raises(errors.UsageError, match="is for overlap=True"):
        thinpoint.async_save([1], tmp_path / "s.thin", optimizers=training.optimizer)
    thinpoint.async_save(training.state(), tmp_path / "s.thin", overlap=True).result(WAIT_S)


def test_errors_reach_the_future_and_let_the_step_go_on(tmp_path: Path) -> None:
    training = Training()
    unsupported = thinpoint.async_save(
        {**training.state(), "f": lambda: 0}, tmp_path / "s.thin", overlap=True
    )
    for each in (unsupported, unsupported.staging_completion):
        assert isinstance(each.exception(WAIT_S), errors.UnsupportedObjectError)

    def broken(done: int) -> None:
        raise ValueError("broken")

    future = thinpoint.async_save(training.state(), tmp_path / "s.thin", overlap=True, progress=broken)
    for each in (future, future.staging_completion):
        assert isinstance(each.exception(WAIT_S), ValueError)
    future = thinpoint.async_save(training.state(), tmp_path / "none" / "s.thin", overlap=True)
    assert isinstance(future.exception(WAIT_S), errors.NotFoundError)
    training.step()
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_given_up_lets_the_step_go_on(tmp_path: Path) -> None:
    training, held = Training(), Held()
    future = thinpoint.async_save(training.state(), tmp_path / "s.thin", overlap=True, progress=held)
    assert held.reached.wait(WAIT_S)
    stepping = threading.Thread(target=training.step)
    stepping.start()
    assert future.cancel()
    assert isinstance(future.staging_completion.exception(0), errors.SaveCancelledError)
    # The next one does not wait for it, but its own reading ends the same way.
    held.opened.set()
    stepping.join(WAIT_S)
    assert not stepping.is_alive()
    report = thinpoint.async_save(training.state(), tmp_path / "t.thin", overlap=True).result(WAIT_S)
    assert report.mode == "overlap" and [path.name for path in tmp_path.iterdir()] == ["t.thin"]


def test_two_at_a_time_run_one_after_the_other() -> None:
    training, held = Training(), Held()
    first = thinpoint.async_save(training.state(), io.BytesIO(), overlap=True, progress=held)
    second: list[thinpoint.SaveFuture] = []
    thread = threading.Thread(
        target=lambda: second.append(thinpoint.async_save(training.state(), io.BytesIO(), overlap=True))
    )
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    with pytest.raises(FutureTimeoutError):
        first.result(0.01)
    held.opened.set()
    thread.join(WAIT_S)
    assert second[0].result(WAIT_S).file_id == first.result(WAIT_S).file_id


def test_disabled_it_is_done_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_DISABLE_ASYNC", "1")
    training = Training()
    future = thinpoint.async_save(training.state(), tmp_path / "s.thin", overlap=True)
    assert future.done() and future.staging_completion.done()
    assert (future.result(0).mode, future.result(0).fallback) == ("sync", "THINPOINT_DISABLE_ASYNC=1")
    assert_same(thinpoint.load(tmp_path / "s.thin"), training.state())


def test_a_small_budget_holds_the_step_until_so_much_is_written(tmp_path: Path) -> None:
    training = Training()
    expected = bytes_of(training.state())
    future = thinpoint.async_save(training.state(), tmp_path / "s.thin", overlap=True, host_memory=600_000)
    training.step()
    report = future.result(WAIT_S)
    assert report.mode == "overlap" and report.waves > 1 and report.peak_host_bytes <= 600_000
    assert (tmp_path / "s.thin").read_bytes() == expected


def test_nothing_of_the_state_is_kept_while_it_is_written() -> None:
    class Gate(io.BytesIO):
        opened = threading.Event()

        def write(self, data: Any) -> int:
            assert self.tell() < 100 or self.opened.wait(WAIT_S)
            return super().write(data)

    training, gate = Training(), Gate()
    parameters = [weakref.ref(p) for p in training.model.parameters()]
    optimizer = weakref.ref(training.optimizer)
    future = thinpoint.async_save(training.state(), gate, overlap=True)
    future.staging_completion.result(WAIT_S)
    del training
    deadline = time.monotonic() + 10
    while any(p() is not None for p in parameters) and time.monotonic() < deadline:
        gc.collect()
    assert optimizer() is None and not any(p() is not None for p in parameters)
    assert not future.done()
    gate.opened.set()
    future.result(WAIT_S)


def test_the_reports_of_other_saves_say_what_they_waited_for(tmp_path: Path) -> None:
    direct = thinpoint.save([torch.ones(5)], tmp_path / "s.thin")
    assert (direct.mode, direct.fallback) == ("sync", None)
    report = thinpoint.async_save([torch.ones(5)], tmp_path / "s.thin").result(WAIT_S)
    assert (report.mode, report.fallback) == ("async", None)


_SCRIPT = """
import os, sys, threading, time
import torch, thinpoint
path, how = sys.argv[1:]
torch.set_num_threads(1)
model = torch.nn.Linear(500, 500)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 500)).sum().backward()
optimizer.step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
thinpoint.save(state, path + ".direct")
reached = threading.Event()
def slow(done):
    reached.set()
    time.sleep(0.5)
future = thinpoint.async_save(state, path, overlap=True, progress=slow)
assert reached.wait(60)
if how == "fork":
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
if how == "raise":
    raise ValueError("the training failed")
if how == "step":
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("fork", 0), ("step", 0)])
def test_the_process_ends_when_the_save_has(tmp_path: Path, how: str, code: int) -> None:
    path = tmp_path / "s.thin"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _SCRIPT, str(path), how],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert path.read_bytes() == (tmp_path / "s.thin.direct").read_bytes()
