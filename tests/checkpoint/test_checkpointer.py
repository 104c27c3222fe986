"""Saving into a directory, what stays in it, and getting it back."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import (
    FAST,
    NoRenameStore,
    Wrapped,
    data_files,
    flip_a_bit,
    same_bits,
    state,
    wait_for,
    weights,
)

import thinpoint
from thinpoint.checkpoint import Checkpointer
from thinpoint.checkpoint.names import manifest_name, step_folder
from thinpoint.errors import (
    AlreadyExistsError,
    CheckpointError,
    DamagedFileError,
    StaleStateError,
    StateMismatchError,
    StorageError,
    UsageError,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def filled(folder: Path, steps: list[int], **options: Any) -> Checkpointer:
    with Checkpointer(folder, **{**FAST, **options}) as checkpointer:
        for step in steps:
            checkpointer.save(state(step), step)
    return Checkpointer(folder, **{**FAST, **options})


def test_what_is_restored_has_the_bits_that_were_saved(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2])
    target = state(0)
    tensor = target["model"]["w"]
    report = checkpointer.restore(target)
    assert report is not None
    assert (report.step, report.skipped, target["step"]) == (2, (), 2)
    assert target["model"]["w"] is tensor
    assert same_bits(tensor, weights(2))


def test_modules_and_optimizers_are_restored_in_place(folder: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(30, 30)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    with Checkpointer(folder, **FAST) as checkpointer:
        checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 1)
    other, other_optimizer = made()
    assert not same_bits(other.weight, model.weight)
    Checkpointer(folder, **FAST).restore({"model": other, "optimizer": other_optimizer})
    assert same_bits(other.weight.detach(), model.weight.detach())
    moments = [o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, other_optimizer)]
    assert same_bits(*moments)


@pytest.mark.parametrize("make", [False, True])
def test_an_empty_folder_gives_none(folder: Path, make: bool) -> None:
    if make:
        folder.mkdir()
    checkpointer = Checkpointer(folder, **FAST)
    target = state(0)
    assert checkpointer.restore(target) is None
    assert checkpointer.load() is None
    assert checkpointer.latest() is None
    assert checkpointer.steps() == []
    assert same_bits(target["model"]["w"], weights(0))
    assert folder.exists() == make, "reading makes no folder"


def test_a_folder_with_nothing_committed_gives_none(folder: Path) -> None:
    filled(folder, [1])
    (folder / manifest_name(1)).unlink()
    assert Checkpointer(folder, **FAST).restore(state(0)) is None


def test_steps_come_in_order_and_the_latest_is_the_last(folder: Path) -> None:
    checkpointer = filled(folder, [20, 3, 100])
    assert checkpointer.steps() == [3, 20, 100]
    assert checkpointer.latest() == 100
    assert checkpointer.load(20)["step"] == 20
    assert checkpointer.load()["step"] == 100
    with pytest.raises(CheckpointError, match="no checkpoint of training step 4"):
        checkpointer.restore(state(0), 4)


def test_a_step_that_exists_is_refused_before_anything_is_written(folder: Path) -> None:
    checkpointer = filled(folder, [1])
    with pytest.raises(AlreadyExistsError, match="step 1 has a checkpoint already"):
        checkpointer.save(state(9), 1)
    assert checkpointer.load()["step"] == 1
    assert len(data_files(folder, 1)) == 1


def test_a_step_is_replaced_if_asked_for(folder: Path) -> None:
    with Checkpointer(folder, **FAST) as checkpointer:
        checkpointer.save(state(1), 1)
        old = data_files(folder, 1)
        checkpointer.save(state(9), 1, overwrite=True)
    assert checkpointer.load()["step"] == 9
    assert len(data_files(folder, 1)) == 1
    assert data_files(folder, 1) != old
    assert not (folder / "trash").exists()


def test_the_manifest_says_what_the_files_are(folder: Path) -> None:
    with Checkpointer(folder, **FAST) as checkpointer:
        report = checkpointer.save(state(7), 7, metadata={"loss": 2.5, "tokens": [1, 2]})
    manifest = json.loads((folder / manifest_name(7)).read_text())
    assert report.saved is not None
    (file,) = manifest["files"]
    assert file["bytes"] == report.saved.file_bytes == (folder / step_folder(7) / file["name"]).stat().st_size
    assert file["file_id"] == report.saved.file_id == thinpoint.open(data_files(folder, 7)[0]).file_id
    assert manifest["metadata"] == {"loss": 2.5, "tokens": [1, 2]}
    assert manifest["roles"]["weight"]["raw_bytes"] == 12_000
    assert manifest["step"] == 7
    assert manifest["save_id"] == report.save_id
    restored = Checkpointer(folder, **FAST).restore(state(0))
    assert restored is not None and restored.metadata == {"loss": 2.5, "tokens": [1, 2]}


@pytest.mark.parametrize("metadata", [["a"], {"x": float("nan")}, {"x": object()}, {"x": "y" * (2 << 20)}])
def test_metadata_that_no_manifest_can_hold_are_refused(folder: Path, metadata: Any) -> None:
    with pytest.raises(UsageError, match=r"metadata|JSON"):
        Checkpointer(folder, **FAST).save(state(1), 1, metadata=metadata)
    assert not folder.exists()


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 10**19, None])
def test_what_is_no_training_step_is_refused(folder: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="training step"):
        Checkpointer(folder, **FAST).save(state(1), step)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("every_steps", 0),
        ("every_minutes", 0),
        ("keep_last", 0),
        ("keep_every", 1.5),
        ("on_error", "ignore"),
        ("max_failures", None),
        ("timeout", 0),
        ("retries", -1),
        ("while_saving", "queue"),
        ("stale", True),
        ("orphan_age", float("nan")),
        ("on_event", 3),
    ],
)
def test_an_option_that_is_not_valid_is_named(folder: Path, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option):
        Checkpointer(folder, **{option: value})


# ---- falling back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_newest_step_is_passed_over_and_named(
    folder: Path, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = filled(folder, [1, 2, 3])
    flip_a_bit(data_files(folder, 3)[0])
    data_files(folder, 2)[0].unlink()
    target = state(0)
    with caplog.at_level(logging.WARNING, "thinpoint"):
        report = checkpointer.restore(target, strict=strict)
    assert report is not None
    assert report.step == 1
    assert same_bits(target["model"]["w"], weights(1))
    assert [skipped.step for skipped in report.skipped] == [3, 2]
    assert "digest" in report.skipped[0].reason
    assert "gone" in report.skipped[1].reason
    assert len([r for r in caplog.records if "passed over" in r.getMessage()]) == 2


def test_a_damaged_step_can_be_saved_again_by_the_run_that_passed_it_over(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2])
    flip_a_bit(data_files(folder, 2)[0])
    assert checkpointer.restore(state(0)).step == 1  # type: ignore[union-attr]
    checkpointer.save(state(2), 2)
    checkpointer.close()
    assert same_bits(Checkpointer(folder, **FAST).load(2)["model"]["w"], weights(2))


def test_nothing_intact_is_an_error_and_never_a_silent_beginning(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2])
    for step in (1, 2):
        flip_a_bit(data_files(folder, step)[0])
    with pytest.raises(CheckpointError, match=r"none of the checkpoints is intact.*step 2.*step 1"):
        checkpointer.restore(state(0))
    with pytest.raises(CheckpointError):
        checkpointer.load()


def test_a_step_asked_for_by_number_is_not_replaced_by_another(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2])
    flip_a_bit(data_files(folder, 2)[0])
    with pytest.raises(DamagedFileError):
        checkpointer.restore(state(0), 2)


def test_a_file_of_another_save_does_not_pass_for_the_one_that_the_manifest_names(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2], codec="raw")
    one, two = data_files(folder, 1)[0], data_files(folder, 2)[0]
    two.write_bytes(one.read_bytes())
    report = checkpointer.restore(state(0))
    assert report is not None and report.step == 1
    assert "not the file that the manifest names" in report.skipped[0].reason


def test_a_state_that_does_not_fit_is_no_reason_to_fall_back(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2])
    target = state(0)
    target["model"]["more"] = torch.zeros(3)
    with pytest.raises(StateMismatchError):
        checkpointer.restore(target)
    assert same_bits(target["model"]["w"], weights(0))


def test_a_store_that_refuses_is_no_reason_to_fall_back(folder: Path) -> None:
    filled(folder, [1, 2])

    class Refusing(Wrapped):
        def source(self, name: str) -> Any:
            if name.startswith(step_folder(2)):
                raise StorageError("no answer", errno=errno.EIO)
            return self._store.source(name)

    with pytest.raises(StorageError, match="no answer"):
        Checkpointer(Refusing(folder), **FAST).restore(state(0))


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_the_last_ones_and_every_so_many_are_kept(folder: Path) -> None:
    checkpointer = filled(folder, list(range(1, 13)), keep_last=2, keep_every=5)
    assert checkpointer.steps() == [5, 10, 11, 12]
    assert sorted(path.name for path in folder.iterdir()) == ["runs", *map(step_folder, (5, 10, 11, 12))]


def test_all_are_kept_unless_told_otherwise(folder: Path) -> None:
    assert filled(folder, [1, 2, 3, 4], keep_every=3).steps() == [1, 2, 3, 4]


def test_without_rename_the_manifest_goes_first(folder: Path) -> None:
    store = NoRenameStore(folder)
    with Checkpointer(store, keep_last=1, **FAST) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step)
    assert checkpointer.steps() == [2]
    assert [name.rpartition(".")[2] for name in store.deleted] == ["json", "thin"]
    assert not (folder / step_folder(1)).exists()


def test_the_one_just_saved_is_kept_whatever_lies_behind_it(folder: Path) -> None:
    filled(folder, [100, 200, 300])
    with Checkpointer(folder, keep_last=1, **FAST) as checkpointer:
        checkpointer.restore(state(0), 100)
        checkpointer.save(state(150), 150)
    assert checkpointer.steps() == [150, 200, 300]


def test_damaged_checkpoints_do_not_push_good_ones_out(folder: Path) -> None:
    filled(folder, [1, 2, 3])
    data_files(folder, 3)[0].unlink()
    with Checkpointer(folder, keep_last=2, **FAST) as checkpointer:
        checkpointer.save(state(4), 4)
    assert checkpointer.steps() == [2, 4]
    assert (folder / manifest_name(3)).exists()


def test_nothing_is_deleted_when_the_save_fails(folder: Path) -> None:
    filled(folder, [1, 2])

    class Full(Wrapped):
        def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
            if name.endswith("manifest.json"):
                raise thinpoint.errors.NoSpaceError("full", errno=errno.ENOSPC)
            self._store.put(name, data, if_absent=if_absent)

    with Checkpointer(Full(folder), keep_last=1, **FAST) as checkpointer:
        with pytest.raises(thinpoint.errors.NoSpaceError):
            checkpointer.save(state(3), 3)
    assert checkpointer.steps() == [1, 2]
    assert not (folder / step_folder(3)).exists(), (
        "the data file that no manifest names would fill the disk further"
    )


def test_truncating_takes_back_what_lies_behind_a_step(folder: Path) -> None:
    with filled(folder, [1, 2, 3, 4]) as checkpointer:
        assert checkpointer.truncate_after(2) == [4, 3]
        assert checkpointer.steps() == [1, 2]
        checkpointer.save(state(3), 3)
    assert checkpointer.steps() == [1, 2, 3]
    assert not (folder / "trash").exists()


def test_truncating_everything_is_refused(folder: Path) -> None:
    with filled(folder, [5, 6]) as checkpointer:
        with pytest.raises(CheckpointError, match="no checkpoint would be left"):
            checkpointer.truncate_after(4)
        assert checkpointer.steps() == [5, 6]


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_reports_are_stable_json_and_go_to_on_event(folder: Path) -> None:
    events: list[Any] = []
    committed: list[tuple[int, str]] = []
    options = {"on_event": events.append, "on_committed": lambda *told: committed.append(told), **FAST}
    with Checkpointer(folder, **options) as checkpointer:
        report = checkpointer.save(state(1), 1)
        checkpointer.restore(state(0))
    assert events[0] is report
    assert committed == [(1, f"{folder}/step-0000000001")]
    saved, restored = (json.loads(event.to_json()) for event in events)
    assert (saved["event"], saved["outcome"], saved["step"], saved["raw_bytes"]) == (
        "save",
        "committed",
        1,
        12_000,
    )
    assert saved["roles"]["weight"]["raw_bytes"] == 12_000
    assert set(saved) >= {
        "stall_seconds",
        "stages",
        "retries",
        "backend",
        "versions",
        "peak_process_bytes",
        "rank",
    }
    assert 0 < saved["stall_seconds"] <= saved["seconds"]
    assert (restored["event"], restored["step"], restored["skipped"]) == ("restore", 1, [])
    assert saved["report"] == restored["report"] == 1


def test_a_function_of_the_user_that_fails_does_not_undo_the_save(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*told: Any) -> None:
        raise ValueError("mine")

    with Checkpointer(folder, on_event=fail, on_committed=fail, **FAST) as checkpointer:
        assert checkpointer.save(state(1), 1).outcome == "committed"
    assert checkpointer.steps() == [1]
    assert "ValueError: mine" in caplog.text


def test_every_record_names_the_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.DEBUG, "thinpoint"):
        filled(folder, [1])
    records = [record for record in caplog.records if record.name == "thinpoint"]
    assert records
    assert all(record.rank == 3 and record.getMessage().startswith("rank 3: ") for record in records)
    assert data_files(folder, 1)[0].name.endswith("-rank00003.thin")


def test_a_state_that_stands_still_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(folder, **FAST) as checkpointer:
        checkpointer.save(state(1), 1)
        checkpointer.save({**state(1), "step": 2}, 2)
    assert "no weight has changed since training step 1" in caplog.text
    assert checkpointer.steps() == [1, 2]


def test_a_state_that_stands_still_fails_if_asked_for_also_after_a_restart(folder: Path) -> None:
    checkpointer = filled(folder, [1, 2], stale="fail")
    checkpointer.restore(state(0))
    with pytest.raises(StaleStateError, match="since training step 2"):
        checkpointer.save(state(2), 3)
    assert checkpointer.steps() == [1, 2]
    assert not (folder / step_folder(3)).exists()
    checkpointer.save(state(3), 3)
    checkpointer.save(state(3), 1, overwrite=True)
    assert checkpointer.steps() == [1, 2, 3]


# ---- when it saves --------------------------------------------------------------------------------------------------


def test_maybe_save_saves_every_so_many_steps(folder: Path) -> None:
    asked = []

    def give() -> dict[str, Any]:
        asked.append(step)
        return state(step)

    with Checkpointer(folder, every_steps=3, **FAST) as checkpointer:
        for step in range(8):
            future = checkpointer.maybe_save(give, step)
            assert (future is not None) == (step in (3, 6))
    assert asked == [3, 6]
    assert checkpointer.steps() == [3, 6]


def test_what_was_restored_is_not_saved_again(folder: Path) -> None:
    filled(folder, [3])
    with Checkpointer(folder, every_steps=3, **FAST) as checkpointer:
        report = checkpointer.restore(state(0))
        assert report is not None
        saved = [step for step in range(report.step, 8) if checkpointer.maybe_save(state(step), step)]
    assert saved == [6]


def test_maybe_save_saves_every_so_many_minutes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("thinpoint.checkpoint.schedule.time.monotonic", lambda: now[0])
    with Checkpointer(folder, every_minutes=2, timeout=None, **FAST) as checkpointer:
        saved = []
        for step in range(10):
            if checkpointer.maybe_save(state(step), step, blocking=True):
                saved.append(step)
            now[0] += 50
    assert saved == [3, 6, 9]


def test_a_module_is_a_state_and_not_a_function_that_gives_one(folder: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with Checkpointer(folder, every_steps=1, **FAST) as checkpointer:
        checkpointer.maybe_save(model, 1)
    assert checkpointer.steps() == [1]
    assert same_bits(checkpointer.load()["weight"], model.weight.detach())


def test_a_closed_checkpointer_saves_no_more(folder: Path) -> None:
    checkpointer = filled(folder, [1])
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        checkpointer.save(state(2), 2)
    assert checkpointer.latest() == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_takes_over_with_a_claim_of_its_own(folder: Path) -> None:
    checkpointer = filled(folder, [1])
    checkpointer.save(state(2), 2)
    pid = os.fork()
    if pid == 0:
        try:
            checkpointer.save(state(3), 3)
            checkpointer.close()
            os._exit(0)
        finally:
            os._exit(1)
    status = None

    def ended() -> bool:
        nonlocal status
        done, status = os.waitpid(pid, os.WNOHANG)
        return bool(done)

    wait_for(ended, "the forked process")
    assert status == 0
    assert checkpointer.steps() == [1, 2, 3]
    with pytest.raises(thinpoint.errors.SupersededError):
        checkpointer.save(state(4), 4)
