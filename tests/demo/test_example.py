"""The example in the README's words runs, and resumes to the same loss."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_resume.py"


def run_example(folder: Path, steps: int) -> list[str]:
    command = [sys.executable, str(EXAMPLE), str(folder), "--steps", str(steps), "--save-every", "5"]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    ).stdout.splitlines()


def test_the_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    assert run_example(tmp_path / "stopped", 10)[-1].startswith("step 10 ")
    resumed = run_example(tmp_path / "stopped", 20)
    assert resumed[0] == "resumed at step 10"
    assert resumed[1:] == run_example(tmp_path / "whole", 20)[-2:]
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == [
        f"step-{step:06d}.thin" for step in (5, 10, 15, 20)
    ]
