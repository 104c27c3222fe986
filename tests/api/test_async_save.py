"""`async_save`: safe on return, written in the background, one after the other, never lost without a word."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same, tensor_bits

import thinpoint
from thinpoint import errors
from thinpoint.engine import background
from thinpoint.engine import encode as engine_encode
from thinpoint.engine import jobs as engine_jobs
from thinpoint.store import open_sink


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("THINPOINT_DISABLE_ASYNC", "THINPOINT_HOST_MEMORY", "THINPOINT_EXIT_WAIT"):
        monkeypatch.delenv(name, raising=False)
    for module in (engine_jobs, engine_encode):
        monkeypatch.setattr(module, "PART_BYTES", 1 << 20)
    background._log_waves.cache_clear()
    yield
    deadline = time.monotonic() + 30
    while background._under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not background._under_way
    assert not [t for t in threading.enumerate() if t.name.startswith("thinpoint")]


def make_state(num_tensors: int = 12, num_elems: int = 300_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {f"t{i}": torch.randn(num_elems, generator=generator) for i in range(num_tensors)}
    state["ids"] = torch.arange(100_000)
    state["zeros"] = torch.zeros(400_000)
    state["half"] = torch.randn(50_000, generator=generator).bfloat16()
    state["blob"] = bytearray(b"x" * 50_000)
    state["list"] = [1, 2.5, {"deep": torch.ones(3)}]
    return state


class Gate(io.BytesIO):
    """A file that takes nothing but the header until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.reached = threading.Event()

    def write(self, data: Any) -> int:
        if self.tell() > 100:
            self.reached.set()
            assert self.opened.wait(60)
        return super().write(data)


@pytest.mark.parametrize("codec", ["thin", "zstd", "raw"])
def test_values_that_change_after_the_return_do_not_reach_the_file(codec: str) -> None:
    state, expected = make_state(), make_state()
    gate = Gate()
    future = thinpoint.async_save(state, gate, codec=codec)
    assert future.staging_completion.done() and future.staging_completion.result() is None
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(3)
    state["blob"][:] = b"y" * 50_000
    state["list"][2]["deep"].zero_()
    state["list"][0] = 5
    del state["t1"]
    assert not future.done() and not future.upload_completion.done()
    gate.opened.set()
    report = future.result(60)
    assert report is future.upload_completion.result() and future.done() and future.exception() is None
    assert_same(thinpoint.load(io.BytesIO(gate.getvalue())), expected)
    direct = io.BytesIO()
    thinpoint.save(expected, direct, codec=codec)
    assert gate.getvalue() == direct.getvalue()
    assert report.waves == 1
    assert len(gate.getvalue()) < report.peak_host_bytes + 20_000


def test_the_report_says_how_long_the_caller_was_held_up(tmp_path: Path) -> None:
    state = make_state()
    report = thinpoint.async_save(state, tmp_path / "s.thin", host_memory=1 << 30).result(60)
    assert report.path == str(tmp_path / "s.thin")
    assert report.file_bytes == (tmp_path / "s.thin").stat().st_size
    assert set(report.stages) == {"flatten", "wait", "encode", "write", "storage", "commit"}
    assert 0 < report.stall_seconds <= report.seconds
    assert report.stages["flatten"] + report.stages["encode"] <= report.stall_seconds
    assert report.host_memory_bytes == 1 << 30
    assert 1 << 20 < report.peak_host_bytes <= 1 << 30
    direct = thinpoint.save(state, tmp_path / "d.thin", host_memory=1 << 30)
    assert direct.stall_seconds == direct.seconds
    assert set(direct.stages) == set(report.stages)
    assert direct.peak_host_bytes <= 2 << 20 and direct.host_memory_bytes == 1 << 30
    assert (direct.file_id, direct.roles, direct.raw_bytes) == (
        report.file_id,
        report.roles,
        report.raw_bytes,
    )


def test_a_budget_of_a_quarter_of_the_state_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pwritev = os.pwritev

    def slow(fd: int, views: Any, offset: int) -> int:
        time.sleep(0.05)
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    state = make_state()
    raw_bytes = thinpoint.save(state, tmp_path / "d.thin").raw_bytes
    budget = raw_bytes // 4
    for _ in range(2):
        report = thinpoint.async_save(state, tmp_path / "s.thin", host_memory=budget).result(60)
        assert report.waves >= 2 and report.peak_host_bytes <= budget
        assert (tmp_path / "s.thin").read_bytes() == (tmp_path / "d.thin").read_bytes()
    assert len([r for r in caplog.records if "host memory" in r.message and r.name == "thinpoint"]) == 1


def test_a_small_budget_waits_for_storage_and_no_longer() -> None:
    gate = Gate()
    returned: list[Any] = []
    thread = threading.Thread(
        target=lambda: returned.append(thinpoint.async_save(make_state(), gate, host_memory=4 << 20))
    )
    thread.start()
    assert gate.reached.wait(60)
    thread.join(0.3)
    assert thread.is_alive()
    gate.opened.set()
    thread.join(60)
    assert returned[0].result(60).peak_host_bytes <= 4 << 20


def test_a_budget_below_one_part_takes_one_part_at_a_time() -> None:
    memory = io.BytesIO()
    report = thinpoint.async_save(make_state(3), memory, host_memory=1).result(60)
    assert report.peak_host_bytes <= (1 << 20) + 10_000
    assert_same(thinpoint.load(io.BytesIO(memory.getvalue())), make_state(3))


def test_two_at_a_time_run_one_after_the_other(tmp_path: Path) -> None:
    gate = Gate()
    first = thinpoint.async_save(make_state(2), gate)
    order: list[str] = []
    first.add_done_callback(lambda future: order.append("first"))
    second: list[thinpoint.SaveFuture] = []

    def save_second() -> None:
        second.append(thinpoint.async_save(make_state(3), tmp_path / "s.thin"))
        order.append("second")

    thread = threading.Thread(target=save_second)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not list(tmp_path.iterdir())
    gate.opened.set()
    thread.join(60)
    assert second[0].result(60).raw_bytes > first.result(60).raw_bytes
    assert sorted(order) == ["first", "second"]


def test_a_callback_may_begin_the_next_save(tmp_path: Path) -> None:
    later: list[thinpoint.SaveFuture] = []
    called = threading.Event()

    def save_again(future: thinpoint.SaveFuture) -> None:
        assert future.done()
        later.append(thinpoint.async_save([torch.ones(5)], tmp_path / "b.thin"))
        called.set()

    future = thinpoint.async_save([torch.zeros(5)], tmp_path / "a.thin")
    future.add_done_callback(save_again)
    assert called.wait(60)
    later[0].result(60)
    assert torch.equal(thinpoint.load(tmp_path / "b.thin")[0], torch.ones(5))


def test_wrong_options_raise_and_leave_the_turn(tmp_path: Path) -> None:
    for options in ({"codec": "lzma"}, {"host_memory": 0}, {"num_threads": 0}, {"backend": "numpy"}):
        with pytest.raises(errors.UsageError):
            thinpoint.async_save([1], tmp_path / "s.thin", **options)
    assert isinstance(thinpoint.async_save([1], 42).exception(60), errors.UsageError)
    thinpoint.async_save([1], tmp_path / "s.thin").result(60)


@pytest.mark.parametrize("is_disabled", [False, True])
def test_what_cannot_be_saved_is_in_both_futures(
    tmp_path: Path, is_disabled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_disabled:
        monkeypatch.setenv("THINPOINT_DISABLE_ASYNC", "1")
    future = thinpoint.async_save({"w": torch.ones(1000), "f": lambda: 0}, tmp_path / "s.thin")
    for each in (future, future.staging_completion, future.upload_completion):
        assert isinstance(each.exception(60), errors.UnsupportedObjectError)
    assert [record.levelname for record in caplog.records if record.name == "thinpoint"] == ["ERROR"]
    assert not list(tmp_path.iterdir())
    thinpoint.async_save([1], tmp_path / "s.thin").result(60)


def test_an_error_before_staging_ends_is_in_both_futures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    future = thinpoint.async_save(make_state(), tmp_path / "none" / "s.thin")
    for each in (future, future.staging_completion, future.upload_completion):
        error = each.exception(60)
        if each is not future.staging_completion or error is not None:
            assert isinstance(error, errors.NotFoundError)
    with pytest.raises(errors.NotFoundError):
        future.result()


def test_an_error_after_staging_reaches_the_upload_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Gate):
        def write(self, data: Any) -> int:
            super().write(data)
            if self.tell() > 2_000_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(data)

    full = Full()
    future = thinpoint.async_save(make_state(), full)
    assert future.staging_completion.result() is None
    called: list[thinpoint.SaveFuture] = []
    future.add_done_callback(called.append)
    full.opened.set()
    with pytest.raises(errors.NoSpaceError):
        future.result(60)
    assert called == [future] and future.done()
    assert any(record.levelno == logging.ERROR and "failed" in record.message for record in caplog.records)


def test_nothing_of_the_state_is_kept_while_it_is_written() -> None:
    gate = Gate()
    tensor = torch.randn(300_000)
    alive = weakref.ref(tensor)
    future = thinpoint.async_save({"w": tensor, "other": torch.ones(9)}, gate)
    del tensor
    assert gate.reached.wait(60)
    gc.collect()
    assert alive() is None
    gate.opened.set()
    future.result(60)


def test_a_save_that_hangs_can_be_given_up(tmp_path: Path) -> None:
    gate = Gate()
    future = thinpoint.async_save(make_state(), gate)
    assert gate.reached.wait(60)
    with pytest.raises(FutureTimeoutError):
        future.result(0.05)
    assert future.cancel() and future.done() and not future.cancel()
    with pytest.raises(errors.SaveCancelledError):
        future.result()
    assert future.staging_completion.result() is None
    # The next one does not wait for it.
    thinpoint.async_save(make_state(2), tmp_path / "s.thin").result(60)
    gate.opened.set()


def test_a_save_that_was_given_up_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.thin").write_bytes(b"old")
    reached, opened = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def slow(fd: int, views: Any, offset: int) -> int:
        if offset > 100:
            reached.set()
            assert opened.wait(60)
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    future = thinpoint.async_save(make_state(), tmp_path / "s.thin")
    assert reached.wait(60)
    future.cancel()
    opened.set()
    deadline = time.monotonic() + 30
    while background._under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("s.thin", b"old")]


def test_a_done_save_cannot_be_given_up(tmp_path: Path) -> None:
    future = thinpoint.async_save([torch.ones(5)], tmp_path / "s.thin")
    future.result(60)
    assert not future.cancel() and not future.upload_completion.cancel()
    assert future.exception() is None


def test_disabled_it_is_done_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_DISABLE_ASYNC", "1")
    future = thinpoint.async_save(make_state(), tmp_path / "s.thin")
    assert future.done() and future.staging_completion.done() and future.upload_completion.done()
    assert future.result(0).stall_seconds == future.result(0).seconds
    called: list[thinpoint.SaveFuture] = []
    future.add_done_callback(called.append)
    assert called == [future]
    assert_same(thinpoint.load(tmp_path / "s.thin"), make_state())
    failed = thinpoint.async_save(make_state(), tmp_path / "none" / "s.thin")
    assert failed.done() and isinstance(failed.exception(0), errors.NotFoundError)


def test_a_sink_of_a_store_is_taken_as_it_is(tmp_path: Path) -> None:
    expected = make_state(2)
    report = thinpoint.async_save(expected, open_sink(tmp_path / "a.thin")).result(60)
    assert report.path == str(tmp_path / "a.thin")
    thinpoint.save(expected, open_sink(tmp_path / "b.thin"))
    assert (tmp_path / "a.thin").read_bytes() == (tmp_path / "b.thin").read_bytes()


def test_ctrl_c_in_the_call_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.thin").write_bytes(b"old")

    def interrupt(done: int) -> None:
        if done > 4_000_000:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        thinpoint.async_save(make_state(), tmp_path / "s.thin", progress=interrupt)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("s.thin", b"old")]
    thinpoint.async_save([1], tmp_path / "s.thin").result(60)


_SLOW = """
import os, sys, time, logging, threading
import torch, thinpoint
path, how = sys.argv[1:]
pwritev = os.pwritev
def slow(fd, views, offset):
    if offset > 100:
        if how == "stuck":
            time.sleep(3600)
        time.sleep(0.5)
        if how == "full":
            raise OSError(28, "No space left on device")
    return pwritev(fd, views, offset)
os.pwritev = slow
future = thinpoint.async_save({"w": torch.arange(500_000)}, path)
assert not future.done()
future.add_done_callback(lambda future: print("called back", flush=True))
if how == "raise":
    raise ValueError("the training failed")
if how == "exit":
    sys.exit(3)
if how == "full":
    logging.basicConfig(filename=path + ".log")
if how == "fork":
    child = os.fork()
    if child == 0:
        try:
            future.result(1)
        except thinpoint.ThinpointError as error:
            print("child:", error, flush=True)
        thinpoint.async_save([1], path + ".child").result(60)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("the end", flush=True)
"""


def run(path: Path, how: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _SLOW, str(path), how],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("exit", 3)])
def test_a_process_that_ends_finishes_the_save(tmp_path: Path, how: str, code: int) -> None:
    done = run(tmp_path / "s.thin", how)
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("called back\n")
    assert torch.equal(thinpoint.load(tmp_path / "s.thin")["w"], torch.arange(500_000))
    assert ("the training failed" in done.stderr) == (how == "raise")


def test_a_process_that_ends_says_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path / "s.thin", "full")
    assert "No space left" in done.stderr and str(tmp_path) in done.stderr
    assert "No space left" in (tmp_path / "s.thin.log").read_text()
    assert not (tmp_path / "s.thin").exists()


def test_a_process_that_ends_does_not_wait_for_ever(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run(tmp_path / "s.thin", "stuck", THINPOINT_EXIT_WAIT="1")
    assert time.monotonic() - begin < 60
    assert done.returncode == 0
    assert "did not answer" in done.stderr
    assert not (tmp_path / "s.thin").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_inherits_no_save_and_does_not_hang(tmp_path: Path) -> None:
    done = run(tmp_path / "s.thin", "fork")
    assert done.returncode == 0, done.stderr
    assert "child: the save belongs to the process" in done.stdout
    assert torch.equal(thinpoint.load(tmp_path / "s.thin")["w"], torch.arange(500_000))
    assert thinpoint.load(tmp_path / "s.thin.child") == [1]


def test_the_bits_of_every_tensor_are_those_of_the_call() -> None:
    """Tensors that train on while they are written, many times over."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(70_000, generator=generator) for _ in range(6)]
        expected = [tensor_bits(weight) for weight in weights]
        memory = io.BytesIO()
        future = thinpoint.async_save(weights, memory, host_memory=1 << 20)
        for _ in range(20):
            for weight in weights:
                weight.add_(1)
        future.result(60)
        assert [tensor_bits(t) for t in thinpoint.load(io.BytesIO(memory.getvalue()))] == expected
