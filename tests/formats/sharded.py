"""Checkpoints of two ranks, made once by two processes."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sharded_process import WORLD_SIZE


@functools.cache
def sharded_checkpoints() -> Path:
    """A folder with `stock` (PyTorch DCP) and `thin`, of the same state; only to be read."""
    folder = Path(tempfile.mkdtemp(prefix="thinpoint-sharded-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = Path(__file__).with_name("sharded_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, outputs
    return folder
