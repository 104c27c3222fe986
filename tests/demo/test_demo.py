"""A killed run, resumed through thinpoint, ends with the bits of one that was never stopped."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thinpoint
from thinpoint.demo import supervise
from thinpoint.demo.__main__ import QUICK
from thinpoint.demo.compare import differences
from thinpoint.demo.corpus import corpus_bytes
from thinpoint.demo.measure import Contestant, NotExactError, measure
from thinpoint.demo.training import Run, RunConfig, checkpoint_name, load_newest

ROOT = Path(__file__).parents[2]
SMALL = dataclasses.replace(QUICK, num_threads=1, corpus_bytes=100_000)


@pytest.fixture
def deterministic():
    """Gives back torch's global switches, which a `Run` sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def small_run(num_steps: int) -> Run:
    run = Run(SMALL, corpus_bytes(SMALL.corpus_bytes), "cpu")
    for _ in range(num_steps):
        run.train_step()
    return run


@pytest.mark.usefixtures("deterministic")
def test_a_run_resumed_from_a_file_ends_with_the_same_bits(tmp_path: Path) -> None:
    thinpoint.save(small_run(3).state(), tmp_path / checkpoint_name(3))
    resumed = small_run(1)
    state, path, damaged = load_newest(tmp_path)
    assert state is not None
    assert path == tmp_path / checkpoint_name(3)
    assert damaged == []
    resumed.load_state(state)
    resumed.train_step()
    whole = small_run(4)
    assert differences(resumed.state(), whole.state()) == []
    whole.train_step()
    assert differences(resumed.state(), whole.state()) != []


@pytest.mark.usefixtures("deterministic")
def test_a_state_without_its_rng_would_end_differently() -> None:
    """The comparison is worth something: what a checkpoint leaves out shows in the bits."""
    one, other = small_run(2), small_run(2)
    random.random()
    one.train_step()
    other.train_step()
    assert differences(one.state()["model"], other.state()["model"]) != []


@pytest.mark.usefixtures("deterministic")
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = small_run(1)
    thinpoint.save(run.state(), tmp_path / checkpoint_name(1))
    run.train_step()
    newest = tmp_path / checkpoint_name(2)
    thinpoint.save(run.state(), newest)
    stored = bytearray(newest.read_bytes())
    stored[len(stored) // 2] ^= 1
    newest.write_bytes(stored)
    state, path, damaged = load_newest(tmp_path)
    assert path == tmp_path / checkpoint_name(1)
    assert state is not None and state["step"] == 1
    assert [problem.split(":")[0] for problem in damaged] == [newest.name]


@pytest.mark.usefixtures("deterministic")
def test_a_checkpoint_of_another_config_is_refused() -> None:
    run = small_run(1)
    state = run.state()
    state["config"] = dataclasses.replace(SMALL, seed=5)
    with pytest.raises(ValueError, match="another run"):
        run.load_state(state)


def test_the_config_survives_a_command_line() -> None:
    assert RunConfig.loads(SMALL.dumps()) == SMALL


def test_a_training_process_that_fails_is_reported(tmp_path: Path) -> None:
    broken = dataclasses.replace(SMALL, batch=-1)
    with pytest.raises(supervise.TrainingFailedError, match="status 1"):
        list(supervise.follow(tmp_path, broken.dumps()))


def test_measure_refuses_a_contestant_that_is_not_exact(tmp_path: Path) -> None:
    rounded = Contestant(
        name="rounds",
        path=tmp_path / "rounded.pt",
        save=torch.save,
        load=lambda path: {key: value.bfloat16().float() for key, value in torch.load(path).items()},
    )
    with pytest.raises(NotExactError, match="rounds"):
        measure({"w": torch.tensor([1.0001])}, [rounded], num_rounds=1)


def test_the_demo_ends_bit_identical_and_says_so_in_80_columns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinpoint.demo", "--quick", "--seed", "7", "--dir", str(tmp_path / "run")],
        check=False,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 2
    assert "resumes from step-" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Bit-identical")
    assert "\x1b" not in done.stdout
    table_rows = [line for line in done.stdout.splitlines() if "│" in line or "┃" in line]
    assert table_rows and max(map(len, table_rows)) <= 80
