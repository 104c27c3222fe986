"""The benchmark of many ranks' plans runs from its command line, with fewer ranks than it is for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_plans_of_many_ranks_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "bench/dcp_plan.py", "--ranks", "64", "--items", "100", "--repeats", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", str(out)],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    stock, thin = found["rows"]["FileSystemWriter"], found["rows"]["ThinWriter"]
    for row in (stock, thin):
        for step in ("prepare_local_plan", "prepare_global_plan", "finish", "read_metadata"):
            assert row[step]["seconds"] > 0
    ours = thin["file_bytes"]
    assert ours["layout"] + ours["manifest.json"] < stock["file_bytes"][".metadata"]
    assert thin["results_message_bytes"] < stock["results_message_bytes"]
