"""The benchmark of sharded checkpoints runs from its command line on CPU ranks, and its table shows what it measured."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.gpu.sharded_cases import CASES, summary
from bench.gpu.tables import render

ROOT = Path(__file__).resolve().parents[2]

Row = dict[str, Any]


def run(out: Path, *arguments: str) -> Row:
    """The record that a run of two ranks writes."""
    command = [sys.executable, "-m", "bench.gpu.sharded", "--out", str(out), "--device", "cpu", "--tiny"]
    command += ["--ram-dir", str(out), "--disk-dir", str(out), *arguments]
    environment = {**os.environ, "THINPOINT_COMMIT": "0123456789ab"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(out.glob("gpu-sharded-*.json")).read_text())


@pytest.mark.slow
def test_every_way_to_save_is_measured_and_exact(tmp_path: Path) -> None:
    record = run(tmp_path)
    assert record["state"]["num_ranks"] == 2
    for place, with_loads in (("RAM disk", True), ("disk", False)):
        rows = {row["name"]: row for row in record["places"][place]["rows"]}
        assert list(rows) == list(CASES)
        for row in rows.values():
            assert "error" not in row, row
            assert 0 < row["stall"]["median"] <= row["durable"]["median"]
            assert (row["load"] is not None) == (row["load_by_one"] is not None) == with_loads
            assert (row["steps_meanwhile"] is not None) == ("async" in row["name"])
            assert (row["cost"] == row["stall"]) == ("async" not in row["name"])
        assert rows["dcp.save, ThinWriter"]["stored_bytes"] < rows["dcp.save, 8 threads"]["stored_bytes"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == []


@pytest.mark.slow
def test_what_would_begin_too_late_is_left_out(tmp_path: Path) -> None:
    record = run(tmp_path, "--max-s", "0")
    assert record["skipped"][:1] == ["RAM disk: dcp.save, 8 threads"]
    assert len(record["skipped"]) == 2 * len(CASES)


def rank_row(**changes: Any) -> Row:
    """What a rank measures."""
    row = {
        "stall": [9.0, 1.0, 2.0, 3.0],
        "durable": [9.5, 4.0, 5.0, 6.0],
        "alone": [0.1],
        "meanwhile": [[], [], [], []],
        "wrong": [],
        "host_mib": 10.0,
        "machine_mib": 30.0,
        "stored_bytes": 2_000_000_000,
        "load": [0.5],
        "load_by_one": [0.7],
    }
    return row | changes


def test_the_slowest_rank_counts_and_the_first_save_stands_apart() -> None:
    other = rank_row(stall=[8.0, 1.5, 1.5, 1.5], host_mib=20.0, load=[0.6])
    del other["load_by_one"]
    row = summary([rank_row(), other], raw_bytes=3_000_000_000)
    assert row["stall"] == {"median": 2.0, "least": 1.5, "greatest": 3.0}
    assert row["first"] == {"stall": 9.0, "durable": 9.5}
    assert (row["load"]["median"], row["load_by_one"]["median"]) == (0.6, 0.7)
    assert (row["host_mib"], row["steps_meanwhile"]) == (20.0, None)


def test_a_save_costs_its_stall_and_what_steps_take_longer_until_it_is_durable() -> None:
    meanwhile = [[0.9], [0.1, 0.2], [0.3], []]
    # In the third save the other rank's step takes longer.
    other = rank_row(meanwhile=[[0.9], [0.1, 0.1], [0.5], []])
    row = summary([rank_row(meanwhile=meanwhile), other], raw_bytes=1)
    assert row["cost"]["least"] == pytest.approx(1.0 + 0.3 - 2 * 0.1)
    assert row["cost"]["median"] == pytest.approx(2.0 + 0.5 - 0.1)
    assert row["cost"]["greatest"] == pytest.approx(3.0)
    assert row["steps_meanwhile"]["greatest"] == 0.9


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"error": "OSError: full"}, "rank 1: OSError: full"),
        (rank_row(wrong=["load"]), "not exact: rank 1, load"),
    ],
)
def test_what_fails_on_one_rank_has_no_numbers(bad: Row, message: str) -> None:
    assert summary([rank_row(), bad], raw_bytes=1) == {"error": message}


def test_the_table_shows_the_medians_and_what_failed() -> None:
    good = {"name": "dcp.save, ThinWriter", **summary([rank_row()], raw_bytes=3_000_000_000)}
    bad = {"name": "dcp.save, ZStandard", "error": "no zstd"}
    machine: Row = {"cpu": "a CPU", "num_cores": 2, "python": "3.11", "packages": {}, "gpu": None}
    record: Row = {
        "kind": "gpu-sharded",
        "date": "2026-11-30",
        "commit": "abc",
        "machine": machine,
        "state": {"num_ranks": 2, "num_parameters": 1000},
        "places": {"RAM disk": {"filesystem": "tmpfs", "rows": [good, bad]}},
    }
    text = render([copy.deepcopy(record)])
    assert (
        "| dcp.save, ThinWriter | 2.00 | 1.500x | 2,000 | 2,000 | 5,000 | 9,000 | 100.0 | 10 | 30 | 500 | 700 |"
        in text
    )
    assert "- dcp.save, ZStandard: no zstd" in text
