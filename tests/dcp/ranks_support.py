"""Checks that several gloo processes run together, each once, and what became of each."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

Check = Callable[[Path], None]

TIMEOUT_S = 60


def run_as_rank(checks: list[Check]) -> None:
    """Called by each process: runs every check in a folder of its own, writes down what went wrong. argv: rank, ranks, folder."""
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    outcomes: dict[str, str | None] = {}
    for check in checks:
        below = folder / check.__name__
        below.mkdir(exist_ok=True)
        try:
            check(below)
            outcomes[check.__name__] = None
        except BaseException:  # noqa: BLE001
            outcomes[check.__name__] = traceback.format_exc()
        dist.barrier()
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def outcomes_of(
    script: str, world_size: int, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str | None]]:
    """For each check of a script beside this file what each rank says of it; run once, whoever asks first."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / f"{script}-{world_size}"
    folder.mkdir(exist_ok=True)
    ended = folder / "ended"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ended.exists():
            ended.write_text(_run(script, world_size, folder))
    if ended.read_text():
        pytest.fail(ended.read_text(), pytrace=False)
    by_rank = [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [outcomes[name] for outcomes in by_rank] for name in by_rank[0]}


def assert_passed(outcomes: dict[str, list[str | None]], name: str) -> None:
    """Fails with what the first rank says that failed."""
    failed = {rank: text for rank, text in enumerate(outcomes[name]) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        pytest.fail(f"rank {rank} (of those that failed: {sorted(failed)}):\n{text}", pytrace=False)


def _run(script: str, world_size: int, folder: Path) -> str:
    """What a process printed that did not end as it should; empty if all did."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "THINPOINT_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / f"{script}.py"), str(rank), str(world_size), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        return f"a rank has not ended in {error.timeout} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    return "\n".join(f"rank {rank} has failed:\n{printed[rank][-4000:]}" for rank in failed)
