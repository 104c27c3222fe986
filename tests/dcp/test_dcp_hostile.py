"""Folders that someone has changed: an error that says what contradicts what; nothing is run, memory is bounded."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_single import load, rewrite, save

import thinpoint
from thinpoint.dcp import ThinFolder
from thinpoint.errors import (
    DigestMismatchError,
    MalformedFileError,
    NotEnoughMemoryError,
    NotFoundError,
    TruncatedFileError,
    UnsupportedError,
)
from thinpoint.folder.layout import Layout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save({"w": torch.arange(12.0).reshape(3, 4), "v": torch.arange(5), "n": 7}, tmp_path)
    return tmp_path


def target() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4), "v": torch.zeros(5, dtype=torch.int64), "n": 0}


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_pickle_for_stock_tools_is_never_opened(folder: Path) -> None:
    trace = folder / "opened"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    pickle.loads((folder / ".metadata").read_bytes())
    assert trace.exists(), "the bomb does not work"
    trace.unlink()
    state = target()
    load(state, folder)
    assert state["n"] == 7
    with ThinFolder(folder) as opened:
        opened.read("w")
        opened.load_object("n")
        opened.verify(deep=True)
    assert not trace.exists()
    (folder / ".metadata").unlink()
    load(target(), folder)


def test_pickles_in_a_rank_file_are_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "opened"
    save({"bomb": Bomb(trace), "w": torch.ones(2)}, tmp_path)
    with pytest.raises(thinpoint.errors.UnsafeObjectError):
        load({"bomb": None}, tmp_path)
    assert not trace.exists()


def with_tensor(name: str, **changes: Any) -> Any:
    def change(layout: Layout) -> Layout:
        return replace(layout, tensors={**layout.tensors, name: replace(layout.tensors[name], **changes)})

    return change


def renamed(layout: Layout) -> Layout:
    tensors = dict(layout.tensors)
    tensors["x"] = tensors.pop("w")
    return replace(layout, tensors=tensors)


def moved(layout: Layout) -> Layout:
    """Twice the tensor, of two chunks of which the file has one."""
    w = layout.tensors["w"]
    import numpy as np

    twice = replace(
        w,
        shape=(6, 4),
        offsets=np.array([[0, 0], [3, 0]]),
        sizes=np.array([[3, 4], [3, 4]]),
        ranks=np.array([0, 0]),
    )
    return replace(layout, tensors={**layout.tensors, "w": twice})


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (with_tensor("w", dtype="float64"), "w", "float32"),
        (with_tensor("w", dtype="int32"), "w", "float32"),
        (renamed, "x", "nothing"),
        (moved, "w", "nothing"),
    ],
)
def test_a_rank_file_that_contradicts_the_layout(folder: Path, change: Any, name: str, reason: str) -> None:
    rewrite(folder, change)
    with ThinFolder(folder) as opened:
        with pytest.raises(MalformedFileError, match="rank 0 contradicts the layout") as caught:
            opened.read(name)
        assert reason in str(caught.value) and "rank00000.thin" in str(caught.value)
        with pytest.raises(MalformedFileError, match="contradicts"):
            opened.verify()


def test_another_shape_in_the_layout(folder: Path) -> None:
    import numpy as np

    rewrite(folder, with_tensor("w", shape=(4, 3), sizes=np.array([[4, 3]])))
    with ThinFolder(folder) as opened:
        with pytest.raises(MalformedFileError, match="contradicts"):
            opened.read("w")
    with pytest.raises(MalformedFileError, match="contradicts"):
        load({"w": torch.zeros(4, 3)}, folder)


def test_what_the_layout_leaves_out_or_makes_up_is_seen_by_verify(folder: Path) -> None:
    def without_v(layout: Layout) -> Layout:
        return replace(layout, tensors={"w": layout.tensors["w"]})

    rewrite(folder, without_v)
    with ThinFolder(folder) as opened:
        opened.read("w")
        with pytest.raises(MalformedFileError, match="contradicts") as caught:
            opened.verify()
        assert caught.value.tensor == "v"


@pytest.mark.parametrize("objects", [{}, {"n": 0, "m": 0}])
def test_objects_that_contradict_the_layout(folder: Path, objects: dict[str, int]) -> None:
    rewrite(folder, lambda layout: replace(layout, objects=objects, rank_states=frozenset()))
    with ThinFolder(folder) as opened:
        with pytest.raises(MalformedFileError, match="contradicts"):
            opened.verify()
        if "m" in objects:
            with pytest.raises(MalformedFileError, match="contradicts"):
                opened.load_object("m")


def test_an_object_that_is_no_state_of_a_rank(folder: Path) -> None:
    rewrite(folder, lambda layout: replace(layout, rank_states=frozenset({"n"})))
    with ThinFolder(folder) as opened, pytest.raises(MalformedFileError):
        opened.load_object("n")


def test_an_unknown_dtype(folder: Path) -> None:
    rewrite(folder, with_tensor("w", dtype="float128"))
    with ThinFolder(folder) as opened, pytest.raises(UnsupportedError, match="float128"):
        opened.read("w")


def test_a_tensor_that_no_memory_holds(folder: Path) -> None:
    import numpy as np

    size = 1 << 50
    rewrite(folder, with_tensor("v", shape=(size,), sizes=np.array([[size]])))
    tracemalloc.start()
    try:
        with ThinFolder(folder) as opened:
            with pytest.raises(NotEnoughMemoryError):
                opened.read("v")
            with pytest.raises(MalformedFileError, match="contradicts"):
                opened.read("v", (slice(0, 10),))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_rank_file_of_another_save(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    save({"w": torch.ones(3, 4), "v": torch.arange(5), "n": 7}, other)
    (mine,), (theirs,) = folder.glob("*.thin"), other.glob("*.thin")
    mine.write_bytes(theirs.read_bytes())
    with ThinFolder(folder) as opened, pytest.raises(DigestMismatchError, match="not the one"):
        opened.read("w")


def test_a_rank_file_that_is_cut_short_or_missing(folder: Path) -> None:
    (path,) = folder.glob("*.thin")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with ThinFolder(folder) as opened, pytest.raises(TruncatedFileError) as caught:
        opened.read("w")
    assert path.name in str(caught.value)
    path.unlink()
    with ThinFolder(folder) as opened, pytest.raises(NotFoundError) as missing:
        opened.verify()
    assert path.name in str(missing.value)


def test_a_layout_that_is_cut_short_missing_or_another(folder: Path) -> None:
    (path,) = folder.glob("*-layout.zst")
    data = path.read_bytes()
    for broken, error in ((data[:-1], TruncatedFileError), (data[:-1] + b"\x00", DigestMismatchError)):
        path.write_bytes(broken)
        with pytest.raises(error, match="layout"):
            ThinFolder(folder)
    path.unlink()
    with pytest.raises(NotFoundError):
        ThinFolder(folder)


def test_every_flipped_bit_of_a_rank_file_is_seen(folder: Path) -> None:
    (path,) = folder.glob("*.thin")
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        path.write_bytes(bytes(broken))
        with pytest.raises(thinpoint.ThinpointError), ThinFolder(folder) as opened:
            opened.verify()
    path.write_bytes(data)
    with ThinFolder(folder) as opened:
        opened.verify()
