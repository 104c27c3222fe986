"""What the figures are made of: costs, idle time, throttled storage, the page cache, verdicts."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

import thinpoint
from thinpoint.errors import UsageError
from thinpoint.proof.cache import drop_from_cache, make_durable, num_cached_pages
from thinpoint.proof.costs import Block, SaveWindow, noise, summary
from thinpoint.proof.idle import idle_of
from thinpoint.proof.lives import Life
from thinpoint.proof.record import filesystem
from thinpoint.proof.restores import RAW, Restore, measure
from thinpoint.proof.resume import judged, wrong_losses
from thinpoint.proof.savers import Saver, savers
from thinpoint.proof.scale import SCALES, Shape, parse_scale
from thinpoint.proof.steps import quiet_block, save_block
from thinpoint.proof.stock_stager import SharedStager
from thinpoint.proof.throttle import MemorySink, Throttle, ThrottledSource, throttled_file
from thinpoint.proof.trainer import Trainer

CPU = torch.device("cpu")
SHAPE = Shape(width=64, num_layers=1, context=16, batch=1)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A tiny model in training, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Trainer(SHAPE, CPU, 20_000)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    shape = parse_scale(name, on_gpu=True).busy
    assert shape.width % 64 == 0
    assert 12 * shape.width**2 * shape.num_layers == pytest.approx(SCALES[name], rel=0.1)


def test_a_large_scale_proves_what_the_docs_say() -> None:
    scale = parse_scale("134M", on_gpu=True)
    assert (scale.run_steps, scale.num_kills) == (2000, 20)


@pytest.mark.parametrize("text", ["huge", "", "12", "nan", "inf", "-1e9"])
def test_other_scales_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no such scale"):
        parse_scale(text, on_gpu=False)


def test_the_cost_of_a_save_is_what_its_steps_take_longer() -> None:
    quiet = Block(steps=[1.0] * 20, updates=[0.25] * 20)
    first = SaveWindow(start=0, end=2, stall=9.0, durable=9.0, stored_bytes=1)
    one = SaveWindow(start=2, end=5, stall=2.0, durable=4.0, stored_bytes=50)
    two = SaveWindow(start=5, end=7, stall=1.0, durable=4.0, stored_bytes=50)
    block = Block(
        steps=[10.0, 1.0, 4.0, 1.5, 1.0, 3.0, 1.0],
        updates=[0.25, 0.25, 0.25, 0.75, 0.25, 0.5, 0.25],
        saves=[first, one, two],
    )
    found = summary(block, quiet, raw_bytes=100)
    assert found["cost"] == {"median": 2.75, "least": 2.0, "greatest": 3.5}
    assert found["stall"]["median"] == 1.5
    assert found["held"] == {"median": 0.375, "least": 0.25, "greatest": 0.5}
    assert found["slowdown"] == {"median": 0.875, "least": 0.75, "greatest": 1.0}
    assert found["percent"] == pytest.approx(100 * 2.75 / 900)
    assert found["shortest_interval_s"] == pytest.approx(275)
    assert found["ratio"] == 2.0
    assert found["first"]["cost"] == 9.0


def test_noise_is_the_cost_of_steps_without_a_save() -> None:
    assert noise([1.0, 1.0, 1.0, 2.0], 2) == [0.0, 1.0]
    # A window that is longer than the block is made of the whole block.
    assert noise([1.0, 1.0, 4.0], 6) == [6.0]


def test_idle_is_what_no_kernel_and_no_copy_covers() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "ts": 10, "dur": 10},
        {"cat": "gpu_memcpy", "ts": 15, "dur": 10},
        {"cat": "kernel", "ts": 12, "dur": 2},
        {"cat": "kernel", "ts": 40, "dur": 10},
        {"cat": "gpu_user_annotation", "ts": 0, "dur": 100},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"name": "process_name"},
    ]
    assert idle_of(events) == pytest.approx(15 / 40)
    assert idle_of([]) is None


def test_a_pipe_is_no_faster_than_its_rate() -> None:
    throttle = Throttle(1e8)
    begin = time.perf_counter()
    throttle.move(1_000_000)
    throttle.move(1_000_000)
    assert time.perf_counter() - begin >= 0.02


def test_throttled_bytes_are_the_bytes() -> None:
    state = {"w": torch.arange(1000, dtype=torch.float32)}
    thin: Any = MemorySink(keep=True)
    thinpoint.save(state, thin)
    plain: Any = MemorySink(keep=True)
    torch.save(state, plain)
    loaded = thinpoint.load(ThrottledSource(thin.data(), Throttle(1e12)))
    file: Any = throttled_file(plain.data(), Throttle(1e12))
    for found in (loaded, torch.load(file, weights_only=True)):
        assert found["w"].numpy().tobytes() == state["w"].numpy().tobytes()
    counted: Any = MemorySink(keep=False)
    thinpoint.save(state, counted)
    assert counted.num_bytes == thin.num_bytes
    assert counted.data().size == 0


def test_dropped_pages_are_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(200_000))
    if num_cached_pages(path) is None or filesystem(tmp_path) in ("tmpfs", "overlay"):
        pytest.skip("this file system lives in memory, or the system does not tell")
    assert num_cached_pages(path)
    make_durable(path)
    assert drop_from_cache(path)
    assert num_cached_pages(path) == 0
    path.read_bytes()
    assert num_cached_pages(path)


def test_a_restore_that_changes_bits_has_no_figures() -> None:
    state = {"w": torch.tensor([0.0, 1.0])}

    def good(like: Any) -> Any:
        like["w"].copy_(state["w"])
        return like

    def negative_zero(like: Any) -> Any:
        like["w"].copy_(torch.tensor([-0.0, 1.0]))
        return like

    def nothing(like: Any) -> Any:
        return like

    def failing(like: Any) -> Any:
        raise OSError("no such disk")

    loads = {RAW: good, "wrong": negative_zero, "poisoned": nothing, "broken": failing}
    ways = [Restore(name=name, stored_bytes=8, load=load) for name, load in loads.items()]
    rows = {row["name"]: row for row in measure(ways, state, {"w": torch.tensor([0.0, 1.0])}, CPU, 2)}
    assert rows[RAW]["over_raw"] == {"median": 1.0, "least": 1.0, "greatest": 1.0}
    assert "1 of 8 bytes" in rows["wrong"]["error"]
    assert "bytes" in rows["poisoned"]["error"]
    assert rows["broken"]["error"] == "OSError: no such disk"


def test_blocks_hold_every_step_and_every_save(trainer: Trainer, tmp_path: Path) -> None:
    assert len(quiet_block(trainer, 4).steps) == 4
    (saver, *_) = savers(CPU)
    block = Block()
    assert save_block(trainer, saver, tmp_path, 2, block) == {}
    assert len(block.steps) == len(block.updates) == block.saves[-1].end
    assert block.saves[0].end <= block.saves[1].start
    assert all(0 < save.stall <= save.durable for save in block.saves)
    # Only the one that is read back is left.
    assert [path.name for path in tmp_path.iterdir()] == ["last.out"]


def test_a_save_that_is_not_exact_is_an_error(trainer: Trainer, tmp_path: Path) -> None:
    def load(path: Path) -> Any:
        state = torch.load(path, weights_only=True)
        state["optimizer"]["state"][0]["exp_avg"].view(torch.int32)[0, 0] ^= 1
        return state

    closed: list[bool] = []
    saver = Saver(
        name="wrong",
        begin=torch.save,
        load=load,
        close=lambda: closed.append(True),
    )
    failed = save_block(trainer, saver, tmp_path, 1, Block())
    assert "not exact" in failed["error"]
    assert "exp_avg: 1 of" in failed["error"]
    assert closed == [True]


def test_a_save_that_fails_in_the_background_raises(trainer: Trainer, tmp_path: Path) -> None:
    def begin(state: Any, path: Path) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(OSError("disk full"))
        return future

    with pytest.raises(OSError, match="disk full"):
        save_block(trainer, Saver(name="full", begin=begin), tmp_path, 1, Block())


def life(*losses: tuple[int, float]) -> Life:
    return Life(losses=[(step, loss.hex()) for step, loss in losses])


WHOLE = life((1, 5.0), (2, 4.0), (3, 0.0))


def test_losses_are_compared_as_bits_those_of_steps_done_again_too() -> None:
    assert wrong_losses(WHOLE, [life((1, 5.0), (2, 4.0)), life((2, 4.0), (3, 0.0))]) == []
    assert "step 3 in process 1" in wrong_losses(WHOLE, [life((1, 5.0), (2, 4.0), (3, -0.0))])[0]
    again = wrong_losses(WHOLE, [life((1, 5.0), (2, 4.0)), life((2, 4.000001), (3, 0.0))])
    assert len(again) == 1
    assert "step 2 in process 2" in again[0]
    assert wrong_losses(WHOLE, [life((1, 5.0), (3, 0.0))]) == ["no loss of training step 2"]


def test_verdicts() -> None:
    same, other = ({"w": torch.tensor([value])} for value in (1.0, 2.0))
    assert judged([same, same, same], [WHOLE, WHOLE], [WHOLE]) == ("identical", [])
    verdict, found = judged([same, same, other], [WHOLE, WHOLE], [WHOLE])
    assert (verdict, len(found)) == ("different", 1)
    assert judged([same, same, same], [WHOLE, WHOLE], [life((1, 5.0))])[0] == "different"
    # Where two runs that were never stopped differ nothing is shown, whatever the third one did.
    assert judged([same, other, same], [WHOLE, WHOLE], [WHOLE])[0] == "inconclusive"
    assert judged([same, same, same], [WHOLE, life((1, 5.0))], [WHOLE])[0] == "inconclusive"


def test_the_stock_stager_serves_many_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = DefaultStager._stage

    def closing(stager: DefaultStager, state: Any, **options: Any) -> Any:
        # As in torch 2.11.
        try:
            return stage(stager, state, **options)
        finally:
            stager._state_dict_stager.close()

    monkeypatch.setattr(DefaultStager, "_stage", closing)
    stager = SharedStager(CPU)
    for step in range(2):
        state = {"w": torch.full((9,), float(step)), "names": ["a", int]}
        staged = stager.stage(state)
        state["w"].zero_()
        assert staged["names"] == state["names"]
        assert staged["w"].tolist() == [float(step)] * 9
        stager.close()
    stager.end()
