"""A sample of `make faults`: the disk breaks at some operation, in some way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_a_sample_of_fault_points_leaves_the_checkpoints_before_intact() -> None:
    script = Path(__file__).parent / "faults.py"
    command = [sys.executable, str(script), "--sample", "40", "--seed", "1", "--processes", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.match(r"40 of [\d,]{5,} fault points", run.stdout), run.stdout
    assert run.stdout.rstrip().endswith("0 wrong")
    # The faults were felt: some processes were killed by them, some saves failed.
    ends = dict(re.findall(r"(\d+) (killed|failed)", run.stdout)[::-1])
    assert len(ends) == 2, run.stdout
