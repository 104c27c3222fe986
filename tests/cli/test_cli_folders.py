"""`verify`, `inspect`, `ls` and `salvage` of checkpoints of many ranks."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cli_support import NO_TORCH, Run
from sharded import sharded_checkpoints
from sharded_process import full_state

import thinpoint

NUM_RAW_BYTES = sum(tensor.numel() * tensor.element_size() for tensor in full_state().values())


@pytest.fixture
def folder(run: Run) -> Path:
    """A checkpoint of two ranks that may be changed."""
    shutil.copytree(sharded_checkpoints() / "thin", "ck")
    return Path("ck")


def rank_file(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"*-rank{rank:05d}.thin")
    return path


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def as_step(folder: Path, step: int) -> Path:
    """The same as a training step in a directory of checkpoints."""
    target = Path("run") / f"step-{step:010d}"
    shutil.copytree(folder, target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["step"] = step
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


@pytest.mark.parametrize(
    "options", [[], ["--deep"], ["--sample", "3"], ["--deep", "--sample", "3", "--seed", "1"]]
)
def test_verify_accepts_an_intact_folder(run: Run, folder: Path, options: list[str]) -> None:
    code, out, err = run("verify", folder, *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("OK   ") and "2 files" in out


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [[], ["--deep"], ["--sample", "1000"]])
def test_verify_names_rank_and_file_of_damage(run: Run, folder: Path, rank: int, options: list[str]) -> None:
    path = rank_file(folder, rank)
    flip(path, path.stat().st_size // 3)
    code, out, _ = run("verify", folder, *options)
    assert code == 3
    assert out.splitlines()[-2].startswith("BAD  ") and "1 problem" in out
    assert f"problem: rank {rank}: " in out and path.name in out and "tensor" in out


def test_verify_finds_every_file_that_is_wrong(run: Run, folder: Path) -> None:
    os.truncate(rank_file(folder, 0), 5000)
    rank_file(folder, 1).unlink()
    code, out, _ = run("verify", folder)
    assert code == 3 and "2 problems" in out
    assert (
        "rank 0: " in out and "rank 1: " in out and rank_file(sharded_checkpoints() / "thin", 1).name in out
    )


def test_verify_checks_layout_and_manifest(run: Run, folder: Path) -> None:
    (layout,) = folder.glob("*-layout.zst")
    flip(layout, layout.stat().st_size // 2)
    code, out, _ = run("verify", folder)
    assert code == 3 and layout.name in out
    shutil.copy(next((sharded_checkpoints() / "thin").glob("*-layout.zst")), layout)
    assert run("verify", folder)[0] == 0
    (folder / "manifest.json").write_text("{")
    code, out, _ = run("verify", folder)
    assert code == 3 and "manifest" in out


def test_verify_finds_intact_files_that_are_not_those_meant(run: Run, folder: Path) -> None:
    thinpoint.save({"tensors": {}, "objects": {}}, rank_file(folder, 1))
    code, out, _ = run("verify", folder)
    assert code == 3 and "rank 1: the file id is not the one that the manifest names" in out


def test_verify_and_ls_of_a_directory_with_such_steps(run: Run, folder: Path) -> None:
    as_step(folder, 10)
    bad = as_step(folder, 20)
    code, out, err = run("ls", "run")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()[:2] in ("10", "20")}
    assert all(row[1] == "committed" and row[2] == "2" for row in rows.values())
    (entry, _) = json.loads(run("ls", "run", "--json")[1])["entries"]
    assert entry["num_ranks"] == 2 and entry["raw_bytes"] >= NUM_RAW_BYTES - 8
    assert len(entry["files"]) == 5
    assert run("verify", "run")[0] == 0
    flip(rank_file(bad, 1), 3000)
    code, out, _ = run("verify", "run", "--deep")
    assert code == 3 and "1 checkpoint OK, 1 not" in out and "rank 1: " in out
    code, out, err = run("ls", "ck")
    assert code == 2 and "one checkpoint" in err


def test_inspect_shows_tensors_and_files(run: Run, folder: Path) -> None:
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("model.")}
    assert rows["model.rows"][1:5] == ["float32", "300x40", "2x1", "0-1"]
    assert rows["model.columns"][1:5] == ["float32", "60x50", "1x2", "0-1"]
    assert rows["model.uneven"][1:4] == ["bfloat16", "7x3", "2x1"]
    assert rows["model.one"][1:5] == ["float32", "1x4", "whole", "0"]
    assert all(rank_file(folder, rank).name in out for rank in (0, 1))
    assert "5 tensors in " in out and "ranks       2" in out

    report = json.loads(run("inspect", folder, "--json")[1])
    assert (report["format"], report["version"]) == ("thinpoint-inspect-folder", 1)
    assert report["world_size"] == 2 and set(report["objects"]) >= {"step", "groups.0.lr"}
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert tensors["model.rows"]["cut"] == [2, 1] and tensors["model.rows"]["raw_bytes"] == 300 * 40 * 4
    assert sum(tensor["raw_bytes"] for tensor in report["tensors"]) == NUM_RAW_BYTES
    assert sum(tensor["stored_bytes"] for tensor in report["tensors"]) < report["num_bytes"]
    assert [file["rank"] for file in report["files"]] == [0, 1]
    assert sum(file["file_bytes"] for file in report["files"]) == report["num_bytes"]


def test_inspect_takes_the_newest_step_and_single_files(run: Run, folder: Path) -> None:
    as_step(folder, 10)
    assert "step        10" in run("inspect", "run")[1]
    from thinpoint.checkpoint import Checkpointer

    with Checkpointer("single") as checkpointer:
        checkpointer.save({"w": torch.ones(10)}, 5)
    code, out, _ = run("inspect", "single")
    assert code == 0 and "file        " in out and "w " in out
    Path("empty").mkdir()
    code, _, err = run("inspect", "empty")
    assert code == 2 and "without a manifest" in err


def test_salvage_says_which_tensors_are_whole(run: Run, folder: Path) -> None:
    code, out, _ = run("salvage", folder, "-o", "saved")
    assert code == 0 and "5 of 5 tensors whole, 3 of 3 other values left" in out
    path = rank_file(folder, 1)
    with thinpoint.open(path) as opened:
        names = opened.keys()
    assert "tensors.model.rows.150,0" in names
    # Rank 1's half of `rows` is the first part of its file.
    flip(path, 4000)
    code, out, _ = run("salvage", folder, "-o", "saved2")
    assert code == 3
    lines = out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("model.")]
    assert row == ["model.rows", "1", "2", "1"]
    assert lines[-1] == "4 of 5 tensors whole, 3 of 3 other values left"
    saved = thinpoint.load(next(Path("saved2").glob("*.thin")))
    half = full_state()["columns"][:, 25:]
    assert torch.equal(saved["tensors"]["model.columns"]["0,25"], half)

    path.unlink()
    code, out, _ = run("salvage", folder, "-o", "saved3", "--json")
    report = json.loads(out)["checkpoint"]
    assert code == 3 and (report["num_tensors"], report["num_objects"]) == (5, 3)
    lost = {tensor["name"]: tensor for tensor in report["not_whole"]}
    assert lost["model.rows"] == {"name": "model.rows", "lost_chunks": 1, "num_chunks": 2, "ranks": [1]}
    assert "model.one" not in lost


def test_folders_need_no_torch(run: Run, folder: Path, tmp_path: Path) -> None:
    for args in (
        ["verify", "ck"],
        ["verify", "ck", "--deep"],
        ["inspect", "ck"],
        ["salvage", "ck", "-o", "s"],
    ):
        done = subprocess.run(
            [*NO_TORCH, *args], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout


def test_folders_may_be_urls(run: Run, folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="thinpoint[fsspec] is not installed")
    fsspec.filesystem("memory").put("ck", "/folders/ck", recursive=True)
    code, out, _ = run("verify", "memory://folders/ck")
    assert code == 0 and out.startswith("OK   ")
    assert "ranks       2" in run("inspect", "memory://folders/ck")[1]
