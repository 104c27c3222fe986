"""`thinpoint advise`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import NO_TORCH, Run

from thinpoint.advisor.published import ROWS


def advice_of(run: Run, *args: object) -> dict[str, Any]:
    code, out, err = run("advise", "--json", *args)
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def costs_of(report: dict[str, Any], codec: str, mode: str = "sync") -> dict[str, Any]:
    (found,) = (costs for costs in report["costs"] if (costs["codec"], costs["mode"]) == (codec, mode))
    return dict(found)


def test_without_options_it_advises_on_the_published_case(run: Run) -> None:
    code, out, err = run("advise")
    assert (code, err) == (0, "")
    assert out.startswith("Use thinpoint: storage is the slowest stage, so a save of 840 GB waits 12")
    for words in ("component", "Codecs, sync", "Modes", "without a codec", "What decides here", "break-even"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 150


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_published_rows_come_from_the_command_line(run: Run, row: Any) -> None:
    codecs = [option for ratio in row.saved for option in ("--add-codec", f"r{ratio}={ratio}")]
    report = advice_of(
        run, "--params", f"{row.params / 1e9:g}b", "--gpus", row.gpus, "--unit", "GiB", *codecs
    )
    none = costs_of(report, "none")
    assert round(none["idle_usd"]) == row.idle_usd and round(none["storage_usd"]) == row.storage_usd
    for ratio, saved in row.saved.items():
        coded = costs_of(report, f"r{ratio}")
        bills = [costs["idle_usd"] + costs["storage_usd"] for costs in (none, coded)]
        assert round(bills[0] - bills[1]) == saved


def test_json_has_what_the_document_says(run: Run) -> None:
    report = advice_of(run)
    keys = Path(__file__).resolve().parents[2].joinpath("docs/advise.md").read_text()
    assert (report["format"], report["version"]) == ("thinpoint-advise", 1)
    for key in report:
        assert f"`{key}`" in keys
    for key in report["costs"][0]:
        assert f"`{key}`" in keys
    assert len(report["costs"]) == 3 * 4
    assert report["measured"] is None and report["sample"] is None
    assert report["inputs"]["codecs"]["none"]["encode_gb_per_s"] is None


def test_options_go_before_the_file(run: Run) -> None:
    Path("case.yaml").write_text(
        "model: {params: 7b, optimizer: lion}\ncluster: {gpus: 16}\nsaves: {mode: async}\n"
    )
    report = advice_of(run, "--case", "case.yaml", "--gpus", "32", "--storage-gb-per-s", "2.5")
    inputs = report["inputs"]
    assert (inputs["model"]["params"], inputs["model"]["optimizer"]) == (7e9, "lion")
    assert (inputs["cluster"]["gpus"], inputs["saves"]["mode"]) == (32, "async")
    assert inputs["storage"]["gb_per_s"] == 2.5


WRONG = [
    (("--optimizer", "adamx"), "model.optimizer is not valid: expected adamw or adam or lion"),
    (("--storage-gb-per-s", "-3"), "storage.gb_per_s is not valid: expected a number above 0, found -3"),
    (("--gpus", "eight"), "cluster.gpus is not valid: expected a whole number of at least 1, found 'eight'"),
    (("--size-gb", "560"), "model.size_gb contradicts the other fields of model: expected 840.0 GB"),
    (("--writers", "100"), "cluster.writers is not valid: expected at most cluster.gpus, 64"),
    (("--mode", "later"), "saves.mode is not valid: expected sync or async or overlap"),
    (("--add-codec", "x"), "--add-codec is not valid: expected NAME=RATIO or NAME=RATIO@GB/S, found 'x'"),
    (("--add-codec", "x=2@fast"), "--add-codec is not valid"),
    (("--case", "typo.yaml"), "storage.gb_per_sec is no field: expected gb_per_s"),
    (("--measure-dir", "x"), "--measure-dir needs --measure"),
    (("--checkpoint", "x.pt", "--params", "7b"), "--params must not be given too"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_input_names_the_field_and_what_is_allowed(run: Run, args: tuple[str, ...], says: str) -> None:
    Path("typo.yaml").write_text("storage: {gb_per_sec: 5}\n")
    code, out, err = run("advise", *args)
    assert (code, out) == (2, "") and err.startswith("error: ") and says in err


def test_a_checkpoint_gives_sizes_and_ratios(run: Run) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(500, 200, generator=generator) for name in ("w", "exp_avg")}
    torch.save(
        {"model": {"w": tensors["w"]}, "optimizer": {"exp_avg": {"w": tensors["exp_avg"] * 1e-3}}}, "c.pt"
    )
    report = advice_of(run, "--checkpoint", "c.pt", "--sample-mb", "1")
    assert {(part["name"], part["precision"], part["raw_bytes"]) for part in report["components"]} == {
        ("weights", "fp32", 400_000),
        ("first_moment", "fp32", 400_000),
    }
    assert report["sample"]["read_bytes"] == 800_000 and report["sample"]["params"] == 100_000
    assert 1.1 < costs_of(report, "thinpoint")["ratio"] < 1.4
    code, out, err = run("advise", "--checkpoint", "c.pt")
    assert (code, err) == (0, "") and "800 kB of c.pt" in out and out.startswith("Do not compress:")
    assert run("advise", "--checkpoint", "none.pt")[0] == 6


def test_measuring_says_what_it_does_and_cleans_up(run: Run) -> None:
    Path("data").mkdir()
    code, out, err = run("advise", "--measure", "--measure-dir", "data", "--measure-mb", "2")
    assert code == 0
    assert (
        err.startswith("measuring: ") and "writes one file of 2.1 MB to data at a time and deletes it" in err
    )
    assert "measured" in out and "storage writes" in out and "thinpoint codes" in out
    assert list(Path("data").iterdir()) == []
    code, out, err = run("advise", "--measure", "--measure-mb", "2", "--json")
    report = json.loads(out)
    assert "writes no files" in err and report["measured"]["write_gb_per_s"] is None
    rate = report["measured"]["codecs"]["thinpoint"]["encode_gb_per_s"]
    assert report["inputs"]["codecs"]["thinpoint"]["encode_gb_per_s"] == pytest.approx(rate)


def test_a_report_is_written_once(run: Run) -> None:
    code, out, err = run("advise", "--report", "out.html")
    assert (code, err) == (0, "") and out.endswith("written: out.html\n")
    page = Path("out.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg ") == 4
    code, _, err = run("advise", "--report", "out.html")
    assert code == 6 and "out.html" in err
    code, out, err = run("advise", "--report", "out.html", "--overwrite", "--json")
    assert (code, err) == (0, "written: out.html\n") and json.loads(out)["best"] == "thinpoint"


def test_it_works_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [*NO_TORCH, "advise", "--report", "r.html"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Use thinpoint")
    done = subprocess.run(
        [*NO_TORCH, "advise", "--measure"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "measuring needs torch" in done.stderr
