"""ckpt-chaos on a training run: it is killed around every file operation, in the middle of writing and by SIGTERM, and run again.

python tests/checkpoint/chaos.py                     # every point, sync and async
python tests/checkpoint/chaos.py --mode sync --max-points 4
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = Path(__file__).parent / "chaos_training.py"
MODES = ("sync", "async")


def run(mode: str, work: Path, max_points: int, num_jobs: int) -> int:
    """The exit code of ckpt-chaos, whose table goes to the terminal: 0 if every run ended with the weights of one never killed.

    Args:
        mode: how the training run saves, one of MODES.
        work: a folder for its runs.
        max_points: of those that there are, evenly drawn.
        num_jobs: runs side by side.
    """
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--jobs", str(num_jobs)]
    command += ["--modes", "before,torn,term", "--step-regex", r"resumed from step (\d+)"]
    command += ["--result-file", "{out}/final.bin", "--max-points", str(max_points)]
    return subprocess.run(
        [*command, "--", sys.executable, str(TRAINING), "{out}", mode], check=False
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--max-points", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        return max(
            run(mode, Path(work) / mode, options.max_points, options.jobs) for mode in options.mode or MODES
        )


if __name__ == "__main__":
    sys.exit(main())
