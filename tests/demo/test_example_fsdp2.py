"""The FSDP2 example runs under torchrun, resumes bit for bit after an interruption, and differs from stock DCP by three lines."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from thinpoint.dcp.folder import ThinFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"
STOCK_LINE = re.compile(r"^( *)# thinpoint; without it: (.*)\n.*\n", re.MULTILINE)

LAST = 100

Whole = tuple[Path, list[str]]
"""Folder and lines of a run that was not interrupted."""

pytestmark = pytest.mark.slow


@contextmanager
def running(
    script: Path, folder: Path, *arguments: str, num_ranks: int = 2
) -> Iterator["subprocess.Popen[str]"]:
    """The script under torchrun, its output in a pipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(script), str(folder), "--save-every", "4", *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def run(script: Path, folder: Path, *arguments: str, num_ranks: int = 2) -> list[str]:
    """The lines that a run to its end prints about steps."""
    with running(script, folder, *arguments, num_ranks=num_ranks) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    return [line for line in output.splitlines() if "step" in line]


def interrupt(folder: Path, *arguments: str) -> int:
    """Run until some checkpoints are there, and end all ranks wherever they are; the step of the newest checkpoint."""
    with running(EXAMPLE, folder, "--steps", str(LAST), *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 12 "):
                break
        else:
            pytest.fail("the run ended before it was interrupted")
        time.sleep(0.05)
    return int((folder / "latest").read_text().removeprefix("step-"))


def contents(folder: Path, step: int) -> dict[str, Any]:
    """Everything in a checkpoint: tensors as bytes with dtype and shape, objects as they are."""
    with ThinFolder(folder / f"step-{step:06d}") as checkpoint:
        found: dict[str, Any] = {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}
        return found | {name: checkpoint.load_object(name) for name in checkpoint.objects}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(EXAMPLE, folder, "--steps", str(LAST))


@pytest.mark.parametrize("how", [(), ("--background",)], ids=["save", "async_save"])
def test_an_interrupted_run_ends_as_one_that_was_not(
    tmp_path: Path, how: tuple[str, ...], whole: Whole
) -> None:
    newest = interrupt(tmp_path, *how)
    resumed = run(EXAMPLE, tmp_path, "--steps", str(LAST), *how)
    assert resumed[0] == f"resumed at step {newest}"
    assert resumed[1:] == whole[1][newest // 4 :]
    found = contents(tmp_path, LAST)
    assert found == contents(whole[0], LAST)
    assert found["training.step"] == LAST
    assert "training.optimizer.state.head.weight.exp_avg_sq" in found


def test_four_ranks_go_on_where_two_have_ended_and_two_after_them(tmp_path: Path, whole: Whole) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    for num_ranks, last in ((4, LAST + 4), (2, LAST + 8)):
        lines = run(EXAMPLE, folder, "--steps", str(last), num_ranks=num_ranks)
        assert lines[0] == f"resumed at step {last - 4}"
        assert lines[-1].startswith(f"step {last} ")
        with ThinFolder(folder / f"step-{last:06d}") as checkpoint:
            assert checkpoint.world_size == num_ranks


def test_three_lines_differ_from_stock_dcp_and_no_bit(tmp_path: Path, whole: Whole) -> None:
    text = EXAMPLE.read_text()
    assert len(STOCK_LINE.findall(text)) == 3
    stock = STOCK_LINE.sub(
        lambda found: "" if found[2] == "no such line" else f"{found[1]}{found[2]}\n", text
    )
    script = tmp_path / "stock.py"
    script.write_text(stock)
    folder = tmp_path / "stock"
    assert run(script, folder, "--steps", "8") == whole[1][:2]
    assert not list(folder.rglob("*.thin"))
    dcp_to_torch_save(folder / "step-000008", tmp_path / "stock.pt")
    state, _ = flatten_state_dict(torch.load(tmp_path / "stock.pt", weights_only=True))
    expected = {
        key: bits(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
    }
    assert contents(whole[0], 8) == expected
