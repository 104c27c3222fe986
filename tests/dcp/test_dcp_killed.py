"""A rank that is killed in the midst of a plain `dcp.save` ends it on the other, and the checkpoint before stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dcp_single import load

from thinpoint.dcp import ThinFolder

SCRIPT = Path(__file__).with_name("ranks_killed.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "victim"), [("plan", 1), ("write", 1), ("written", 1), ("write", 0), ("manifest", 0)]
)
def test_the_checkpoint_before_stays(tmp_path: Path, point: str, victim: int) -> None:
    begin = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), point, str(victim), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes[victim] == -signal.SIGKILL, told
    assert codes[1 - victim] == 3, told
    assert told[1 - victim][0].startswith("2 "), "the second save has failed, not the first"
    assert time.monotonic() - begin < 50, "before the group's timeout"
    with ThinFolder(tmp_path / "checkpoint") as folder:
        folder.verify(deep=True)
    target = {"w": torch.zeros(1000), "n": 0}
    load(target, tmp_path / "checkpoint")
    assert target["n"] == 1
    assert target["w"].tolist() == [1.0] * 1000
