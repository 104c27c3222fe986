"""Two runs on one directory, and what a clean-up may touch."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import FAST, StuckStore, data_files, python, same_bits, state, wait_for, weights

from thinpoint.checkpoint import Checkpointer, runs
from thinpoint.checkpoint.catalog import entries
from thinpoint.checkpoint.leftovers import dead
from thinpoint.checkpoint.names import data_name, manifest_name, new_id, step_folder, tag_of
from thinpoint.errors import SupersededError
from thinpoint.store import LocalStore


def claims(folder: Path) -> dict[str, runs.Run]:
    return runs.read_runs(LocalStore(str(folder)))


def put_claim(folder: Path, **changes: Any) -> runs.Run:
    """The claim of a run on this machine, with other values."""
    process = dataclasses.replace(
        runs.this_process(), **{k: changes.pop(k) for k in list(changes) if k in vars(runs.this_process())}
    )
    values = {"run_id": new_id(), "process": process, "claimed_at_s": time.time(), "generation": 1, **changes}
    run = runs.Run(**values)
    LocalStore(str(folder)).put(f"runs/{run.run_id}.json", runs.dump_run(run))
    return run


def ended_process() -> runs.Process:
    """A process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = runs._start_ticks(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert ticks
    return dataclasses.replace(runs.this_process(), pid=child.pid, start_ticks=ticks)


def put_data(folder: Path, step: int, run_id: str, age_s: float = 0) -> Path:
    """A data file that no manifest names."""
    path = folder / step_folder(step) / data_name(new_id(tag_of(run_id)), 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


# ---- two jobs -------------------------------------------------------------------------------------------------------


def test_the_job_that_came_last_writes_and_the_other_is_told(tmp_path: Path) -> None:
    one, two = Checkpointer(tmp_path, keep_last=1, **FAST), Checkpointer(tmp_path, keep_last=1, **FAST)
    one.save(state(1), 1)
    two.save(state(2), 2)
    with pytest.raises(SupersededError, match=r"another run has taken over.*End this process"):
        one.save(state(3), 3)
    with pytest.raises(SupersededError):
        one.truncate_after(0)
    two.save(state(4), 4)
    one.close()
    two.close()
    assert two.steps() == [4]
    assert not (tmp_path / manifest_name(3)).exists()


def test_a_superseded_run_raises_even_if_failures_are_only_warned_of(tmp_path: Path) -> None:
    one = Checkpointer(tmp_path, on_error="warn", max_failures=99, **FAST)
    one.save(state(1), 1)
    Checkpointer(tmp_path, **FAST).save(state(2), 2)
    with pytest.raises(SupersededError):
        one.save(state(3), 3)
    future = one.async_save(state(3), 3)
    assert isinstance(future.exception(20), SupersededError)


def test_reading_takes_nothing_over(tmp_path: Path) -> None:
    one = Checkpointer(tmp_path, **FAST)
    one.save(state(1), 1)
    with Checkpointer(tmp_path, **FAST) as reader:
        assert reader.restore(state(0)) is not None
        assert reader.latest() == 1
        assert reader.load()["step"] == 1
    assert len(claims(tmp_path)) == 1
    one.save(state(2), 2)


def test_the_first_training_step_takes_over_before_anything_is_to_be_saved(tmp_path: Path) -> None:
    one = Checkpointer(tmp_path, **FAST)
    one.save(state(1), 1)
    two = Checkpointer(tmp_path, every_steps=100, **FAST)
    assert two.maybe_save(state(2), 2) is None
    with pytest.raises(SupersededError):
        one.save(state(3), 3)
    one.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_zombie_whose_save_wakes_up_after_a_restart_commits_nothing(
    tmp_path: Path, asynchronous: bool
) -> None:
    store = StuckStore(tmp_path, "commit")
    zombie = Checkpointer(store, **FAST)
    zombie.save(state(1), 1)
    store.stuck.set()
    outcome: list[Any] = []

    def save() -> None:
        if asynchronous:
            outcome.append(zombie.async_save(state(2), 2).exception(30))
            return
        try:
            outcome.append(zombie.save(state(2), 2))
        except SupersededError as error:
            outcome.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    wait_for(lambda: store.num_stuck, "the zombie to be stuck")
    with Checkpointer(tmp_path, **FAST) as restarted:
        assert restarted.restore(state(0)).step == 1  # type: ignore[union-attr]
        restarted.save(state(3), 3)
        store.let_go.set()
        thread.join(20)
        assert isinstance(outcome[0], SupersededError)
        assert restarted.steps() == [1, 3]
        restarted.save(state(2), 2, overwrite=True)
    assert restarted.steps() == [1, 2, 3]
    assert same_bits(restarted.load(2)["model"]["w"], weights(2))


def test_a_zombie_deletes_nothing(tmp_path: Path) -> None:
    zombie = Checkpointer(tmp_path, keep_last=1, **FAST)
    zombie.save(state(1), 1)
    zombie.wait()
    time.sleep(0.05)
    other = Checkpointer(tmp_path, **FAST)
    other.save(state(2), 2)
    other.save(state(3), 3)
    writer = zombie._writing()
    assert writer._sweeper is not None
    writer._sweeper.request(lambda: [1, 2])
    zombie.close()
    assert other.steps() == [1, 2, 3]


def test_of_two_claims_of_one_generation_one_counts(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    one, two = runs.Claim(store), runs.Claim(store)
    # As if both had looked before either wrote.
    for claim in (one, two):
        claim.run = dataclasses.replace(claim.run, generation=7)
        store.put(f"runs/{claim.run.run_id}.json", runs.dump_run(claim.run))
        claim._known = {}
    with pytest.raises(SupersededError):
        one.check(store)
    two.check(store)


def test_a_claim_that_was_removed_does_not_count_any_more(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, **FAST)
    checkpointer.save(state(1), 1)
    next((tmp_path / "runs").iterdir()).unlink()
    with pytest.raises(SupersededError, match="claim is gone"):
        checkpointer.save(state(2), 2)


# ---- who is dead ----------------------------------------------------------------------------------------------------


def test_a_process_is_dead_only_if_it_is_proven() -> None:
    here = runs.this_process()
    gone = ended_process()
    assert not here.is_dead()
    assert gone.is_dead()
    assert dataclasses.replace(here, start_ticks=here.start_ticks - 1).is_dead(), (
        "the number is another's by now"
    )
    for change in (
        {"host": "elsewhere"},
        {"boot_id": "other"},
        {"boot_id": ""},
        {"pid_namespace": "pid:[1]"},
    ):
        assert not dataclasses.replace(gone, **change).is_dead(), change  # type: ignore[arg-type]


def test_a_process_that_is_not_waited_for_yet_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    process = dataclasses.replace(
        runs.this_process(), pid=child.pid, start_ticks=runs._start_ticks(child.pid) or 1
    )
    wait_for(process.is_dead, "the child to end")
    child.wait()


def test_only_what_is_dead_is_deleted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        checkpointer.save(state(1), 1)
    gone, elsewhere, alive = ended_process(), "elsewhere", os.getppid()
    of_dead = put_claim(tmp_path, **vars(gone)).run_id
    of_other_machine = put_claim(tmp_path, host=elsewhere).run_id
    of_living = put_claim(tmp_path, pid=alive, start_ticks=runs._start_ticks(alive)).run_id
    deleted = [
        put_data(tmp_path, 5, of_dead),
        put_data(tmp_path, 1, of_dead),
        put_data(tmp_path, 6, of_other_machine, age_s=8 * 86_400),
        put_data(tmp_path, 6, new_id(), age_s=8 * 86_400),
        tmp_path / "trash" / new_id() / "y.thin",
    ]
    kept = [
        put_data(tmp_path, 5, of_other_machine, age_s=6 * 86_400),
        put_data(tmp_path, 5, of_living),
        put_data(tmp_path, 1, new_id()),
        *data_files(tmp_path, 1)[:1],
    ]
    deleted[-1].parent.mkdir(parents=True)
    deleted[-1].write_bytes(b"x")
    foreign = tmp_path / "step-0000000005" / "notes.txt"
    foreign.write_text("mine")
    os.utime(foreign, (0, 0))
    names = {str(tmp_path / file.name): file.reason for file in dead(LocalStore(str(tmp_path)))}
    assert {str(path) for path in deleted} | {str(tmp_path / f"runs/{of_dead}.json")} == set(names)
    assert "has ended" in names[str(deleted[0])]
    assert "8.0 days" in names[str(deleted[2])]
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        checkpointer.save(state(2), 2)
    assert [path for path in deleted if path.exists()] == []
    assert all(path.exists() for path in [*kept, foreign])
    assert checkpointer.steps() == [1, 2]


def test_data_beside_a_manifest_that_cannot_be_read_are_never_deleted(tmp_path: Path) -> None:
    run = put_claim(tmp_path, **vars(ended_process()))
    data = put_data(tmp_path, 4, run.run_id, age_s=99 * 86_400)
    (tmp_path / manifest_name(4)).write_text("{")
    with Checkpointer(tmp_path, keep_last=1, **FAST) as checkpointer:
        checkpointer.save(state(5), 5)
        checkpointer.save(state(6), 6)
    assert data.exists()
    assert (tmp_path / manifest_name(4)).exists()


def test_the_newest_claim_and_those_of_files_that_are_left_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        checkpointer.save(state(1), 1)
    writer = next(iter(claims(tmp_path)))
    gone = ended_process()
    # The writer of step 1 has ended as well.
    put_claim(tmp_path, run_id=writer, **vars(gone))
    put_claim(tmp_path, generation=2, **vars(gone))
    newest = put_claim(tmp_path, generation=3, **vars(gone)).run_id
    assert [Path(file.name).stem for file in dead(LocalStore(str(tmp_path)))] == [
        run_id for run_id, run in claims(tmp_path).items() if run.generation == 2
    ]
    Checkpointer(tmp_path, **FAST).save(state(2), 2)
    assert max(run.generation for run in claims(tmp_path).values()) == 4
    assert newest


def test_what_a_killed_writer_left_is_deleted_by_the_next_run(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from checkpoint_support import *
from thinpoint.checkpoint import Checkpointer
store = StuckStore(Path(sys.argv[1]), "commit")
checkpointer = Checkpointer(store, **FAST)
checkpointer.save(state(1), 1)
store.stuck.set()
print("saving", flush=True)
checkpointer.save(state(2), 2)
"""
    child = python(code, tmp_path)
    assert child.stdout is not None and child.stdout.readline() == "saving\n"
    store = LocalStore(str(tmp_path))
    wait_for(lambda: any(left.size > 10_000 for left in store.leftovers()), "an unfinished file")
    assert not any(file.name.startswith(".") for file in dead(store)), "its writer lives"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(dead(store)) == 1
    with Checkpointer(tmp_path, **FAST) as checkpointer:
        checkpointer.save(state(3), 3)
    assert store.leftovers() == []
    assert [(entry.step, entry.state) for entry in entries(store)] == [(3, "committed"), (1, "committed")]
