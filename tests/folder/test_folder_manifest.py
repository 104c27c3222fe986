"""Manifests of many ranks; those of a single file are tested with the directories that they lie in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from thinpoint.errors import DamagedFileError, LimitExceededError, MalformedFileError, UsageError
from thinpoint.folder.manifest import FileRecord, LayoutRecord, Manifest, dump_manifest, parse_manifest
from thinpoint.folder.names import (
    data_name,
    layout_name,
    new_id,
    rank_of,
    save_id_in,
    save_id_of,
    save_id_of_layout,
)

IDS = [f"{i:024x}" for i in range(1, 4)]


def manifest_of_ranks() -> Manifest:
    files = [
        FileRecord(name=data_name(save_id, rank), num_bytes=1000 + rank, file_id="a" * 16, digest="b" * 16)
        for rank, save_id in enumerate(IDS)
    ]
    return Manifest(
        step=None,
        save_id=IDS[0],
        run_id=None,
        generation=None,
        time_s=1.0,
        files=tuple(files),
        roles={"weight": (10, 5)},
        trainable=None,
        versions={"thinpoint": "1"},
        world_size=3,
        layout=LayoutRecord(name=layout_name(IDS[0]), num_bytes=77, digest="c" * 16),
    )


def test_a_manifest_comes_back_as_it_was() -> None:
    for manifest in (
        manifest_of_ranks(),
        replace(manifest_of_ranks(), step=7, run_id=IDS[2], generation=3, metadata={"loss": 0.5}),
    ):
        assert parse_manifest(dump_manifest(manifest), where="a test") == manifest


def test_the_training_step_is_asked_for_only_where_there_is_one() -> None:
    assert replace(manifest_of_ranks(), step=7).training_step == 7
    with pytest.raises(UsageError, match="training step"):
        _ = manifest_of_ranks().training_step
    with pytest.raises(MalformedFileError, match="step"):
        parse_manifest(dump_manifest(manifest_of_ranks()), where="a test", step=7)


@pytest.mark.parametrize(
    ("field", "value", "error", "reason"),
    [
        ("world_size", 2, MalformedFileError, "number of files"),
        ("world_size", None, MalformedFileError, "world_size"),
        ("world_size", -1, MalformedFileError, "world_size"),
        ("world_size", 10**9, LimitExceededError, "world_size"),
        ("layout", None, MalformedFileError, "layout"),
        ("layout", [], MalformedFileError, "layout"),
        (
            "layout",
            {"name": layout_name(IDS[1]), "bytes": 1, "digest": "c" * 16},
            MalformedFileError,
            "layout",
        ),
        ("layout", {"name": "../x", "bytes": 1, "digest": "c" * 16}, MalformedFileError, "layout"),
        (
            "layout",
            {"name": layout_name(IDS[0]), "bytes": -1, "digest": "c" * 16},
            MalformedFileError,
            "bytes",
        ),
        ("layout", {"name": layout_name(IDS[0]), "bytes": 1, "digest": "zz"}, MalformedFileError, "digest"),
        ("save_id", IDS[1], MalformedFileError, "layout"),
        ("save_id", "../../etc", MalformedFileError, "save_id"),
        ("run_id", "x", MalformedFileError, "run_id"),
        ("step", -1, MalformedFileError, "step"),
        ("step", "7", MalformedFileError, "step"),
        ("generation", 1.5, MalformedFileError, "generation"),
        ("files", [], MalformedFileError, "files"),
    ],
)
def test_what_contradicts_itself_is_an_error(field: str, value: Any, error: type, reason: str) -> None:
    fields = json.loads(dump_manifest(manifest_of_ranks()))
    fields[field] = value
    with pytest.raises(error) as caught:
        parse_manifest(json.dumps(fields).encode(), where="a test")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "name", [data_name(IDS[1], 2), data_name(IDS[0], 0), "/etc/passwd", "a/" + data_name(IDS[1], 1), ""]
)
def test_the_files_of_ranks_are_in_their_order_and_in_the_folder(name: str) -> None:
    fields = json.loads(dump_manifest(manifest_of_ranks()))
    fields["files"][1]["name"] = name
    with pytest.raises(MalformedFileError, match="file"):
        parse_manifest(json.dumps(fields).encode(), where="a test")


def test_a_manifest_cut_anywhere_is_an_error() -> None:
    raw = dump_manifest(manifest_of_ranks())
    # The line end at the end is none of the object's.
    for size in range(len(raw) - 1):
        with pytest.raises(DamagedFileError):
            parse_manifest(raw[:size], where="a test")


def test_names_say_whose_file_it_is() -> None:
    save_id = new_id()
    assert (save_id_of(data_name(save_id, 12)), rank_of(data_name(save_id, 12))) == (save_id, 12)
    assert save_id_of_layout(layout_name(save_id)) == save_id
    assert save_id_in(f".{layout_name(save_id)}.1-{'0' * 16}.tmp") == save_id
    for name in ("", "x", f"{save_id}-rank1.thin", f"{save_id}-layout.zst.tmp", layout_name("x")):
        assert save_id_of(name) is rank_of(name) is save_id_of_layout(name) is None
