"""Many ranks that save and restore together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_support import FAST, NoRenameStore, data_files, flip_a_bit
from group_ranks import (
    LOST_AFTER_S,
    Broken,
    Trap,
    group_checkpointer,
    kill_self,
    no_answer,
    no_space,
    outcome_of,
    results_of,
    run_ranks,
    sharded,
    train_state,
    whole_bits,
)

from thinpoint.checkpoint import Checkpointer, group_writer
from thinpoint.checkpoint.names import step_folder
from thinpoint.dcp.rank_state import PerRank
from thinpoint.errors import StateMismatchError, UsageError


def sum_up(values: list[Any], rank: int, world_size: int) -> dict[str, Any]:
    """Merges the states of ranks in the tests."""
    return {"drawn": sum(value["drawn"] for value in values) + 1000 * rank, "of": world_size}


# ---- saving and restoring -------------------------------------------------------------------------------------------


def _save_and_restore(rank: int, folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = sharded(0)
    own = {"drawn": rank + 1}
    events: list[Any] = []
    with group_checkpointer(folder, on_event=events.append) as checkpointer:
        state = {**train_state(model, optimizer), "own": PerRank(own), "step": 1, "notes": ["a", (1, 2)]}
        first = checkpointer.save(state, 1, metadata={"loss": 0.5})
        bits = whole_bits(train_state(model, optimizer))
        for _ in range(2):
            model(torch.randn(7, 19)).square().sum().backward()
            optimizer.step()
        bits_2 = whole_bits(train_state(model, optimizer))
        future = checkpointer.async_save(
            {**train_state(model, optimizer), "own": PerRank(own), "step": 2, "notes": []}, 2
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        own["drawn"] = -1
        second = future.result()
        steps = checkpointer.steps(), checkpointer.latest()

        model, optimizer = sharded(5)
        target = {**train_state(model, optimizer), "own": PerRank(own), "step": 0, "notes": None}
        newest = checkpointer.restore(target)
        assert newest is not None
        set_state_dict(
            model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
        )
        same = whole_bits(train_state(model, optimizer)) == bits_2
        told = newest.step, target["step"], target["notes"], dict(own)
        older = checkpointer.restore(target, 1)
        assert older is not None
        same_older = whole_bits({key: target[key] for key in ("model", "optimizer")}) == bits
        whole = checkpointer.load(1)
    return {
        "outcomes": (first.outcome, second.outcome, first.save_id == older.save_id),
        "steps": steps,
        "same": (same, same_older),
        "newest": told,
        "older": (older.step, target["step"], target["notes"], older.metadata),
        "whole": whole_bits({key: whole[key] for key in ("model", "optimizer")}) == bits,
        "own": [whole["own"][f"rank{r:05d}"] for r in range(2)],
        "events": [type(event).__name__ for event in events],
        "rank": events[0].to_json().partition('"rank": ')[2][:1],
        "raw_bytes": first.saved.raw_bytes if first.saved else 0,
        "bits": bits if rank == 0 else None,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A directory that two ranks have saved into, and what they tell."""
    folder = tmp_path_factory.mktemp("group")
    return folder / "run", results_of(run_ranks(2, _save_and_restore, folder, folder / "run"))


def test_what_two_ranks_restore_has_the_bits_that_they_saved(saved: tuple[Path, list[Any]]) -> None:
    for rank, told in enumerate(saved[1]):
        assert told["outcomes"] == ("committed", "committed", True)
        assert told["steps"] == ([1, 2], 2)
        assert told["same"] == (True, True)
        assert told["newest"] == (2, 2, [], {"drawn": rank + 1})
        assert told["older"] == (1, 1, ["a", (1, 2)], {"loss": 0.5})
        assert told["whole"]
        assert told["own"] == [{"drawn": 1}, {"drawn": 2}]
        assert told["events"] == ["CheckpointReport"] * 2 + ["RestoreReport"] * 2
        assert told["rank"] == str(rank)
        assert told["raw_bytes"] > 0


def _three_load_and_save(rank: int, folder: Path) -> Any:
    model, optimizer = sharded(3)
    own = {"drawn": -1}
    with group_checkpointer(folder) as checkpointer:
        plain = {**train_state(model, optimizer), "own": PerRank(own), "step": 0, "notes": None}
        refused = outcome_of(lambda: checkpointer.restore(plain, 1))
        target = {
            **train_state(model, optimizer),
            "own": PerRank(own, merge=sum_up),
            "step": 0,
            "notes": None,
        }
        checkpointer.restore(target, 1)
        bits = whole_bits({key: target[key] for key in ("model", "optimizer")})
        checkpointer.save(target, 3)
    return refused, bits, own


def test_two_save_three_load_and_save_and_one_loads(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, told = saved
    found = results_of(run_ranks(3, _three_load_and_save, tmp_path, folder))
    for rank, (refused, bits, own) in enumerate(found):
        assert refused[0] == "StateMismatchError"
        assert all(text in refused[1] for text in ("own", "2 ranks", "loaded by 3", "merge"))
        assert bits == told[0]["bits"]
        assert own == {"drawn": 3 + 1000 * rank, "of": 3}
    own = {}
    target: dict[str, Any] = {
        "model": {
            "0.weight": torch.zeros(31, 19),
            "0.bias": torch.zeros(31),
            "2.weight": torch.zeros(5, 31),
            "2.bias": torch.zeros(5),
        },
        "own": PerRank(own, merge=sum_up),
        "step": 0,
        "notes": None,
    }
    report = Checkpointer(folder, **FAST).restore(target, strict=False)
    assert report is not None and report.step == 3
    assert whole_bits(target["model"]) == told[0]["bits"]["model"]
    assert own == {"drawn": 3 + 1003 + 2003, "of": 1}
    assert report.unexpected and all(name.startswith("optimizer.") for name in report.unexpected)
    with pytest.raises(StateMismatchError, match="unexpected"):
        Checkpointer(folder, **FAST).restore(target)


def _load_data(rank: int, folder: Path, world_size: int) -> Any:
    loader_module = pytest.importorskip("torchdata.stateful_dataloader")
    data = list(range(100 * rank, 100 * rank + 20))
    loader = loader_module.StatefulDataLoader(data, batch_size=4)
    batches = iter(loader)
    next(batches), next(batches)
    with group_checkpointer(folder) as checkpointer:
        if checkpointer.latest() is None:
            checkpointer.save({"loader": PerRank(loader)}, 1)
            return [batch.tolist() for batch in batches]
        fresh = loader_module.StatefulDataLoader(data, batch_size=4)
        checkpointer.restore({"loader": PerRank(fresh)})
        return [batch.tolist() for batch in fresh]


def test_each_rank_goes_on_with_its_own_data(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    expected = results_of(run_ranks(2, _load_data, tmp_path, tmp_path / "run", 2))
    assert expected[1][0][0] == 108
    assert results_of(run_ranks(2, _load_data, tmp_path, tmp_path / "run", 2)) == expected


def _subgroups(rank: int, folder: Path) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    value = {"w": torch.full((9,), float(rank // 2)), "own": PerRank({"rank": rank}, process_group=mine)}
    with group_checkpointer(folder / str(rank // 2), process_group=mine, keep_last=2) as checkpointer:
        for step in range(1, 5):
            checkpointer.save({**value, "step": step}, step)
        own: dict[str, Any] = {}
        target = {"w": torch.zeros(9), "own": PerRank(own, process_group=mine), "step": 0}
        checkpointer.restore(target)
    with group_checkpointer(NoRenameStore(folder / "all"), keep_last=1) as everybody:
        everybody.save({"a": torch.ones(3), "rank": PerRank({"rank": rank})}, 1)
        everybody.save({"a": torch.ones(3) * 2, "rank": PerRank({"rank": rank})}, 1, overwrite=True)
        everybody.save({"a": torch.ones(3) * 3, "rank": PerRank({"rank": rank})}, 2)
        gone = everybody.truncate_after(2)
    return target["w"][0].item(), own, target["step"], gone, everybody.steps()


def test_groups_of_four_ranks_save_beside_each_other_and_together(tmp_path: Path) -> None:
    found = results_of(run_ranks(4, _subgroups, tmp_path, tmp_path))
    assert found == [(float(rank // 2), {"rank": rank}, 4, [], [2]) for rank in range(4)]
    for number in "01":
        folder = tmp_path / number
        assert sorted(path.name for path in folder.iterdir()) == ["runs", step_folder(3), step_folder(4)]
        assert len(data_files(folder, 4)) == 2
    left = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert left == ["runs", step_folder(2)]
    assert len(list((tmp_path / "all" / step_folder(2)).iterdir())) == 4 + 3


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def _fail(rank: int, folder: Path) -> Any:
    state = {"w": torch.arange(1000.0) + rank, "own": PerRank({"rank": rank})}
    disk = Trap(folder, "write", no_space)
    told: dict[str, Any] = {}
    with group_checkpointer(disk) as checkpointer:
        checkpointer.save(state, 1)
        broken = Broken(no_space if rank == 1 else None)
        told["state"] = outcome_of(lambda: checkpointer.save({**state, "broken": broken}, 2))
        future = checkpointer.async_save({**state, "broken": broken}, 3)
        told["staging"] = outcome_of(future.result)
        disk.is_armed = rank == 1
        told["write"] = outcome_of(lambda: checkpointer.save(state, 4))
        told["unasked"] = outcome_of(lambda: (checkpointer.async_save(state, 5), checkpointer.wait()))
        disk.is_armed, disk.point = rank == 0, "manifest"
        told["manifest"] = outcome_of(lambda: checkpointer.save(state, 6))
        disk.is_armed = False
        told["exists"] = outcome_of(lambda: checkpointer.save(state, 1))
        told["steps"] = outcome_of(lambda: checkpointer.save(state, 7 + rank))
        told["optimizer"] = outcome_of(
            lambda: checkpointer.save({"o": torch.optim.SGD([torch.ones(2, requires_grad=True)])}, 8)
        )
        told["after"] = checkpointer.steps()
        disk.is_armed, disk.point, disk.act = rank == 1, "written", disk.once(no_answer)
        told["good"] = outcome_of(lambda: checkpointer.save(state, 9))
        disk.act = no_space
    options = {"codec": "raw"} if rank else {}
    with group_checkpointer(folder, **options) as mixed:
        told["mixed"] = outcome_of(lambda: mixed.save(state, 10))
    with group_checkpointer(disk, on_error="warn", max_failures=3, while_saving="skip") as patient:
        disk.is_armed, disk.point = rank == 1, "write"
        told["warned"] = [patient.save(state, 20 + i).outcome for i in range(2)]
        told["given up"] = outcome_of(lambda: patient.save(state, 22))
        told["mismatch"] = outcome_of(lambda: patient.restore({"w": torch.zeros(999 + rank)}))
        disk.is_armed = False
        told["found"] = patient.steps()
    return told


def test_what_fails_on_one_rank_fails_on_all_with_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for told in results_of(run_ranks(2, _fail, tmp_path, folder)):
        for case in ("state", "staging", "write", "given up"):
            name, text, seconds = told[case]
            assert name == "RanksFailedError", (case, text)
            assert "rank 1: NoSpaceError: no space left" in text
            assert seconds < 10
        assert told["unasked"][0] == "RanksFailedError"
        assert told["manifest"][0] == "NoSpaceError"
        assert told["exists"][0] == "AlreadyExistsError"
        assert told["steps"][0] == "UsageError" and "training step 8" in told["steps"][1]
        assert told["optimizer"][0] == "UsageError" and "get_state_dict" in told["optimizer"][1]
        assert told["after"] == [1]
        assert told["good"][0] == "", "what passes is tried again, under another name"
        assert told["mixed"][0] == "UsageError"
        assert all(text in told["mixed"][1] for text in ("rank 0: codec zstd", "rank 1: codec raw"))
        assert told["warned"] == ["failed", "failed"]
        assert told["mismatch"][0] == "RanksFailedError"
        assert "rank 0: StateMismatchError" in told["mismatch"][1]
        assert told["found"] == [1, 9]
    assert sorted(path.name for path in folder.iterdir()) == ["runs", step_folder(1), step_folder(9)], (
        "what failed has left nothing"
    )


def _fail_before(rank: int, folder: Path) -> Any:
    """What fails on rank 1 before it takes part in a save, which rank 0 has begun or begins only later."""
    state = {"w": torch.arange(1000.0)}

    def give_state() -> Any:
        if rank == 1:
            raise MemoryError("no room for the state")
        return state

    told: dict[str, Any] = {}
    with group_checkpointer(folder, every_steps=1) as checkpointer:
        for late in (0, 1):
            if rank == late:
                time.sleep(1)
            metadata = {"x": object() if rank == 1 else 1}
            told[f"metadata {late}"] = outcome_of(lambda m=metadata: checkpointer.save(state, 1, metadata=m))
            told[f"good {late}"] = outcome_of(lambda step=10 + late: checkpointer.save(state, step))
        told["state"] = outcome_of(lambda: (checkpointer.maybe_save(give_state, 20), checkpointer.wait()))
        told["unasked"] = outcome_of(lambda: checkpointer.maybe_save(give_state, 21))
        told["raised"] = outcome_of(lambda: checkpointer.maybe_save(state, 22))
        told["goes on"] = outcome_of(lambda: checkpointer.maybe_save(state, 23).result())
        flying = checkpointer.async_save(state, 30)
        told["beside"] = outcome_of(
            lambda: checkpointer.save(state, 31, metadata={"x": object() if rank == 1 else 1})
        )
        told["flying"] = outcome_of(flying.result)
        told["good beside"] = outcome_of(lambda: checkpointer.save(state, 32))
        told["step"] = outcome_of(lambda: checkpointer.restore(dict(state), "x" if rank == 1 else None))
        told["good after"] = outcome_of(lambda: checkpointer.restore(dict(state)))
        told["steps"] = checkpointer.steps()
    return told


def test_what_fails_on_one_rank_before_a_save_begins_fails_on_all(tmp_path: Path) -> None:
    for rank, told in enumerate(results_of(run_ranks(2, _fail_before, tmp_path, tmp_path / "run"))):
        for case, cause in (
            ("metadata 0", "JSON"),
            ("metadata 1", "JSON"),
            ("state", "no room"),
            ("beside", "JSON"),
            ("step", "whole number"),
        ):
            name, text, seconds = told[case]
            assert cause in text and seconds < 5, (case, text)
            assert (name == "RanksFailedError") == (rank == 0), (case, name)
        assert told["unasked"][0] == ("" if rank == 0 else "MemoryError"), "the future has it"
        assert told["raised"][0] == ("RanksFailedError" if rank == 0 else "MemoryError")
        good = ("good 0", "good 1", "goes on", "flying", "good beside", "good after")
        assert [told[case][1] for case in good] == [""] * len(good)
        assert told["steps"] == [10, 11, 23, 30, 32]


def _do_not_come(rank: int, folder: Path) -> Any:
    """Rank 1 lives, but does not save."""
    with group_checkpointer(folder, timeout=3) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, 1)
        if rank == 1:
            time.sleep(6)
            return None
        return outcome_of(lambda: checkpointer.save({"w": torch.ones(3)}, 2))


def test_a_rank_that_does_not_come_fails_the_save_in_time(tmp_path: Path) -> None:
    (name, text, seconds), _ = results_of(run_ranks(2, _do_not_come, tmp_path, tmp_path / "run"))
    assert name == "SaveTimeoutError", text
    assert 2.5 < seconds < 5


def _destroy_too_early(rank: int, folder: Path) -> Any:
    checkpointer = group_checkpointer(folder)
    checkpointer.save({"w": torch.ones(3)}, 1)
    dist.destroy_process_group()
    return outcome_of(lambda: checkpointer.save({"w": torch.ones(3)}, 2))


def test_groups_that_are_gone_are_told_with_a_hint(tmp_path: Path) -> None:
    for name, text, _ in results_of(run_ranks(2, _destroy_too_early, tmp_path, tmp_path / "run")):
        assert name == "CheckpointError" and "Close the checkpointer before destroy_process_group()" in text


def _die(rank: int, folder: Path, point: str, victim: int, asynchronous: bool) -> Any:
    disk = Trap(folder, point, kill_self)
    state = {"w": torch.arange(100_000.0) + rank, "own": PerRank({"rank": rank})}
    checkpointer = group_checkpointer(disk)
    checkpointer.save(state, 1)
    disk.is_armed = rank == victim
    last = Broken(kill_self if rank == victim and point == "state" else None)
    save = (lambda *a: checkpointer.async_save(*a).result()) if asynchronous else checkpointer.save
    told = outcome_of(lambda: save({**state, "last": last}, 2))
    again = outcome_of(lambda: checkpointer.save(state, 3))
    checkpointer.close()
    return told, again, checkpointer.latest()


def _check(rank: int, folder: Path) -> Any:
    own: dict[str, Any] = {}
    target = {"w": torch.zeros(100_000), "own": PerRank(own)}
    with group_checkpointer(folder) as checkpointer:
        report = checkpointer.restore(target)
        checkpointer.save(target, 4)
        return report and report.step, whole_bits(target["w"]), own, checkpointer.steps()


@pytest.mark.parametrize(
    ("point", "victim", "asynchronous"),
    [("state", 1, False), ("write", 1, True), ("written", 1, False), ("manifest", 0, False)],
)
def test_a_killed_rank_is_named_and_the_checkpoint_before_is_restored(
    tmp_path: Path, point: str, victim: int, asynchronous: bool
) -> None:
    folder = tmp_path / "run"
    ended = run_ranks(2, _die, tmp_path, folder, point, victim, asynchronous)
    assert ended[victim].exit_code == -signal.SIGKILL
    survivor = ended[1 - victim]
    assert survivor.exit_code == 0
    told, again, latest = survivor.result
    for name, text, seconds in (told, again):
        assert name == "RankLostError"
        assert "ranks were lost" in text and f"rank {victim}: " in text
        assert seconds < LOST_AFTER_S + 5
    assert latest == 1
    bits = whole_bits(torch.arange(100_000.0))
    assert results_of(run_ranks(2, _check, tmp_path, folder)) == [
        (1, bits, {"rank": rank}, [1, 4]) for rank in range(2)
    ]
    assert not (folder / step_folder(2)).exists(), "the next run has cleaned up"


def _stop(rank: int, folder: Path) -> Any:
    checkpointer = group_checkpointer(folder)
    checkpointer.save({"w": torch.ones(10)}, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome_of(lambda: checkpointer.save({"w": torch.zeros(10)}, 2))


def test_a_rank_that_hangs_is_taken_for_lost(tmp_path: Path) -> None:
    ended = run_ranks(2, _stop, tmp_path, tmp_path / "run", stopped=1)
    name, text, seconds = ended[0].result
    assert ended[0].exit_code == 0
    assert name == "RankLostError" and "rank 1: no sign of life for 4.0 s" in text
    assert seconds < LOST_AFTER_S + 5


def _get_stuck(rank: int, folder: Path) -> Any:
    disk = Trap(folder, "written", lambda: time.sleep(1000))
    state = {"w": torch.arange(1000.0) + rank}
    with group_checkpointer(disk, timeout=1.5) as checkpointer:
        disk.is_armed = rank == 1
        told = [outcome_of(lambda: checkpointer.save(state, 1))]
        told.append(outcome_of(lambda: checkpointer.async_save(state, 2).result()))
        disk.is_armed = False
        told.append(outcome_of(lambda: checkpointer.save(state, 3)))
        return told, checkpointer.steps()


def test_a_stuck_disk_on_one_rank_fails_the_save_in_time_and_the_next_one_goes_well(tmp_path: Path) -> None:
    for told, steps in results_of(run_ranks(2, _get_stuck, tmp_path, tmp_path / "run")):
        for name, text, seconds in told[:2]:
            assert name in ("SaveTimeoutError", "RanksFailedError") and "took longer than 2 s" in text
            assert seconds < 6
        assert told[2][0] == "", told[2]
        assert steps == [3]


def _own_folders(rank: int, folder: Path) -> Any:
    group_writer.SHARED_S = 1.0
    mine = folder / str(rank)
    state = {"w": torch.ones(3)}
    with group_checkpointer(mine) as checkpointer:
        told = [outcome_of(lambda: checkpointer.save(state, 1))]
    if rank == 0:
        with Checkpointer(mine, **FAST) as alone:
            alone.save(state, 5)
    dist.barrier()
    with group_checkpointer(mine) as checkpointer:
        told.append(outcome_of(lambda: checkpointer.restore({"w": torch.zeros(3)})))
    dist.barrier()
    with group_checkpointer(folder / str(1 - rank)) as checkpointer:
        told.append(outcome_of(lambda: checkpointer.restore({"w": torch.zeros(3)})))
    return told


def test_folders_that_are_not_shared_are_refused(tmp_path: Path) -> None:
    for told in results_of(run_ranks(2, _own_folders, tmp_path, tmp_path / "runs")):
        for name, text, _ in told:
            assert name == "CheckpointError"
            assert "not shared" in text and "rank" in text
    assert not list((tmp_path / "runs").glob("[01]/step-*1/*"))


def _fall_back(rank: int, folder: Path) -> Any:
    state = {"w": torch.zeros(1000), "own": PerRank({"rank": rank})}
    with group_checkpointer(folder) as checkpointer:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            checkpointer.save(state, step)
    dist.barrier()
    if rank == 0:
        # The whole tensor is in one rank's file; the other's holds that rank's own state.
        flip_a_bit(data_files(folder, 3)[1])
        flip_a_bit(data_files(folder, 2)[0])
    dist.barrier()
    told = []
    for strict in (True, False):
        target = {"w": torch.zeros(1000), "own": PerRank({"rank": -1})}
        with group_checkpointer(folder) as checkpointer:
            report = checkpointer.restore(target, strict=strict)
            assert report is not None
            told.append(
                (
                    report.step,
                    target["w"].unique().tolist(),
                    [(s.step, "rank" in s.reason) for s in report.skipped],
                )
            )
            if not strict:
                checkpointer.save(target, 3)
                told.append(checkpointer.restore(target).step)  # type: ignore[union-attr]
    return told


def test_all_fall_back_together_where_one_rank_finds_damage(tmp_path: Path) -> None:
    for told in results_of(run_ranks(2, _fall_back, tmp_path, tmp_path / "run")):
        assert told[2] == 3
        for step, values, skipped in told[:2]:
            assert (step, values) == (1, [1.0])
            assert [step for step, _ in skipped] == [3, 2]
            assert all(names_rank for _, names_rank in skipped)


# ---- when it saves --------------------------------------------------------------------------------------------------


def _maybe(rank: int, folder: Path) -> Any:
    state = {"w": torch.zeros(10)}
    saved, stops = [], []
    with group_checkpointer(
        folder, every_minutes=0.5 / 60 if rank == 0 else 60, stale="ignore"
    ) as checkpointer:
        checkpointer.install_sigterm(30)
        for step in range(1, 200):
            if rank == 1 and len(saved) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.maybe_save(state, step) is not None:
                saved.append(step)
            stops.append(checkpointer.should_stop)
            if checkpointer.should_stop:
                break
            time.sleep(0.05 * (rank + 1))
        steps = checkpointer.steps()
    return saved, stops, steps


def test_ranks_save_and_stop_at_the_same_steps(tmp_path: Path) -> None:
    one, other = results_of(run_ranks(2, _maybe, tmp_path, tmp_path / "run"))
    assert one == other
    saved, stops, steps = one
    assert len(saved) == 3 and steps == saved
    assert stops == [False] * (len(stops) - 1) + [True]


def test_a_group_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="not initialised"):
        Checkpointer("x", process_group=True)
    with pytest.raises(UsageError, match="lost_after"):
        Checkpointer("x", lost_after=0)
