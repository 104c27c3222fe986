"""A sample of what ckpt-chaos does in `make faults`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUM_POINTS = 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ckpt-chaos breaks pathlib before Python 3.11")
@pytest.mark.skipif(importlib.util.find_spec("ckpt_chaos") is None, reason="needs ckpt-chaos")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_run_ends_with_the_same_weights(mode: str) -> None:
    script = Path(__file__).parent / "chaos.py"
    command = [sys.executable, str(script), "--mode", mode, "--max-points", str(NUM_POINTS), "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    # And one that is not killed.
    assert re.search(rf"^PASS: {NUM_POINTS + 1}$", run.stdout, re.M), run.stdout
    assert re.search(r"resumed from step \d", run.stdout), run.stdout
