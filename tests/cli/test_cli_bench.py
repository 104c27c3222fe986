"""`thinpoint bench`."""

import json
import subprocess
from pathlib import Path

import pytest
from cli_support import NO_TORCH, Run

FAST = ("--scale", "tiny", "--device", "cpu", "--out", "out")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_all_proofs_run_on_a_cpu(run: Run) -> None:
    code, out, err = run("bench", *FAST, "--rounds", 1, "--steps", 24, "--kills", 2)
    assert code == 0, err
    records = {path.stem: json.loads(path.read_text()) for path in Path("out").glob("*.json")}
    assert set(records) == {"rates", "step", "restore", "resume"}
    assert all(Path(f"out/{piece}.html").stat().st_size for piece in records)
    assert [record["error"] for record in records.values()] == [None] * 4

    resume = records["resume"]["result"]
    assert (resume["verdict"], resume["num_kills"], resume["num_steps"]) == ("identical", 2, 24)
    assert resume["num_restores"] == 2
    for loop in records["step"]["result"]["loops"]:
        assert len(loop["rows"]) == 5
        assert [row for row in loop["rows"] if "error" in row] == []
    ways = [way for row in records["restore"]["result"]["rows"] for way in row["ways"]]
    assert len(ways) == 5 * 3 + 4
    assert [way for way in ways if "error" in way] == []
    assert "identical" in out
    # No checkpoint and no run is left behind.
    left = {path.name for path in Path("out").iterdir() if path.suffix not in (".json", ".html", ".png")}
    assert left == set()

    code, out, _ = run("bench", "--compare", "out/resume.json", "out/resume.json")
    assert code == 0
    assert "Nothing but the moment." in out
    code, out, _ = run("bench", "--draw", "out")
    assert code == 0
    assert "out/resume.html" in out


def test_what_begins_too_late_is_left_out_and_named(run: Run) -> None:
    code, out, _ = run("bench", *FAST, "--max-s", 0)
    assert code == 0
    for piece in ("rates", "step", "restore", "resume"):
        record = json.loads(Path(f"out/{piece}.json").read_text())
        assert record["result"] in ({}, {"every_s": 900.0, "share": 0.01, "num_saves": 3, "loops": []})
        assert record["skipped"]
        assert record["skipped"][0] in out


def test_a_record_says_what_was_measured_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_COMMIT", "abc123")
    code, out, _ = run("bench", *FAST, "--only", "rates")
    assert code == 0
    record = json.loads(Path("out/rates.json").read_text())
    assert (record["format"], record["version"], record["piece"]) == ("thinpoint-bench", 1, "rates")
    assert record["commit"] == "abc123"
    assert record["options"]["scale"] == "tiny"
    assert record["machine"]["num_cores"] >= 1
    assert {"encode", "decode", "write", "read"} <= set(record["result"]["gb_per_s"])
    assert "abc123" in out
    assert not Path("out/step.json").exists()


def test_a_piece_that_fails_is_told_and_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_CODEC", "no-such-codec")
    code, _, err = run("bench", *FAST, "--only", "rates")
    assert code == 1
    assert "no-such-codec" in err
    assert "no-such-codec" in json.loads(Path("out/rates.json").read_text())["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scale", "huge"), "no such scale"),
        (("--only", "speed"), "no such piece"),
        (("--device", "abacus"), "no such device"),
        (("--device", "meta"), "a CPU or a CUDA device"),
        (("--folder", "not-there"), "no such folder"),
        (("--draw", "."), "no result"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run("bench", *arguments)
    assert code == 2
    assert words in err


def test_results_are_compared_without_torch(tmp_path: Path) -> None:
    record = {
        "format": "thinpoint-bench",
        "version": 1,
        "piece": "rates",
        "commit": "a",
        "machine": {},
        "versions": {},
        "options": {},
        "result": {"gb_per_s": {"encode": {"median": 2.0}}},
    }
    (tmp_path / "a.json").write_text(json.dumps(record))
    record["result"]["gb_per_s"]["encode"]["median"] = 3.0  # type: ignore[index]
    (tmp_path / "b.json").write_text(json.dumps(record))
    done = subprocess.run(
        [*NO_TORCH, "bench", "--compare", "a.json", "b.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == ["encode,", "GB/s", "2.00", "3.00", "1.500"]
