"""Manifests and claims that are damaged, or made to cause harm; and what a listing says of a directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import FAST, data_files, flip_a_bit, state

from thinpoint.checkpoint import Checkpointer
from thinpoint.checkpoint.catalog import entries
from thinpoint.checkpoint.leftovers import dead
from thinpoint.checkpoint.names import data_name, manifest_name, new_id, step_folder, step_of
from thinpoint.errors import (
    CheckpointError,
    LimitExceededError,
    MalformedFileError,
    NotFoundError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from thinpoint.folder.manifest import MAX_MANIFEST_BYTES, dump_manifest, parse_manifest
from thinpoint.store import LocalStore

Manifest = dict[str, Any]
Change = Callable[[Manifest], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run", **FAST) as checkpointer:
        checkpointer.save(state(1), 1)
        checkpointer.save(state(2), 2)
    return tmp_path / "run"


def set_key(**values: Any) -> Change:
    return lambda manifest: manifest.update(values)


def set_in_file(**values: Any) -> Change:
    return lambda manifest: manifest["files"][0].update(values)


HOSTILE: dict[str, tuple[type[Exception], Change]] = {
    "step of another folder": (MalformedFileError, set_key(step=1)),
    "step is a text": (MalformedFileError, set_key(step="2")),
    "step is a bool": (MalformedFileError, set_key(step=True)),
    "step is huge": (LimitExceededError, set_key(step=10**19)),
    "no version": (MalformedFileError, lambda m: m.pop("manifest")),
    "version is a text": (MalformedFileError, set_key(manifest="1")),
    "no files": (MalformedFileError, set_key(files=[])),
    "files is an object": (MalformedFileError, set_key(files={})),
    "a file is a text": (MalformedFileError, set_key(files=["x"])),
    "a file twice": (MalformedFileError, lambda m: m["files"].append(dict(m["files"][0]))),
    "too many files": (LimitExceededError, lambda m: m.update(files=m["files"] * 70_000)),
    "a path up": (MalformedFileError, lambda m: set_in_file(name="../" + m["files"][0]["name"])(m)),
    "a path up and down": (MalformedFileError, set_in_file(name="../step-0000000001/manifest.json")),
    "an absolute path": (MalformedFileError, set_in_file(name="/etc/passwd")),
    "a zero byte": (MalformedFileError, lambda m: set_in_file(name=m["files"][0]["name"] + "\0")(m)),
    "a digit that is none of ASCII": (
        MalformedFileError,
        lambda m: set_in_file(name=m["save_id"] + "-rank0000\u0660.thin")(m),
    ),
    "a file of another save": (MalformedFileError, set_in_file(name=data_name(new_id(), 0))),
    "a name without end": (LimitExceededError, set_in_file(name="x" * 5000)),
    "bytes below zero": (MalformedFileError, set_in_file(bytes=-1)),
    "bytes beyond 64 bits": (LimitExceededError, set_in_file(bytes=2**64 - 1)),
    "bytes that are not there": (TruncatedFileError, set_in_file(bytes=2**62)),
    "a digest that is none": (MalformedFileError, set_in_file(file_id="z" * 16)),
    "a digest that is a number": (MalformedFileError, set_in_file(digest=7)),
    "an id that is none": (MalformedFileError, set_key(save_id="../x")),
    "time is a text": (MalformedFileError, set_key(time_s="now")),
    "time beyond all": (MalformedFileError, set_key(time_s=1e300)),
    "roles is a list": (MalformedFileError, set_key(roles=[1])),
    "a role without bytes": (MalformedFileError, set_key(roles={"weight": {}})),
    "metadata is a list": (MalformedFileError, set_key(metadata=[])),
    "versions of numbers": (MalformedFileError, set_key(versions={"thinpoint": 1})),
    "trainable is a number": (MalformedFileError, set_key(trainable=3)),
    "a file that is gone": (
        NotFoundError,
        lambda m: set_in_file(name=m["files"][0]["name"].replace("00000.thin", "00001.thin"))(m),
    ),
}

RAW: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe{}",
    "a list": b"[]",
    "a number": b"1",
    "a key twice": b'{"manifest": 1, "manifest": 1}',
    "NaN": b'{"manifest": NaN}',
    "an integer without end": b'{"manifest": ' + b"9" * 100_000 + b"}",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a .thin file": b"\x89THIN\r\n\x1a" + bytes(100),
}


def assert_only_step_1_counts(folder: Path, error: type[Exception]) -> None:
    checkpointer = Checkpointer(folder, **FAST)
    assert checkpointer.steps() == [1]
    assert checkpointer.latest() == 1
    target = state(0)
    report = checkpointer.restore(target)
    assert report is not None and report.step == target["step"] == 1
    assert [skipped.step for skipped in report.skipped] == [2]
    listed = entries(LocalStore(str(folder)))
    states = {(entry.step, entry.state, type(entry.error)) for entry in listed if entry.error is not None}
    assert states == {(2, "incomplete", error)}
    assert (1, "committed") in {(entry.step, entry.state) for entry in listed}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_lies_does_not_count(folder: Path, name: str) -> None:
    error, change = HOSTILE[name]
    path = folder / manifest_name(2)
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert_only_step_1_counts(folder, error)


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_manifest_does_not_count(folder: Path, name: str) -> None:
    (folder / manifest_name(2)).write_bytes(RAW[name])
    assert_only_step_1_counts(folder, MalformedFileError)


def test_a_huge_manifest_is_not_read(folder: Path) -> None:
    path = folder / manifest_name(2)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    begin = time.monotonic()
    assert_only_step_1_counts(folder, LimitExceededError)
    assert time.monotonic() - begin < 20


def test_a_manifest_as_large_as_allowed_is_read_in_bounded_time(folder: Path) -> None:
    path = folder / manifest_name(2)
    path.write_bytes(b'{"a": [' + b"1," * (MAX_MANIFEST_BYTES // 2 - 10) + b"1]}")
    assert Checkpointer(folder, **FAST).steps() == [1]


def test_a_manifest_of_a_newer_version_is_no_reason_to_fall_back(folder: Path) -> None:
    path = folder / manifest_name(2)
    path.write_text(json.dumps({"manifest": 2, "parts": "of a kind that nobody knows yet"}))
    with pytest.raises(UnsupportedVersionError, match="Install a newer thinpoint"):
        Checkpointer(folder, **FAST).restore(state(0))
    assert Checkpointer(folder, **FAST).steps() == [1]


def test_manifests_that_are_all_damaged_are_no_empty_folder(folder: Path) -> None:
    for step in (1, 2):
        (folder / manifest_name(step)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints is intact"):
        Checkpointer(folder, **FAST).restore(state(0))


def test_a_manifest_is_a_folder(folder: Path) -> None:
    (folder / manifest_name(2)).unlink()
    (folder / manifest_name(2)).mkdir()
    assert Checkpointer(folder, **FAST).steps() == [1]


def test_every_cut_of_a_manifest_is_found(folder: Path) -> None:
    raw = (folder / manifest_name(2)).read_bytes()
    for end in range(len(raw) - 1):
        with pytest.raises(MalformedFileError):
            parse_manifest(raw[:end], where="cut", step=2)
    assert dump_manifest(parse_manifest(raw, where="whole", step=2)) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b'{"run_id": "x"}',
        b"x" * (1 << 20),
    ],
)
def test_a_damaged_claim_is_left_out(folder: Path, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "runs" / f"{new_id()}.json").write_bytes(raw)
    with Checkpointer(folder, **FAST) as checkpointer:
        checkpointer.save(state(3), 3)
    assert checkpointer.steps() == [1, 2, 3]
    assert "a run's file is damaged" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-00000000001",
        "step-\u0660000000001",
        "step--000000001",
        "step-0000000001x",
        "Step-0000000001",
    ],
)
def test_other_folders_are_no_steps(folder: Path, name: str) -> None:
    assert step_of(name) is None
    (folder / name).mkdir()
    (folder / name / "manifest.json").write_bytes((folder / manifest_name(2)).read_bytes())
    assert Checkpointer(folder, **FAST).steps() == [1, 2]


def test_a_step_of_more_digits_keeps_its_name() -> None:
    for step in (0, 9_999_999_999, 10**10, 10**18):
        assert step_of(step_folder(step)) == step


def test_a_link_to_elsewhere_is_not_followed_by_a_clean_up(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = outside / data_name(new_id(), 0)
    precious.write_text("precious")
    os.utime(precious, (0, 0))
    (folder / "step-0000000009").symlink_to(outside)
    (folder / "trash").symlink_to(outside)
    with Checkpointer(folder, orphan_age=1, **FAST) as checkpointer:
        checkpointer.save(state(3), 3)
    assert precious.read_text() == "precious"


# ---- the listing ----------------------------------------------------------------------------------------------------


def test_a_listing_says_what_every_file_is(folder: Path) -> None:
    store = LocalStore(str(folder))
    orphan = folder / step_folder(2) / data_name(new_id(), 0)
    orphan.write_bytes(b"x" * 50)
    given_up = folder / step_folder(3) / data_name(new_id(), 0)
    given_up.parent.mkdir()
    given_up.write_bytes(b"x" * 70)
    os.rename(folder / step_folder(1), folder / "one")
    (folder / "trash").mkdir()
    os.rename(folder / "one", folder / "trash" / new_id())
    listed = entries(store, now=time.time() + 100)
    assert [(e.step, e.state, e.error) for e in listed] == [
        (3, "incomplete", None),
        (2, "committed", None),
        (2, "incomplete", None),
        (1, "trash", None),
    ]
    assert [e.num_bytes for e in listed[::2]] == [70, 50]
    committed = listed[1]
    assert committed.raw_bytes == 12_000
    assert committed.num_bytes == sum(os.path.getsize(folder / name) for name in committed.files)
    assert committed.save_id is not None and committed.save_id in committed.files[0]
    assert all(100 <= e.age_s < 200 for e in listed)


def test_a_listing_does_not_read_data(folder: Path) -> None:
    flip_a_bit(data_files(folder, 2)[0])
    assert [e.state for e in entries(LocalStore(str(folder)))] == ["committed", "committed"]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "none"))
    assert entries(store) == []
    assert dead(store) == []
