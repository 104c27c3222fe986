"""`dcp.async_save` with ThinStager and ThinWriter: in one process, and with two ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks_staging import CHECKS
from ranks_support import assert_passed, outcomes_of
from small_model import assert_same, full, state_of

from thinpoint import errors
from thinpoint.dcp import ThinReader, ThinStager, ThinWriter
from thinpoint.store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_passed(outcomes_of("ranks_staging", 2, tmp_path_factory), name)


class WaitingStore(LocalStore):
    """Writes a data file only when it may."""

    may_write = threading.Event()

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        if name.endswith(".thin"):
            assert self.may_write.wait(60)
        with super().sink(name, overwrite=overwrite) as sink:
            yield sink


def test_without_ranks_the_state_may_change_while_it_is_written(tmp_path: Path) -> None:
    state = state_of(None, "plain", seed=1)
    expected = full(state)
    store = WaitingStore(tmp_path)
    future = dcp.async_save(state, storage_writer=ThinWriter(store), async_stager=ThinStager(), no_dist=True)
    assert not future.done()
    for parameter in state["model"].values():
        parameter.detach().zero_()
    store.may_write.set()
    future.result()
    target = state_of(None, "plain", seed=2)
    dcp.load(target, storage_reader=ThinReader(tmp_path), no_dist=True)
    assert_same(full(target), expected)


def test_one_stager_and_one_writer_serve_many_saves(tmp_path: Path) -> None:
    writer, stager = ThinWriter(), ThinStager()
    for step in range(3):
        state = {"w": torch.full((1000,), float(step)), "step": step}
        dcp.async_save(
            state,
            checkpoint_id=str(tmp_path / f"{step}"),
            storage_writer=writer,
            async_stager=stager,
            no_dist=True,
        ).result()
    stager.close()
    for step in range(3):
        target = {"w": torch.zeros(1000), "step": None}
        dcp.load(target, storage_reader=ThinReader(tmp_path / f"{step}"), no_dist=True)
        assert target["w"].unique().tolist() == [step] and target["step"] == step


def test_an_error_of_the_store_is_in_the_future(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    future = dcp.async_save(
        {"w": torch.ones(3)},
        storage_writer=ThinWriter(tmp_path / "file" / "below"),
        async_stager=ThinStager(),
        no_dist=True,
    )
    error = future.exception()
    assert isinstance(error, dcp.api.CheckpointException)
    assert isinstance(error.failures[0][0], errors.StorageError)


def test_what_cannot_be_stored_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedObjectError, match="lock"):
        dcp.async_save(
            {"w": torch.ones(3), "lock": threading.Lock()},
            storage_writer=ThinWriter(tmp_path),
            async_stager=ThinStager(),
            no_dist=True,
        )
    assert not list(tmp_path.iterdir())
