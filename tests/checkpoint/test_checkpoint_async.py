"""Saves beside training: who waits for whom, what a store that hangs does, and how errors reach the caller."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import FAST, StuckStore, Wrapped, python, same_bits, state, wait_for, weights

from thinpoint.checkpoint import Checkpointer, lane
from thinpoint.checkpoint.names import manifest_name
from thinpoint.errors import (
    CheckpointError,
    NoSpaceError,
    SaveTimeoutError,
    StorageError,
    UnsupportedObjectError,
)
from thinpoint.store import LocalStore


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StuckStore]:
    store = StuckStore(tmp_path / "run")
    yield store
    store.let_go.set()


class Failing(Wrapped):
    """A store whose manifests or data files are refused as long as there are errors left."""

    def __init__(self, folder: Path, errors: list[StorageError], what: str = "put") -> None:
        super().__init__(folder)
        self.errors = errors
        self.num_manifests = 0
        self.what = what

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        if self.what == "put" and name.endswith("manifest.json") and self.errors:
            raise self.errors.pop(0)
        self._store.put(name, data, if_absent=if_absent)
        self.num_manifests += name.endswith("manifest.json")
        if self.what == "answer" and name.endswith("manifest.json") and self.errors:
            raise self.errors.pop(0)

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        with self._store.sink(name, overwrite=overwrite) as sink:
            yield sink
            if self.what == "data" and self.errors:
                raise self.errors.pop(0)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "FIRST_PAUSE_S", 0.01)


def reset() -> StorageError:
    return StorageError("the connection was lost", errno=errno.ECONNRESET, transient=True)


def test_the_state_may_change_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    live = state(1, elems=200_000)
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        future = checkpointer.async_save(live, 1)
        live["model"]["w"].zero_()
        assert future.staging_completion.result(timeout=0) is None
        assert future.result(20).outcome == "committed"
        assert future.upload_completion.result().asynchronous
    assert same_bits(checkpointer.load()["model"]["w"], weights(1, elems=200_000))


def test_training_does_not_wait_for_the_store(stuck: StuckStore) -> None:
    stuck.stuck.set()
    checkpointer = Checkpointer(stuck, **FAST)
    future = checkpointer.async_save(state(1), 1)
    assert not future.done()
    with pytest.raises(FutureTimeoutError):
        future.result(0.05)
    assert checkpointer.steps() == []
    stuck.let_go.set()
    assert future.result(20).outcome == "committed"
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_async_can_be_turned_off_without_a_change_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINPOINT_DISABLE_ASYNC", "1")
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        assert checkpointer.async_save(state(1), 1).done()
        assert checkpointer.steps() == [1]


# ---- a second save while one runs -----------------------------------------------------------------------------------


def test_a_second_save_waits(stuck: StuckStore) -> None:
    stuck.stuck.set()
    checkpointer = Checkpointer(stuck, **FAST)
    first = checkpointer.async_save(state(1), 1)
    wait_for(lambda: stuck.num_stuck, "the first save to be stuck")
    stuck.stuck.clear()
    threading.Timer(0.1, stuck.let_go.set).start()
    report = checkpointer.save(state(2), 2)
    assert first.done()
    assert report.stall_seconds > 0.05
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_a_second_save_is_skipped(stuck: StuckStore) -> None:
    stuck.stuck.set()
    events: list[Any] = []
    checkpointer = Checkpointer(stuck, while_saving="skip", on_event=events.append, **FAST)
    first = checkpointer.async_save(state(1), 1)
    assert checkpointer.save(state(2), 2).outcome == "skipped"
    assert [event.outcome for event in events] == ["skipped"]
    stuck.let_go.set()
    assert first.result(20).outcome == "committed"
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_a_second_save_fails(stuck: StuckStore) -> None:
    stuck.stuck.set()
    checkpointer = Checkpointer(stuck, while_saving="fail", **FAST)
    checkpointer.async_save(state(1), 1)
    with pytest.raises(CheckpointError, match="the save of step 1 is still running"):
        checkpointer.async_save(state(2), 2)
    stuck.let_go.set()
    checkpointer.close()
    assert checkpointer.steps() == [1]


# ---- a store that hangs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["sink", "write", "commit", "put"])
def test_a_stuck_store_fails_the_save_and_the_next_one_goes_on(
    tmp_path: Path, method: str, asynchronous: bool
) -> None:
    store = StuckStore(tmp_path, method)
    Checkpointer(store, **FAST).save(state(1), 1)
    checkpointer = Checkpointer(store, timeout=2.0, **FAST)
    store.stuck.set()
    begin = time.monotonic()
    save = checkpointer.async_save if asynchronous else checkpointer.save
    with pytest.raises(SaveTimeoutError, match="took longer than 2 s"):
        # The error is in the future, or raised at once.
        save(state(2), 2).result()  # type: ignore[union-attr]
    assert time.monotonic() - begin < 10
    assert store.num_stuck == 1
    store.stuck.clear()
    assert checkpointer.save(state(3), 3).outcome == "committed"
    assert checkpointer.steps() == [1, 3]
    store.let_go.set()
    if method != "put":
        # What comes back too late cleans up after itself, and does not commit.
        wait_for(lambda: not LocalStore(str(tmp_path)).leftovers(), "the abandoned file to go")
        assert not (tmp_path / manifest_name(2)).exists()
    checkpointer.close()
    assert [step for step in checkpointer.steps() if step != 2] == [1, 3]
    for step in checkpointer.steps():
        assert same_bits(checkpointer.load(step)["model"]["w"], weights(step))


def test_a_stuck_store_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
store = StuckStore(Path(sys.argv[1]), sys.argv[2])
checkpointer = Checkpointer(store, timeout=1.0, on_error="warn", **FAST)
store.stuck.set()
print(checkpointer.save(state(1), 1).outcome, checkpointer.async_save(state(2), 2).result().outcome)
checkpointer.close()
print("end")
"""
    for method in ("write", "put"):
        child = python(code, tmp_path / method, method)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out.split()) == (0, ["failed", "failed", "end"]), err


def test_deletions_that_hang_do_not_hold_up_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpoint.checkpoint.writer.FINISH_S", 0.2)
    store = StuckStore(tmp_path, "rename")
    store.stuck.set()
    checkpointer = Checkpointer(store, keep_last=1, timeout=20, **FAST)
    for step in (1, 2, 3):
        assert checkpointer.save(state(step), step).outcome == "committed"
    wait_for(lambda: store.num_stuck, "a deletion")
    checkpointer.close()
    store.let_go.set()
    wait_for(lambda: checkpointer.steps() == [3], "the deletions")


def test_a_process_that_ends_finishes_the_save_in_flight(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from contextlib import contextmanager
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
class Slow(Wrapped):
    def put(self, name, data, *, if_absent=False):
        time.sleep(0.5)
        self._store.put(name, data, if_absent=if_absent)
checkpointer = Checkpointer(Slow(Path(sys.argv[1])), **FAST)
future = checkpointer.async_save(state(1), 1)
print(future.done(), flush=True)
if sys.argv[2] == "raise":
    raise ValueError("training failed")
"""
    for how, status in (("end", 0), ("raise", 1)):
        folder = tmp_path / how
        child = python(code, folder, how)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out.strip()) == (status, "False"), err
        assert same_bits(Checkpointer(folder, **FAST).load()["model"]["w"], weights(1))


def test_nothing_is_left_behind_by_saves_that_work_or_fail(tmp_path: Path) -> None:
    store = Failing(tmp_path, [], "data")
    checkpointer = Checkpointer(store, keep_last=1, **FAST)
    checkpointer.save(state(1), 1)
    checkpointer.close()
    checkpointer = Checkpointer(store, keep_last=1, on_error="warn", max_failures=99, **FAST)
    gc.collect()
    before, files = threading.active_count(), open_files()
    for step in range(2, 8):
        if step % 2:
            store.errors = [NoSpaceError("full", errno=errno.ENOSPC)]
        checkpointer.async_save(state(step), step).result(20)
    checkpointer.close()
    wait_for(lambda: threading.active_count() <= before, "the threads to end")
    assert open_files() <= files


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_that_nobody_asks_for_is_raised_by_the_next_call(tmp_path: Path) -> None:
    def failed() -> Checkpointer:
        store = Failing(tmp_path / "run", [NoSpaceError("full", errno=errno.ENOSPC)])
        checkpointer = Checkpointer(store, every_steps=100, **FAST)
        future = checkpointer.async_save(state(1), 1)
        wait_for(future.done, "the save")
        return checkpointer

    for call in (
        lambda c: c.save(state(2), 2),
        lambda c: c.maybe_save(state(2), 2),
        lambda c: c.wait(),
        lambda c: c.close(),
    ):
        checkpointer = failed()
        with pytest.raises(NoSpaceError):
            call(checkpointer)
        # Once is enough.
        checkpointer.close()


def test_an_error_that_was_asked_for_is_not_raised_again(tmp_path: Path) -> None:
    store = Failing(tmp_path, [NoSpaceError("full", errno=errno.ENOSPC)])
    with Checkpointer(store, **FAST) as checkpointer:
        future = checkpointer.async_save(state(1), 1)
        with pytest.raises(NoSpaceError):
            future.result(20)
        assert isinstance(future.exception(), NoSpaceError)
        checkpointer.save(state(1), 1)
    assert checkpointer.steps() == [1]


def test_what_cannot_be_staged_is_in_both_halves_of_the_future(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, allow_pickle=False, **FAST)
    future = checkpointer.async_save({"x": object()}, 1)
    assert isinstance(future.exception(20), UnsupportedObjectError)
    assert isinstance(future.staging_completion.exception(20), UnsupportedObjectError)
    checkpointer.close()


def test_what_ended_the_block_hides_no_error_of_a_save_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Failing(tmp_path, [NoSpaceError("full", errno=errno.ENOSPC)])

    def train() -> None:
        with Checkpointer(store, **FAST) as checkpointer:
            checkpointer.async_save(state(1), 1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert "a save failed: full" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_warnings_until_too_many_saves_in_a_row_have_failed(tmp_path: Path, asynchronous: bool) -> None:
    def full() -> NoSpaceError:
        return NoSpaceError("full", errno=errno.ENOSPC)

    store = Failing(tmp_path, [full(), full()])
    checkpointer = Checkpointer(store, on_error="warn", max_failures=3, **FAST)

    def outcome(step: int) -> str:
        if asynchronous:
            return checkpointer.async_save(state(step), step).result(20).outcome
        return checkpointer.save(state(step), step).outcome

    assert [outcome(step) for step in (1, 2, 3)] == ["failed", "failed", "committed"]
    store.errors = [full(), full(), full()]
    assert [outcome(step) for step in (4, 5)] == ["failed", "failed"]
    with pytest.raises(NoSpaceError):
        outcome(6)
    assert checkpointer.steps() == [3]


@pytest.mark.parametrize("what", ["put", "answer", "data"])
@pytest.mark.usefixtures("short_pauses")
def test_what_may_pass_is_tried_again(tmp_path: Path, what: str) -> None:
    # After a lost answer the second attempt finds the manifest in place.
    errors = [reset()] if what == "answer" else [reset(), reset()]
    num_errors = len(errors)
    store = Failing(tmp_path, errors, what)
    with Checkpointer(store, retries=2, **FAST) as checkpointer:
        report = checkpointer.save(state(1), 1)
    assert (report.outcome, report.retries) == ("committed", num_errors)
    assert store.errors == []
    assert same_bits(checkpointer.load()["model"]["w"], weights(1))
    assert len(list(tmp_path.glob("step-*/*.thin"))) == 1


@pytest.mark.usefixtures("short_pauses")
def test_retries_come_to_an_end(tmp_path: Path) -> None:
    store = Failing(tmp_path, [reset() for _ in range(9)])
    with pytest.raises(StorageError, match="connection was lost"):
        Checkpointer(store, retries=2, **FAST).save(state(1), 1)
    assert len(store.errors) == 6


@pytest.mark.usefixtures("short_pauses")
def test_a_lost_answer_to_the_last_attempt_is_no_failure(tmp_path: Path) -> None:
    store = Failing(tmp_path, [NoSpaceError("full, after all", errno=errno.ENOSPC)], "answer")
    with Checkpointer(store, **FAST) as checkpointer:
        assert checkpointer.save(state(1), 1).outcome == "committed"
    assert checkpointer.steps() == [1]


def test_a_manifest_whose_sync_failed_is_put_once_more(tmp_path: Path) -> None:
    store = Failing(tmp_path, [StorageError("in place, but not durable", errno=errno.EIO)], "answer")
    with Checkpointer(store, **FAST) as checkpointer:
        assert checkpointer.save(state(1), 1).outcome == "committed"
    assert store.num_manifests == 2
    store.errors = [StorageError("in place, but not durable", errno=errno.EIO) for _ in range(2)]
    with pytest.raises(StorageError, match="not durable"):
        Checkpointer(store, **FAST).save(state(2), 2)
    assert checkpointer.steps() == [1, 2], "its data are not deleted: the manifest is there"
    assert same_bits(checkpointer.load(2)["model"]["w"], weights(2))


def test_data_are_kept_while_nobody_knows_whether_their_manifest_is_in_place(tmp_path: Path) -> None:
    class Silent(Failing):
        def get(self, name: str, max_bytes: int) -> bytes:
            if name.endswith("manifest.json"):
                raise StorageError("no answer", errno=errno.EIO)
            return self._store.get(name, max_bytes)

    store = Silent(tmp_path, [StorageError("no answer", errno=errno.EIO)], "answer")
    with pytest.raises(StorageError, match="no answer"):
        Checkpointer(store, **FAST).save(state(1), 1)
    assert same_bits(Checkpointer(tmp_path, **FAST).load(1)["model"]["w"], weights(1))


def test_what_is_hopeless_is_not_tried_again(tmp_path: Path) -> None:
    store = Failing(tmp_path, [NoSpaceError("full", errno=errno.ENOSPC) for _ in range(3)], "data")
    with pytest.raises(NoSpaceError):
        Checkpointer(store, retries=3, **FAST).save(state(1), 1)
    assert len(store.errors) == 2
    assert list(tmp_path.glob("step-*/*")) == []
