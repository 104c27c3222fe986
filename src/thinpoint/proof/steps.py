"""What saving does to the time of training steps: blocks of steps without and with saves in turn."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinpoint.demo.compare import differences
from thinpoint.proof.costs import EVERY_S, SHARE, STEPS_BEFORE, Block, SaveWindow, summary
from thinpoint.proof.idle import idle_share
from thinpoint.proof.record import Deadline, attempt
from thinpoint.proof.savers import Saver, Unavailable, savers
from thinpoint.proof.scale import Scale
from thinpoint.proof.spread import spread
from thinpoint.proof.trainer import Clock, Trainer, copied, release, synchronize, tensor_bytes

Row = dict[str, Any]
Say = Callable[[str], object]

FULL_LOAD, LAUNCH_BOUND = "full load", "launch-bound"
MAX_IDLE = 0.05
STEPS_AFTER = 4
"""Steps after a save is durable that still count as touched by it: memory goes back, caches are cold."""
_MAX_DOUBLINGS = 4


def measure_steps(
    scale: Scale, device: torch.device, folder: Path, num_saves: int, deadline: Deadline, say: Say
) -> Iterator[Row]:
    """Rows for both loops; yields what there is after each way to save.

    Args:
        folder: where checkpoints go, and are deleted again.
        num_saves: saves of each kind that count; one more before them does not.
    """
    result: Row = {"every_s": EVERY_S, "share": SHARE, "num_saves": num_saves, "loops": []}
    for name, shape in ((FULL_LOAD, scale.busy), (LAUNCH_BOUND, scale.launch_bound)):
        if deadline.is_late(f"step time, {name}"):
            continue
        say(f"step time, {name}: training begins")
        trainer = Trainer(shape, device, scale.corpus_bytes)
        idle, why_not = fill_device(trainer, num_doublings=_MAX_DOUBLINGS if name == FULL_LOAD else 0)
        loop = {**_about(name, trainer), "idle": idle, "idle_unknown": why_not, "rows": []}
        result["loops"].append(loop)
        before = quiet_block(trainer, scale.quiet_steps)
        loop["step"] = spread(before.steps)
        for saver in savers(device):
            if isinstance(saver, Unavailable):
                loop["rows"].append({"name": saver.name, "unavailable": saver.reason})
                continue
            if deadline.is_late(f"step time, {name}, {saver.name}"):
                saver.close()
                continue
            say(f"step time, {name}: {saver.name}")
            block, failed = _saves(trainer, saver, folder, num_saves)
            after = quiet_block(trainer, scale.quiet_steps)
            quiet = Block(steps=before.steps + after.steps, updates=before.updates + after.updates)
            loop["rows"].append({"name": saver.name, **(failed or summary(block, quiet, loop["raw_bytes"]))})
            before = after
            release(device)
            yield result
        del trainer
        release(device)
    yield result


def _saves(trainer: Trainer, saver: Saver, folder: Path, num_saves: int) -> tuple[Block, Row]:
    """A block with one save that does not count and so many that do; {} or {"error": what is wrong}."""
    block = Block()
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        failed = attempt(lambda: save_block(trainer, saver, Path(inner), num_saves + 1, block))
    return block, failed


def _about(name: str, trainer: Trainer) -> Row:
    return {
        "name": name,
        "model": asdict(trainer.shape),
        "num_parameters": trainer.num_parameters,
        "raw_bytes": tensor_bytes(trainer.state()),
    }


def fill_device(trainer: Trainer, *, num_doublings: int) -> tuple[float | None, str | None]:
    """Doubles the batch until a GPU is idle for less than MAX_IDLE of the time; the share, or why it is not known."""
    try:
        step = _paced(trainer)
        idle = idle_share(step, trainer.device)
        for _ in range(num_doublings):
            if idle is None or idle < MAX_IDLE:
                break
            batch = trainer.shape.batch
            try:
                trainer.set_batch(2 * batch)
                trainer.step()
                synchronize(trainer.device)
            except torch.cuda.OutOfMemoryError:
                trainer.set_batch(batch)
                release(trainer.device)
                break
            idle = idle_share(step, trainer.device)
    except Exception as error:  # noqa: BLE001  (a profiler that is not allowed here must not end the benchmark)
        return None, f"{type(error).__name__}: {error}"[:300]
    if idle is None:
        return None, "no GPU" if trainer.device.type == "cpu" else "the profiler saw nothing on the GPU"
    return idle, None


def _paced(trainer: Trainer) -> Callable[[], None]:
    """A training step as it is timed: the host at most one step ahead of the device."""
    clock = Clock(trainer.marks)

    def step() -> None:
        trainer.step()
        clock.mark()

    return step


def quiet_block(trainer: Trainer, num_steps: int) -> Block:
    """Steps without a save."""
    with _Stopwatch(trainer) as watch:
        for _ in range(num_steps):
            watch.step()
    return watch.block


def save_block(trainer: Trainer, saver: Saver, folder: Path, num_saves: int, block: Block) -> Row:
    """Saves with steps until each is durable, and STEPS_AFTER more; fills the block. The last one is read back.

    Returns:
        {} or {"error": what is wrong}.
    """
    try:
        with _Stopwatch(trainer, block) as watch:
            for number in range(num_saves):
                for _ in range(STEPS_BEFORE):
                    watch.step()
                watch.save(saver, folder / f"{number}.out")
        return {} if saver.load is None else _read_back(trainer, saver, saver.load, folder / "last.out")
    finally:
        saver.close()


def _read_back(trainer: Trainer, saver: Saver, load: Callable[[Path], Any], path: Path) -> Row:
    """Saves once more while training goes on, and compares with a copy of the state at the call."""
    expected = copied(trainer.state())
    synchronize(trainer.device)
    future = saver.begin(trainer.state(), path)
    while True:
        trainer.step()
        if future is None or future.done():
            break
    if future is not None:
        future.result()
    found = differences(expected, load(path))
    return {"error": f"not exact: {found[0]}"} if found else {}


class _Stopwatch:
    """Times the steps inside a `with` block; one step before it only starts the clock."""

    def __init__(self, trainer: Trainer, block: Block | None = None) -> None:
        self.trainer = trainer
        self.block = Block() if block is None else block

    def __enter__(self) -> _Stopwatch:
        self.clock = Clock(self.trainer.marks)
        self.trainer.step()
        self.clock.mark()
        self.trainer.updates.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.block.steps = self.clock.intervals()
        self.block.updates = [self.trainer.marks.seconds(*update) for update in self.trainer.updates]

    def step(self) -> None:
        self.trainer.step()
        self.clock.mark()

    def save(self, saver: Saver, path: Path) -> None:
        """One save, the steps meanwhile, and a few after it."""
        start = len(self.clock)
        state = self.trainer.state()
        begin = time.perf_counter()
        future = saver.begin(state, path)
        stall = time.perf_counter() - begin
        ended = [begin + stall]
        report = None
        self.step()
        if future is not None:
            is_durable = threading.Event()

            def note(_: object) -> None:
                ended[0] = time.perf_counter()
                is_durable.set()

            future.add_done_callback(note)
            while not is_durable.is_set():
                self.step()
            report = future.result()
        for _ in range(STEPS_AFTER):
            self.step()
        self.block.saves.append(
            SaveWindow(
                start=start,
                end=len(self.clock),
                stall=stall,
                durable=ended[0] - begin,
                stored_bytes=_bytes_on_disk(path),
                mode=getattr(report, "mode", None),
                fallback=getattr(report, "fallback", None),
            )
        )
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _bytes_on_disk(path: Path) -> int:
    files = [found for found in path.rglob("*") if found.is_file()] if path.is_dir() else [path]
    return sum(found.stat().st_size for found in files)
