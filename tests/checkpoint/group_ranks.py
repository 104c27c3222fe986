"""Ranks for the tests of many: processes of a server that has torch imported, and a store that outlives them, as torchrun's."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_support import FAST, Wrapped

from thinpoint.checkpoint import Checkpointer
from thinpoint.errors import NoSpaceError, StorageError

PRELOAD = ["torch", "torch.distributed.fsdp", "thinpoint.checkpoint.group_restore", "group_ranks"]
LOST_AFTER_S = 4.0
SECONDS = 60


@dataclass
class Ended:
    """A rank that has ended.

    Attributes:
        result: what its function returned; None if it was killed.
        exit_code: of its process.
        seconds: until then.
    """

    result: Any
    exit_code: int | None
    seconds: float


def run_ranks(
    number: int, function: Callable[..., Any], folder: Path, *arguments: Any, stopped: int | None = None
) -> list[Ended]:
    """Runs `function(rank, *arguments)` on so many ranks of a gloo group; fails if one raises or hangs.

    Args:
        folder: for what the ranks return.
        stopped: a rank that never ends; it is killed when the others have ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir(parents=True, exist_ok=True)
    results = [folder / f"result{rank}-{time.time_ns()}" for rank in range(number)]
    processes = [
        context.Process(target=_main, args=(rank, number, store.port, results[rank], function, arguments))
        for rank in range(number)
    ]
    begin = time.monotonic()
    for process in processes:
        process.start()
    ended = {}
    while len(ended) < number - (stopped is not None) and time.monotonic() - begin < SECONDS:
        for rank, process in enumerate(processes):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.monotonic() - begin
        time.sleep(0.01)
    hung = [rank for rank in range(number) if rank not in ended and rank != stopped]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} hang"
    found = []
    for rank, process in enumerate(processes):
        told = pickle.loads(results[rank].read_bytes()) if results[rank].exists() else (None, None)
        assert told[1] is None, f"rank {rank}:\n{told[1]}"
        found.append(Ended(told[0], process.exitcode, ended.get(rank, 0.0)))
    return found


def results_of(ended: list[Ended]) -> list[Any]:
    """What the ranks returned, all of which have ended well."""
    assert [one.exit_code for one in ended] == [0] * len(ended)
    return [one.result for one in ended]


def _main(
    rank: int, number: int, port: int, result: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number)
    try:
        told = function(rank, *arguments), None
    except BaseException:  # noqa: BLE001
        told = None, traceback.format_exc()
    result.write_bytes(pickle.dumps(told))


def group_checkpointer(folder: Any, **options: Any) -> Checkpointer:
    return Checkpointer(
        folder, **{**FAST, "process_group": True, "lost_after": LOST_AFTER_S, "timeout": 30, **options}
    )


def outcome_of(function: Callable[[], Any]) -> tuple[str, str, float]:
    """(class of the error, its text, seconds); no class if there is none."""
    begin = time.monotonic()
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trap(Wrapped):
    """A store in which something happens at one point of a save, once it is armed.

    Args:
        point: "write" (in the middle of a data file), "written" (after it is durable) or "manifest" (before the commit).
        act: what happens there.
    """

    def __init__(self, folder: Path, point: str, act: Callable[[], None]) -> None:
        super().__init__(folder)
        self.point, self.act = point, act
        self.is_armed = False

    def once(self, act: Callable[[], None]) -> Callable[[], None]:
        """Disarms, then acts."""

        def act_once() -> None:
            self.is_armed = False
            act()

        return act_once

    def hit(self, point: str) -> None:
        if self.is_armed and point == self.point:
            self.act()

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        with self._store.sink(name, overwrite=overwrite) as sink:
            yield sink
            self.hit("write")
        self.hit("written")

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        if name.endswith("manifest.json"):
            self.hit("manifest")
        self._store.put(name, data, if_absent=if_absent)


def no_space() -> None:
    raise NoSpaceError("no space left", where="the test's disk")


def no_answer() -> None:
    """A transient error, for something that was done all the same."""
    raise StorageError("the disk did not answer", errno=errno.ETIMEDOUT)


class Broken:
    """Raises, or does something else, when it is asked for its state."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        if self.act is not None:
            self.act()
        return {"nothing": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def sharded(seed: int, num_steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model sharded by FSDP2 over all ranks, and AdamW with a few steps done."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(19, 31), torch.nn.ReLU(), torch.nn.Linear(31, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        model(torch.randn(7, 19)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def train_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole_bits(state: Any) -> Any:
    """The same nested state with the bytes of whole tensors. Collective."""
    if isinstance(state, dict):
        return {key: whole_bits(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole_bits(value) for value in state]
    if isinstance(state, torch.Tensor):
        full = state.full_tensor() if hasattr(state, "full_tensor") else state
        return full.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return state
