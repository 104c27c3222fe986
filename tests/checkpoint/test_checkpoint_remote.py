"""Directories of checkpoints that are no local folders."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import FAST, same_bits, state, weights

from thinpoint.checkpoint import Checkpointer
from thinpoint.checkpoint.catalog import entries
from thinpoint.checkpoint.leftovers import dead
from thinpoint.checkpoint.names import data_name, new_id, step_folder
from thinpoint.errors import AlreadyExistsError, SupersededError
from thinpoint.store import open_store

S3_SERVER = Path(__file__).parents[1] / "store" / "s3_server.py"


@pytest.fixture(scope="module")
def s3_options() -> Iterator[dict[str, Any]]:
    """An S3 server on loopback, with a bucket."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    with subprocess.Popen(
        [sys.executable, str(S3_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        options = {"endpoint_url": url, "key": "key", "secret": "secret"}
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("runs")
        yield options
        server.terminate()


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("fsspec")
    name = uuid.uuid4().hex
    if request.param == "memory":
        return open_store(f"memory://{name}")
    return open_store(f"s3://runs/{name}", **request.getfixturevalue("s3_options"))


def test_a_run_on_an_object_store(store: Any) -> None:
    with Checkpointer(store, keep_last=2, **FAST) as checkpointer:
        assert checkpointer.restore(state(0)) is None
        for step in (1, 2, 3):
            checkpointer.async_save(state(step), step)
        with pytest.raises(AlreadyExistsError):
            checkpointer.save(state(9), 3)
        checkpointer.save(state(9), 3, overwrite=True)
    assert checkpointer.steps() == [2, 3]
    again = Checkpointer(store, **FAST)
    target = state(0)
    report = again.restore(target)
    assert report is not None and report.step == 3
    assert same_bits(target["model"]["w"], weights(9))
    assert again.truncate_after(2) == [3]
    again.close()
    assert [(entry.step, entry.state) for entry in entries(store)] == [(2, "committed")]


def test_two_jobs_on_an_object_store(store: Any) -> None:
    one, two = Checkpointer(store, **FAST), Checkpointer(store, **FAST)
    one.save(state(1), 1)
    two.save(state(2), 2)
    with pytest.raises(SupersededError):
        one.save(state(3), 3)
    assert two.steps() == [1, 2]


def test_only_age_tells_what_is_dead_of_an_unknown_writer(store: Any) -> None:
    name = f"{step_folder(5)}/{data_name(new_id(), 0)}"
    store.put(name, b"x" * 10)
    assert dead(store, orphan_age_s=3600) == []
    (modified,) = [file.modified for file in store.files()]
    assert [file.name for file in dead(store, orphan_age_s=3600, now=modified + 3601)] == [name]
