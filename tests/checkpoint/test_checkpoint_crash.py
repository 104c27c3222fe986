"""Processes that are killed, disks that fill, machines that say goodbye."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_support import FAST, python, same_bits, state, wait_for, weights

from thinpoint.checkpoint import Checkpointer
from thinpoint.checkpoint.catalog import entries
from thinpoint.errors import NoSpaceError, UsageError
from thinpoint.store import LocalStore

TRAIN = """
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
folder, how = Path(sys.argv[1]), sys.argv[2]
checkpointer = Checkpointer(folder, keep_last=2, **FAST)
live = state(0, elems=300_000)
report = checkpointer.restore(live)
step = 0 if report is None else report.step
print("from", step, flush=True)
while True:
    step += 1
    live = state(step, elems=300_000)
    if how == "async":
        checkpointer.async_save(live, step)
    else:
        checkpointer.save(live, step)
    print("step", step, flush=True)
"""


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_run_that_is_killed_again_and_again_gets_on_from_its_newest_checkpoint(
    tmp_path: Path, how: str
) -> None:
    chance = random.Random(how)
    newest = 0
    for _ in range(4):
        child = python(TRAIN, tmp_path, how)
        assert child.stdout is not None
        assert child.stdout.readline() == f"from {newest}\n"
        # Once a save has begun, the one before it is committed.
        for _ in range(chance.randrange(2, 5)):
            child.stdout.readline()
        time.sleep(chance.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        checkpointer = Checkpointer(tmp_path, **FAST)
        steps = checkpointer.steps()
        assert len(steps) >= min(2, steps[-1])
        assert steps[-1] > newest
        newest = steps[-1]
        for step in steps:
            assert same_bits(checkpointer.load(step)["model"]["w"], weights(step, 300_000))
    with Checkpointer(tmp_path, keep_last=1, **FAST) as checkpointer:
        checkpointer.save(state(newest + 1), newest + 1)
    store = LocalStore(str(tmp_path))
    assert [(entry.step, entry.state) for entry in entries(store)] == [(newest + 1, "committed")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_costs_only_the_save_that_did_not_fit(small_disk: Path, asynchronous: bool) -> None:
    folder = small_disk / "run"
    with Checkpointer(folder, **{**FAST, "codec": "raw"}) as checkpointer:
        checkpointer.save(state(1, 50_000), 1)
        checkpointer.save(state(2, 50_000), 2)
        free = os.statvfs(small_disk).f_bavail
        for step in (3, 4):
            future = checkpointer.async_save(state(step, 200_000), step) if asynchronous else None
            with pytest.raises(NoSpaceError):
                future.result(20) if future else checkpointer.save(state(step, 200_000), step)
        assert os.statvfs(small_disk).f_bavail >= free, "what did not fit is gone"
        checkpointer.save(state(5, 50_000), 5)
    assert checkpointer.steps() == [1, 2, 5]
    for step in (1, 2, 5):
        assert same_bits(checkpointer.load(step)["model"]["w"], weights(step, 50_000))


def test_a_limit_on_the_size_of_files_is_as_a_full_disk(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
from thinpoint.errors import NoSpaceError
checkpointer = Checkpointer(Path(sys.argv[1]), on_error="warn", **FAST)
checkpointer.save(state(1), 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
print(checkpointer.save(state(2, 200_000), 2).error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(checkpointer.save(state(3), 3).outcome)
checkpointer.close()
"""
    child = python(code, tmp_path)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert out.splitlines()[0].startswith("NoSpaceError")
    assert out.splitlines()[1] == "committed"
    store = LocalStore(str(tmp_path))
    assert [(entry.step, entry.state) for entry in entries(store)] == [(3, "committed"), (1, "committed")]
    assert store.leftovers() == []


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_ctrl_c_in_a_save_on_a_slow_store_leaves_nothing(tmp_path: Path, how: str) -> None:
    code = """
import sys
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
store = StuckStore(Path(sys.argv[1]), "write")
checkpointer = Checkpointer(store, timeout=30, **FAST)
checkpointer.save(state(1), 1)
store.stuck.set()
threading.Timer(2, store.let_go.set).start()
try:
    print("saving", flush=True)
    future = getattr(checkpointer, sys.argv[2])(state(2), 2)
    future.result()
except KeyboardInterrupt:
    print("interrupted", flush=True)
store.stuck.clear()
if sys.argv[2] == "async_save":
    future.exception()
print(checkpointer.save(state(3), 3).outcome, flush=True)
checkpointer.close()
"""
    child = python(code, tmp_path, how)
    assert child.stdout is not None and child.stdout.readline() == "saving\n"
    time.sleep(0.5)
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert out.split() == ["interrupted", "committed"], err
    assert time.monotonic() - begin < 20
    # What was only waited for goes on; what ran on the main thread is given up.
    assert Checkpointer(tmp_path, **FAST).steps() == ([1, 3] if how == "save" else [1, 2, 3])
    assert LocalStore(str(tmp_path)).leftovers() == []


# ---- SIGTERM --------------------------------------------------------------------------------------------------------

LOOP = """
import signal, sys, time
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
folder, how = Path(sys.argv[1]), sys.argv[2]
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("old handler"))
old = signal.getsignal(signal.SIGTERM)
store = StuckStore(folder, "write")
with Checkpointer(store, every_steps=1_000_000, **FAST) as checkpointer:
    checkpointer.install_sigterm(grace_seconds=3 if how == "stuck" else 30)
    if how == "stuck":
        store.stuck.set()
    print("training", flush=True)
    for step in range(1, 100_000):
        future = checkpointer.maybe_save(lambda: state(step), step)
        if checkpointer.should_stop:
            break
        assert future is None
        time.sleep(0.01)
    print("saved", step, future.result().outcome, *told, flush=True)
assert signal.getsignal(signal.SIGTERM) is old
print("put back", flush=True)
"""


def test_sigterm_saves_at_the_next_training_step_and_ends_in_order(tmp_path: Path) -> None:
    child = python(LOOP, tmp_path, "works")
    assert child.stdout is not None and child.stdout.readline() == "training\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    saved, put_back = out.splitlines()
    _, step, outcome, *told = saved.split()
    assert (outcome, " ".join(told), put_back) == ("committed", "old handler", "put back")
    checkpointer = Checkpointer(tmp_path, **FAST)
    assert checkpointer.steps() == [int(step)]
    assert same_bits(checkpointer.load()["model"]["w"], weights(int(step)))


def test_a_save_after_sigterm_takes_no_longer_than_the_grace(tmp_path: Path) -> None:
    child = python(LOOP, tmp_path, "stuck")
    assert child.stdout is not None and child.stdout.readline() == "training\n"
    begin = time.monotonic()
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert "SaveTimeoutError: the save took longer than 3 s" in err or "took longer than 2" in err
    assert Checkpointer(tmp_path, **FAST).steps() == []


def test_sigterm_saves_once_and_only_once(tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Checkpointer(tmp_path, **FAST) as checkpointer:
            checkpointer.install_sigterm(30)
            assert not checkpointer.should_stop
            assert checkpointer.maybe_save(state(1), 1) is None
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: checkpointer.should_stop, "the signal")
            assert checkpointer.maybe_save(state(2), 2) is not None
            assert checkpointer.maybe_save(state(3), 3) is None
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("grace", [0, -1, float("inf"), "30", True])
def test_a_grace_that_is_no_time_is_refused(tmp_path: Path, grace: object) -> None:
    with pytest.raises(UsageError, match="grace_seconds"):
        Checkpointer(tmp_path).install_sigterm(grace)  # type: ignore[arg-type]
