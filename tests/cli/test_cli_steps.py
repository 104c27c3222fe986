"""`thinpoint ls`, `gc` and `verify` of a directory of checkpoints."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import NO_TORCH, Run

import thinpoint
from thinpoint.checkpoint import Checkpointer
from thinpoint.checkpoint.names import data_name, new_id
from thinpoint.cli.ls import age_text
from thinpoint.store import open_store

WEEKS_AGO = (1_500_000_000, 1_500_000_000)


def make_checkpoints(folder: str = "ck", steps: tuple[int, ...] = (100, 200, 300)) -> None:
    with Checkpointer(folder) as checkpointer:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            state = {f"w{i}": torch.randn(50, 40, generator=generator) for i in range(6)}
            checkpointer.save(state, step)


def data_file(step: int, folder: str = "ck") -> Path:
    (path,) = Path(folder, f"step-{step:010d}").glob("*.thin")
    return path


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def rows_of(out: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if set(line) == {"-", " "}) + 1
    rows: dict[str, list[str]] = {}
    for line in lines[start:]:
        if not line.startswith(" ") and not line[:1].isdigit() and not line.startswith("-"):
            break
        rows.setdefault(line.split()[0], line.split()) if line.strip() else None
    return rows


def test_ls_shows_every_save_and_its_state(run: Run) -> None:
    make_checkpoints()
    code, out, err = run("ls", "ck")
    assert (code, err) == (0, "")
    titles = ["step", "state", "ranks", "files", "size", "ratio", "age", "save", "id"]
    assert out.splitlines()[0].split() == titles
    rows = rows_of(out)
    assert list(rows)[:3] == ["300", "200", "100"]
    assert all(row[1] == "committed" and row[-1] in str(data_file(int(row[0]))) for row in rows.values())
    assert out.splitlines()[-1].startswith("3 checkpoints, ")

    os.truncate(data_file(200), 300)
    Path("ck/step-0000000100/manifest.json").unlink()
    code, out, _ = run("ls", "ck")
    assert code == 0
    assert [row[1] for row in rows_of(out).values()] == ["committed", "incomplete", "incomplete"]
    assert "1 checkpoint, " in out and "; beside them " in out
    assert "problem: the size of a file is not what the manifest says" in out


def test_ls_prints_json(run: Run) -> None:
    make_checkpoints()
    Path("ck/step-0000000200/manifest.json").write_text("{")
    code, out, _ = run("ls", "ck", "--json")
    report = json.loads(out)
    assert (code, report["format"], report["version"]) == (0, "thinpoint-ls", 1)
    assert set(report) == {"format", "version", "url", "entries"}
    entries = report["entries"]
    assert [entry["step"] for entry in entries if entry["state"] == "committed"] == [300, 100]
    first = entries[0]
    assert set(first) == {
        *("step", "state", "save_id", "num_ranks", "files"),
        *("num_bytes", "raw_bytes", "ratio", "age_s", "problem"),
    }
    assert first["num_bytes"] == sum(os.path.getsize(Path("ck", name)) for name in first["files"])
    assert first["raw_bytes"] == 6 * 50 * 40 * 4
    assert first["ratio"] == pytest.approx(first["raw_bytes"] / first["num_bytes"], abs=1e-3)
    assert first["problem"] is None
    assert any(entry["step"] == 200 and entry["problem"] for entry in entries)


@pytest.mark.parametrize("deep", [False, True])
def test_verify_checks_every_step_of_a_directory(run: Run, deep: bool) -> None:
    options = ["--deep"] if deep else []
    make_checkpoints()
    code, out, err = run("verify", "ck", *options)
    assert (code, err) == (0, "")
    assert [row[1] for row in rows_of(out).values()] == ["OK"] * 3
    assert all(row[5] == row[6] != "0" for row in rows_of(out).values())
    how = "every bit decoded" if deep else "every stored byte checked"
    assert out.splitlines()[-1] == f"3 checkpoints OK; {how}"

    flip(data_file(200), 1500)
    shutil.copy(data_file(300), data_file(100))
    code, out, err = run("verify", "ck", *options)
    assert (code, err) == (3, "")
    assert {step: row[1] for step, row in rows_of(out).items()} == {"300": "OK", "200": "BAD", "100": "BAD"}
    assert out.count("problem: ") == 2 and str(data_file(200).name) in out
    assert out.count("Do not load this file") == 1
    assert out.splitlines()[-1] == f"1 checkpoint OK, 2 not; {how}"


def test_another_file_of_the_right_size_is_found_by_its_identity(run: Run) -> None:
    make_checkpoints(steps=tuple(range(1, 9)))
    by_size: dict[int, list[int]] = {}
    for step in range(1, 9):
        by_size.setdefault(data_file(step).stat().st_size, []).append(step)
    one, two = next(steps for steps in by_size.values() if len(steps) > 1)[:2]
    shutil.copy(data_file(two), data_file(one))
    code, out, _ = run("verify", "ck")
    assert code == 3 and "is not the one that the manifest names" in out


def test_a_step_without_a_manifest_is_listed_but_no_problem(run: Run) -> None:
    make_checkpoints()
    Path("ck/step-0000000300/manifest.json").unlink()
    code, out, _ = run("verify", "ck")
    assert code == 0
    assert {step: row[1] for step, row in rows_of(out).items()} == {
        "300": "incomplete",
        "200": "OK",
        "100": "OK",
    }
    assert out.splitlines()[-1].startswith("2 checkpoints OK;")


@pytest.mark.parametrize("deep", [False, True])
def test_a_sample_checks_so_many_parts_and_can_be_repeated(run: Run, deep: bool) -> None:
    options = ["--deep"] if deep else []
    make_checkpoints()
    code, out, _ = run("verify", "ck", "--sample", "2", *options)
    assert code == 0
    assert out.startswith("2 parts of each checkpoint, --seed ")
    assert all(row[5:7] == ["6", "2"] for row in rows_of(out).values())
    # A part of six is damaged: some seeds find it, and the same seed always finds the same.
    flip(data_file(200), 1500)
    found = {}
    for seed in range(12):
        codes = {run("verify", "ck", "--sample", "2", "--seed", seed, *options)[0] for _ in range(2)}
        assert len(codes) == 1
        found[seed] = codes.pop()
    assert set(found.values()) == {0, 3}
    assert run("verify", "ck", "--sample", "100", *options)[0] == 3


def test_gc_deletes_what_is_dead_and_nothing_else(run: Run) -> None:
    make_checkpoints()
    assert run("gc", "ck")[:2] == (0, "nothing to delete in ck\n")
    old, young = (Path("ck/step-0000000200") / data_name(new_id(), 0) for _ in range(2))
    trash = Path("ck/trash") / new_id() / data_name(new_id(), 0)
    trash.parent.mkdir(parents=True)
    for path in (old, young, trash):
        shutil.copy(data_file(100), path)
    os.utime(old, WEEKS_AGO)
    before = sorted(Path("ck").rglob("*"))
    code, out, err = run("gc", "ck", "--dry-run")
    assert (code, err) == (0, "")
    assert old.name in out and trash.name in out and young.name not in out
    assert out.splitlines()[-1].startswith("2 files, ") and out.endswith(" would be deleted\n")
    assert sorted(Path("ck").rglob("*")) == before

    code, out, err = run("gc", "ck")
    assert (code, err) == (0, "") and out.endswith(" deleted\n")
    assert not old.exists() and not trash.exists() and young.exists()
    assert run("verify", "ck")[0] == 0
    assert run("gc", "ck", "--dry-run")[1] == "nothing to delete in ck\n"
    os.utime(young, (os.stat(young).st_atime, os.stat(young).st_mtime - 86_400))
    assert young.name in run("gc", "ck", "--older-than", "0.5")[1]
    assert not young.exists()


def test_gc_leaves_what_lies_beside_a_manifest_that_cannot_be_read(run: Run) -> None:
    make_checkpoints()
    Path("ck/step-0000000200/manifest.json").write_text("{")
    os.utime(data_file(200), WEEKS_AGO)
    run("gc", "ck")
    assert data_file(200).exists()


@pytest.mark.parametrize("command", ["ls", "gc", "verify"])
def test_wrong_folders_are_named(run: Run, command: str) -> None:
    thinpoint.save({"w": torch.zeros(10)}, "m.thin")
    torch.save({"w": torch.zeros(10)}, "m.pt")
    code, out, err = run(command, "nowhere")
    assert (code, out) == (6, "") and "no such" in err and "nowhere" in err
    if command == "verify":
        assert run("verify", "m.thin")[0] == 0
        code, out, _ = run("verify", "m.pt")
        assert code == 3 and "BAD  m.pt" in out and "thinpoint compress" in out
    else:
        for name in ("m.thin", "m.pt"):
            code, out, err = run(command, name)
            assert (code, out) == (2, "") and "no folder" in err
    Path("empty").mkdir()
    code, out, err = run(command, "empty")
    expected = {
        "ls": (0, "no checkpoints in empty\n", ""),
        "gc": (0, "nothing to delete in empty\n", ""),
        "verify": (2, "", "error: there is no .thin file to verify\n"),
    }
    assert (code, out, err) == expected[command]


def test_options_that_make_no_sense_are_refused(run: Run) -> None:
    make_checkpoints(steps=(1,))
    thinpoint.save({"w": torch.zeros(10)}, "m.thin")
    for args, message in (
        (["ck", "--seed", "3"], "--seed goes with --sample"),
        (["m.thin", "--sample", "3"], "directories of checkpoints"),
        (["ck", "--sample", "0"], "sample"),
    ):
        code, _, err = run("verify", *args)
        assert code == 2 and message in err


def test_directories_may_be_urls(run: Run) -> None:
    pytest.importorskip("fsspec", reason="thinpoint[fsspec] is not installed")
    make_checkpoints("memory://cli-steps", steps=(5, 6))
    code, out, err = run("ls", "memory://cli-steps")
    assert (code, err) == (0, "") and list(rows_of(out))[:2] == ["6", "5"]
    assert run("verify", "memory://cli-steps")[0] == 0
    store = open_store("memory://cli-steps")
    name = next(file.name for file in store.files("step-0000000005/") if file.name.endswith(".thin"))
    data = bytearray(store.get(name, 1 << 20))
    data[1500] ^= 1
    store.put(name, bytes(data))
    code, out, _ = run("verify", "memory://cli-steps")
    assert code == 3 and rows_of(out)["5"][1] == "BAD"
    assert run("gc", "memory://cli-steps")[0] == 0
    code, _, err = run("verify", "memory://cli-nothing")
    assert code == 2 and "no checkpoint to verify" in err


def test_directories_need_no_torch(tmp_path: Path) -> None:
    make_checkpoints(str(tmp_path / "ck"))
    for args in (
        ["ls", "ck"],
        ["gc", "ck", "--dry-run"],
        ["verify", "ck"],
        ["verify", "ck", "--deep", "--sample", "2"],
    ):
        done = subprocess.run(
            [*NO_TORCH, *args], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout


def test_ages_are_for_people() -> None:
    ages: list[tuple[Any, str]] = [
        (0.4, "0 s"),
        (59, "59 s"),
        (90, "1.5 min"),
        (7200, "2.0 h"),
        (864_000, "10.0 days"),
    ]
    assert [age_text(seconds) for seconds, _ in ages] == [text for _, text in ages]
