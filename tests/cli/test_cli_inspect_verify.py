"""`thinpoint inspect`, `verify` and `doctor`, and what the command line costs and needs."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import NO_TORCH, Run

import thinpoint
from thinpoint.cli import diagnosis
from thinpoint.cli.contents import tensor_rows
from thinpoint.cli.reporting import printable, shorten_middle, size_text
from thinpoint.cli.tables import Column, table_lines
from thinpoint.file.index import Index, PartEntry, StorageEntry, TensorEntry

MAIN = [sys.executable, "-m", "thinpoint"]


def make_file(path: str = "m.thin") -> None:
    weight = torch.randn(200, 100, generator=torch.Generator().manual_seed(5))
    thinpoint.save(
        {
            "model": {
                "w": weight,
                "tied": weight,
                "row": weight[3],
                "half": torch.ones(3000, dtype=torch.bfloat16),
            },
            "optimizer": {
                "state": {0: {"exp_avg": weight * 0.1, "exp_avg_sq": weight**2, "step": torch.tensor(1.0)}},
                "param_groups": [],
            },
            "sparse": torch.eye(300).to_sparse(),
            "history": np.arange(10_000),
            "empty": torch.empty(0, 3),
        },
        path,
    )


def test_inspect_shows_tensors_roles_and_totals(run: Run) -> None:
    make_file()
    code, out, err = run("inspect", "m.thin")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "chain", "stored", "ratio", "bits"]
    tied = next(line for line in lines if line.startswith("model.tied"))
    assert "shared: model.w" in tied
    assert "200x100" in tied
    assert any(line.startswith("second_moment") for line in lines)
    assert any(line.startswith("made from   thinpoint.save") for line in lines)
    assert "\x1b" not in out
    assert run("inspect", "m.thin", "--no-tensors", "--no-roles")[1].startswith("file        m.thin")


def test_inspects_json_adds_up(run: Run) -> None:
    make_file()
    report = json.loads(run("inspect", "m.thin", "--json")[1])
    assert set(report) == {
        *(
            "format",
            "version",
            "path",
            "file_bytes",
            "file_id",
            "raw_bytes",
            "stored_bytes",
            "index_bytes",
            "ratio",
        ),
        *(
            "origin",
            "reader_version",
            "writer",
            "required",
            "optional",
            "codecs",
            "needs",
            "num_storages",
            "num_parts",
            "roles",
        ),
        *("no_tensor", "tensors"),
    }
    assert (report["format"], report["version"]) == ("thinpoint-inspect", 1)
    assert report["file_bytes"] == os.path.getsize("m.thin")
    tensors = {t["name"]: t for t in report["tensors"]}
    assert set(tensors["model.w"]) == {
        *("name", "path", "dtype", "shape", "stride", "device", "role", "chains", "num_values", "raw_bytes"),
        *("stored_bytes", "ratio", "bits_per_value", "shared_with"),
    }
    stored = sum(t["stored_bytes"] for t in report["tensors"]) + report["no_tensor"]["stored_bytes"]
    assert stored == report["stored_bytes"] == sum(role["stored_bytes"] for role in report["roles"])
    assert report["raw_bytes"] == sum(role["raw_bytes"] for role in report["roles"])
    assert report["no_tensor"]["raw_bytes"] == 80_000
    assert tensors["model.w"]["shared_with"] is None
    assert tensors["model.row"]["shared_with"] == "model.w"
    assert tensors["model.row"]["stored_bytes"] == 0
    assert tensors["model.w"]["bits_per_value"] == pytest.approx(
        8 * tensors["model.w"]["stored_bytes"] / 20_000, abs=1e-3
    )
    assert tensors["optimizer.state.0.exp_avg_sq"]["role"] == "second_moment"
    assert tensors["optimizer.state.0.exp_avg_sq"]["path"] == ["optimizer", "state", 0, "exp_avg_sq"]
    # Indices and values of a sparse tensor are charged to it.
    assert tensors["sparse"]["stored_bytes"] > 0
    assert tensors["empty"]["bits_per_value"] is None


def flip(path: str, *positions: int) -> None:
    data = bytearray(Path(path).read_bytes())
    for position in positions:
        data[position] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("deep", [False, True])
def test_verify_says_ok_or_lists_every_problem(run: Run, deep: bool) -> None:
    options = ["--deep"] if deep else []
    Path("sub").mkdir()
    make_file("a.thin")
    make_file("sub/b.thin")
    Path("sub/other.txt").write_text("x")
    code, out, err = run("verify", ".", *options)
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["OK", "a.thin"],
        ["OK", "sub/b.thin"],
        ["2", "files"],
    ]
    size = os.path.getsize("sub/b.thin")
    flip("sub/b.thin", 3000, size // 2)
    Path("cut.thin").write_bytes(Path("a.thin").read_bytes()[:-1])
    code, out, err = run("verify", "a.thin", "sub", "cut.thin", *options)
    assert (code, err) == (3, "")
    assert "BAD  sub/b.thin  2 problems" in out
    assert out.count("problem: ") == 3
    for word in ("tensor ", "at byte ", "expected ", "found ", "cut off"):
        assert word in out
    assert out.splitlines()[-1] == "1 file OK, 2 not"


def test_inspect_and_verify_need_no_torch(tmp_path: Path) -> None:
    make_file(str(tmp_path / "m.thin"))
    for args in (
        ["inspect", "m.thin"],
        ["inspect", "m.thin", "--json"],
        ["verify", "m.thin"],
        ["verify", "--deep", "m.thin"],
    ):
        done = subprocess.run(
            [*NO_TORCH, *args], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
    done = subprocess.run(
        [*NO_TORCH, "doctor"], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0
    done = subprocess.run(
        [*NO_TORCH, "decompress", "m.thin", "--to", "pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 4
    assert "thinpoint[torch]" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.thin"]


def test_safetensors_files_need_no_torch_either(tmp_path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"a": torch.randn(500)}, tmp_path / "m.safetensors")
    for args in (
        ["compress", "m.safetensors", "--verify"],
        ["decompress", "m.safetensors.thin", "-o", "back.safetensors"],
    ):
        done = subprocess.run(
            [*NO_TORCH, *args], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from thinpoint.cli.main import app\n"
        "for args in (['--help'], ['compress', '--help'], ['--version']):\n"
        "    try:\n"
        "        app(args)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'torch', 'numba', 'numpy', 'zstandard'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == "[]"
    for word in (
        "compress",
        "decompress",
        "inspect",
        "verify",
        "doctor",
        "Exit codes",
        thinpoint.__version__,
    ):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    state = {f"tensor.{i}": torch.tensor(float(i)) for i in range(4000)}
    thinpoint.save(state, tmp_path / "m.thin")
    process = subprocess.Popen(
        [*MAIN, "inspect", "m.thin"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("tensor")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 0


def test_doctor_finds_working_backends_and_no_names_of_this_machine(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    report = json.loads(out)
    assert set(report) == {
        "format",
        "version",
        "versions",
        "machine",
        "backends",
        "chosen",
        "environment",
        "folder",
    }
    assert report["chosen"]["cpu"] == "cpu" and report["chosen"]["problem"] is None
    triton = report["backends"]["triton"]
    if report["machine"]["gpus"]:
        assert triton["reason"] or triton["self_test"] == diagnosis.PASSED
    else:
        assert triton["reason"] and triton["self_test"] is None and report["chosen"]["gpu"] is None
    assert report["backends"]["reference"] == {"reason": None, "self_test": diagnosis.PASSED}
    assert report["backends"]["cpu"] == {"reason": None, "self_test": diagnosis.PASSED}
    assert report["versions"]["thinpoint"] == thinpoint.__version__
    assert report["folder"]["problem"] is None and report["folder"]["fsync_ms"] >= 0
    assert not list(Path().iterdir())
    code, out, _ = run("doctor", "--bundle", "b.json")
    assert code == 0
    assert set(json.loads(Path("b.json").read_text())) == set(report)
    for secret in (platform.node(), str(Path().resolve()), os.path.expanduser("~") + "/"):
        assert secret not in Path("b.json").read_text()
    assert run("doctor", "--bundle", "b.json")[0] == 6


def test_doctor_reports_settings_that_are_not_valid_and_wrong_backends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINPOINT_CODEC", "lzma")
    monkeypatch.setenv("THINPOINT_THREADS", "many")
    monkeypatch.setenv("THINPOINT_BACKEND", "tpu")
    monkeypatch.setattr(
        diagnosis, "availability", lambda: {"reference": None, "cpu": "No module named 'numba'"}
    )
    code, out, _ = run("doctor")
    assert code == 0
    assert "lzma  NOT VALID: expected thin or zstd or raw" in out
    assert "tpu  NOT VALID: expected auto or triton" in out
    assert "chosen     none: unknown backend 'tpu'" in out
    assert "many  NOT VALID: expected a whole number of at least 1" in out
    assert "does not work here: No module named 'numba'" in out
    monkeypatch.setattr(diagnosis, "availability", lambda: {"reference": None, "cpu": None})
    results = iter([b"1", b"2", b"1", b"3"])
    monkeypatch.setattr(diagnosis, "_encode_decode", lambda backend, dtype: next(results))
    code, out, err = run("doctor")
    assert code == 8
    assert "other bytes than the reference" in out
    assert "self-test of cpu failed" in err


def test_text_from_a_file_cannot_drive_the_terminal() -> None:
    assert printable("plain ü") == "plain ü"
    assert printable("a\x1b[2Jb\n\ud800") == "a\\x1b[2Jb\\n\\ud800"


def test_names_are_shortened_in_the_middle_only_where_width_asks_for_it() -> None:
    name = "model.layers.17.self_attn.q_proj.weight"
    assert shorten_middle(name, 100) == name
    short = shorten_middle(name, 20)
    assert len(short) == 20 and short.startswith("model") and short.endswith("weight")
    columns = [Column(title="name", is_number=False, min_width=12), Column(title="size")]
    assert table_lines(columns, [[name, "1"]], width=None)[2] == f"{name}     1"
    lines = table_lines(columns, [[name, "1"], ["total", "1"]], width=30, num_totals=1)
    assert max(map(len, lines)) == 30
    assert lines[1] == lines[3] and set(lines[1]) <= {"-", " "}


def test_sizes_are_decimal() -> None:
    sizes = [0, 999, 1000, 41_386_419, 999_960_000, 4 * 10**12, 5 * 10**16]
    assert [size_text(n) for n in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "41.4 MB",
        "1.0 GB",
        "4.0 TB",
        "50000.0 TB",
    ]


def test_parts_are_charged_once_and_in_time_whatever_the_index_claims() -> None:
    num_parts, num_views = 20_000, 20_000
    parts = tuple(
        PartEntry(
            storage=0,
            start=8 * i,
            elems=8,
            word_bytes=1,
            dtype="uint8",
            role="other",
            codec=0,
            chain="raw",
            offset=0,
            head_bytes=8,
            body_bytes=8,
            raw_digest=0,
            head_digest=0,
        )
        for i in range(num_parts)
    )
    whole = TensorEntry(storage=0, dtype="uint8", shape=(8 * num_parts,), stride=(1,), offset=0)
    middle = TensorEntry(storage=0, dtype="uint8", shape=(16,), stride=(1,), offset=20)
    # Every view names one record that names all others, itself among them.
    hub = num_views + 1
    views = [
        TensorEntry(**{**vars(whole), "extra": {"inner": {"hub": hub, "self": i}}})
        for i in range(1, num_views + 1)
    ]
    everything = TensorEntry(
        storage=None,
        dtype="uint8",
        shape=(3,),
        stride=(),
        offset=0,
        extra={"inner": {str(i): i for i in range(hub + 1)}},
    )
    tensors = (middle, *views, everything)
    tree = {"dict": [item for i in range(len(tensors)) for item in (f"t{i}", {"tensor": i})]}
    rows = tensor_rows(
        Index(
            writer={},
            required=(),
            optional=(),
            meta={},
            storages=(StorageEntry(bytes=8 * num_parts, device="cpu"),),
            parts=parts,
            tensors=tensors,
            tree=tree,
        )
    )
    assert [(row.coded_raw_bytes, row.shared_with) for row in rows[:3]] == [
        (24, None),
        (8 * num_parts - 24, ("t0",)),
        (0, ("t1",)),
    ]
    assert sum(row.stored_bytes for row in rows) == 16 * num_parts
