"""While training waits for a save or a load no garbage is collected; afterwards all is as before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import thinpoint
from thinpoint.checkpoint import restore
from thinpoint.collector import collector_paused
from thinpoint.dcp import ThinReader, ThinStager, ThinWriter, commit, reader, staged_file, staging


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_again_after_any_end() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), collector_paused():
        raise KeyboardInterrupt
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_threads_that_pause_at_the_same_time_leave_it_on() -> None:
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("was_on", [True, False])
def test_process_forked_meanwhile_by_another_thread_has_it_as_before(was_on: bool) -> None:
    """A data loader may start its workers while a save is under way."""
    if not was_on:
        gc.disable()
    with ThreadPoolExecutor(1) as pool:
        pause = collector_paused()
        pool.submit(pause.__enter__).result()
        child = os.fork()
        if child == 0:
            os._exit(int(gc.isenabled()))
        pool.submit(pause.__exit__, None, None, None).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(was_on)
    assert gc.isenabled() == was_on


def test_function_is_called_with_its_arguments() -> None:
    @collector_paused()
    def shown(*values: int, name: str) -> tuple[object, ...]:
        return (*values, name, gc.isenabled())

    assert shown(1, 2, name="a") == (1, 2, "a", False)
    assert gc.isenabled()


CALLS: dict[str, Callable[[dict[str, torch.Tensor], Path, Callable[[int], None]], object]] = {
    "save": lambda state, path, progress: thinpoint.save(state, path, progress=progress),
    "async_save": lambda state, path, progress: thinpoint.async_save(state, path, progress=progress).result(),
    "load": lambda state, path, progress: thinpoint.load(path, progress=progress),
    "load_into": lambda state, path, progress: thinpoint.load_into(path, state, progress=progress),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_collection_while_the_caller_waits(name: str, tmp_path: Path) -> None:
    state = {str(i): torch.randn(1000) for i in range(20)}
    thinpoint.save(state, tmp_path / "a.thin")
    seen: list[bool] = []
    CALLS[name](state, tmp_path / "a.thin", lambda done: seen.append(gc.isenabled()))
    assert seen and not any(seen)
    assert gc.isenabled()


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """For every call of a function whether the collector is on."""
    real, seen = getattr(module, name), []

    def seeing(*arguments: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, seeing)
    return seen


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_collection_while_dcp_stages_lays_out_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(1000)}
    calls = (
        (staging, "encode_state"),
        (staged_file, "flatten"),
        (commit, "dump_layout"),
        (reader, "_read_tensors"),
    )
    seen = [watch(monkeypatch, module, name) for module, name in calls]
    dcp.save(ThinStager().stage(state), storage_writer=ThinWriter(tmp_path / "a"), no_dist=True)
    dcp.load(state, storage_reader=ThinReader(tmp_path / "a"), no_dist=True)
    assert seen == [[False]] * 4
    assert gc.isenabled()


def test_no_collection_while_a_checkpointer_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.randn(1000)}
    seen = watch(monkeypatch, restore, "load_state_into")
    with thinpoint.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.restore(state)
    assert seen == [False]
    assert gc.isenabled()
