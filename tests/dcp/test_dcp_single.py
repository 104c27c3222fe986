"""Saves and loads through DCP in one process: every kind of value, the options, the hooks of planners."""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_single import call, load, save
from small_model import assert_same, bits
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import thinpoint
from thinpoint.dcp import ThinFolder, ThinReader, ThinWriter
from thinpoint.errors import (
    AlreadyExistsError,
    NotFoundError,
    StateMismatchError,
    UnknownNameError,
    UnsafeObjectError,
    UnsupportedError,
    UnsupportedObjectError,
    UsageError,
)
from thinpoint.folder.names import data_name, layout_name
from thinpoint.store import LocalStore
from thinpoint.store.local import LocalSource


def zoo() -> dict[str, torch.Tensor]:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000], dtype=torch.int32)
    base = torch.randn(64, 48)
    found = {
        "float32": torch.randn(33, 17),
        "odd floats": odd.view(torch.float32),
        "all bfloat16": patterns.view(torch.bfloat16),
        "all float16": patterns.view(torch.float16),
        "uint16": patterns,
        "float8": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn),
        "float64": torch.randn(5, dtype=torch.float64),
        "complex": torch.randn(7, dtype=torch.complex64),
        "conjugate": torch.randn(7, dtype=torch.complex64).conj(),
        "bool": torch.rand(9) > 0.5,
        "int64": torch.randint(-(2**62), 2**62, (11,)),
        "scalar": torch.tensor(3.5),
        "integer": torch.tensor(7),
        "one": torch.randn(1),
        "empty": torch.empty(0, 3),
        "large": torch.randn(300, 1000),
        "transposed": base.t(),
        "columns": base[:, 3:9],
        "strided": base[::2],
        "row": base[5],
        "expanded": torch.randn(4, 1).expand(4, 6),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    found["alias"] = found["float32"]
    found["flat alias"] = found["float32"].view(-1)
    return found


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.uint8).to(tensor.dtype)


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = {"model": zoo()}
    save(state, tmp_path)
    target = {"model": {name: zeros_like(tensor) for name, tensor in zoo().items()}}
    load(target, tmp_path)
    assert_same(target, {"model": {name: t.resolve_conj() for name, t in state["model"].items()}})


def test_targets_may_be_strided(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    save({"w": whole}, tmp_path)
    for target in (torch.zeros(30, 40).t(), torch.zeros(40, 60)[:, ::2], torch.zeros(80, 30)[::2]):
        load({"w": target}, tmp_path)
        assert bits(target) == bits(whole)


def test_a_view_does_not_bring_what_it_leaves_out(tmp_path: Path) -> None:
    save({"column": torch.randn(1000, 1000)[:, 3]}, tmp_path)
    with ThinFolder(tmp_path) as folder:
        assert folder.rank_file(0).raw_bytes == 4000


def test_roles_are_seen_in_dotted_names(tmp_path: Path) -> None:
    names = ["model.w", "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq", "optim.state.w.step"]
    names += ["optimizer_1.w.step", "optim_state.w.m", "optimal.step"]
    save({name: torch.randn(5, 4) for name in names}, tmp_path)
    with ThinFolder(tmp_path) as folder:
        file = folder.rank_file(0)
        roles = [file["tensors", name, "0,0"].role for name in names]
    assert roles == ["weight", "first_moment", "second_moment", "other", "other", "first_moment", "weight"]


def test_objects_come_back(tmp_path: Path) -> None:
    objects = {
        "n": 3,
        "x": 0.1,
        "text": "ü\x00",
        "none": None,
        "tuple": (1, (2, "a"), {"k": [1]}),
        "bytes": b"\x00\xff",
        "betas": [0.9, 0.999],
        "tensors": (torch.arange(3), {"inner": torch.ones(2)}),
    }
    save({"objects": dict(objects)}, tmp_path)
    target: dict[str, Any] = {"objects": dict.fromkeys(objects)}
    load(target, tmp_path)
    found = target["objects"]
    tensors, expected = found.pop("tensors"), objects.pop("tensors")
    assert found == objects
    assert bits(tensors[0]) == bits(expected[0]) and bits(tensors[1]["inner"]) == bits(expected[1]["inner"])


@dataclass(eq=True)
class Settings:
    rate: float


class Opaque:
    def __reduce__(self) -> Any:
        return Opaque, ()


def test_pickled_objects_need_weights_only_false(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "opaque": Opaque()}, tmp_path)
    with pytest.raises(UnsafeObjectError):
        load({"opaque": None}, tmp_path)
    target = {"opaque": None}
    load(target, tmp_path, weights_only=False)
    assert isinstance(target["opaque"], Opaque)
    # All else is to be had without it.
    tensors = {"w": torch.zeros(3)}
    load(tensors, tmp_path)
    assert tensors["w"].tolist() == [1.0] * 3


def test_nothing_is_pickled_without_leave(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedObjectError, match="opaque"):
        save({"opaque": Opaque()}, tmp_path, allow_pickle=False)
    assert not (tmp_path / "manifest.json").exists()
    save({"settings": Settings(0.5)}, tmp_path, allow_pickle=False)
    target = {"settings": None}
    load(target, tmp_path)
    assert target["settings"] == Settings(0.5)


def test_another_dtype_is_an_error_unless_cast(tmp_path: Path) -> None:
    state = {"a": torch.tensor([1.5, 2.5]), "b": torch.arange(3)}
    save(state, tmp_path)
    target = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(StateMismatchError, match="a: float32 in the checkpoint, bfloat16") as caught:
        load(target, tmp_path)
    assert caught.value.mismatched == ["a: float32 in the checkpoint, bfloat16 in the state"]
    # Nothing was touched, what fits neither.
    assert target["b"].tolist() == [0, 0, 0]
    load(target, tmp_path, cast=True)
    assert target["a"].tolist() == [1.5, 2.5] and target["b"].tolist() == [0, 1, 2]


def test_a_checkpoint_id_instead_of_a_path(tmp_path: Path) -> None:
    writer, reader = ThinWriter(), ThinReader()
    for n in range(2):
        place = tmp_path / f"step-{n}"
        call(
            lambda n=n, place=place: dcp.save(
                {"n": n}, checkpoint_id=place, storage_writer=writer, no_dist=True
            )
        )
    for n in range(2):
        target = {"n": -1}
        place = tmp_path / f"step-{n}"
        call(
            lambda target=target, place=place: dcp.load(
                target, checkpoint_id=str(place), storage_reader=reader, no_dist=True
            )
        )
        assert target == {"n": n}
    with pytest.raises(UsageError, match="checkpoint_id"):
        save({"n": 1}, None)
    assert ThinWriter.validate_checkpoint_id(tmp_path) and ThinReader.validate_checkpoint_id("memory://x")
    assert not ThinWriter.validate_checkpoint_id("nosuchscheme://x")


def test_urls(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}-dcp"
    for seed in range(2):
        torch.manual_seed(seed)
        state = {"w": torch.randn(1000), "n": seed}
        save(state, url)
        target = {"w": torch.zeros(1000), "n": -1}
        load(target, url)
        assert_same(target, state)
    with ThinFolder(url) as folder:
        assert len(folder.store.files()) == 4
        folder.verify(deep=True)


def test_a_replaced_checkpoint_leaves_no_files(tmp_path: Path) -> None:
    writer = ThinWriter(tmp_path)
    for n in range(3):
        call(lambda n=n: dcp.save({"n": n}, storage_writer=writer, no_dist=True))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4 and names[0] == ".metadata" and names[-1] == "manifest.json"


def test_an_existing_checkpoint_may_be_protected(tmp_path: Path) -> None:
    save({"n": 1}, tmp_path, overwrite=False)
    with pytest.raises(AlreadyExistsError):
        save({"n": 2}, tmp_path, overwrite=False)
    assert len(list(tmp_path.glob("*.thin"))) == 1


def test_a_damaged_checkpoint_can_be_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"n": 1}, tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, logger="thinpoint"):
        save({"n": 2}, tmp_path)
    assert "nothing is deleted beside a manifest that cannot be read" in caplog.text
    target = {"n": 0}
    load(target, tmp_path)
    assert target == {"n": 2}


def test_what_failed_saves_have_left_goes_after_an_hour(tmp_path: Path) -> None:
    save({"n": 1}, tmp_path)
    now_us = time.time_ns() // 1000
    old, young = (f"{now_us - age_s * 10**6:014x}{'a' * 10}" for age_s in (3700, 3500))
    for name in (data_name(old, 3), layout_name(old), data_name(young, 3), "of the user"):
        (tmp_path / name).write_bytes(b"x")
    with ThinFolder(tmp_path) as folder:
        mine = {file.name for file in folder.manifest.files}
    with pytest.raises(UnsupportedObjectError):
        save({"opaque": Opaque()}, tmp_path, allow_pickle=False)
    left = {path.name for path in tmp_path.iterdir()}
    assert {data_name(young, 3), "of the user", *mine} < left
    assert not {data_name(old, 3), layout_name(old)} & left


def test_what_a_rank_tells_of_an_item_is_small(tmp_path: Path) -> None:
    told: list[Any] = []

    class Listening(ThinWriter):
        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            told.extend(results[0])
            super().finish(metadata, results)

    state = {f"a rather long name of a tensor {i}": torch.ones(100, 100) for i in range(5)} | {
        "text": "x" * 1000
    }
    call(lambda: dcp.save(state, storage_writer=Listening(tmp_path), no_dist=True))
    of_items = [result for result in told if result.index.fqn]
    assert len(of_items) == 6
    assert max(len(pickle.dumps(result.storage_data)) for result in of_items) <= 64


@pytest.mark.parametrize("change", ["newer", "cut"])
def test_a_failed_save_leaves_an_old_checkpoint_whose_manifest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    two_hours_ago = time.time_ns() - 7200 * 10**9
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: two_hours_ago)
        save({"n": 1}, tmp_path)
    manifest = tmp_path / "manifest.json"
    good = manifest.read_bytes()
    newer = json.dumps({**json.loads(good), "manifest": 99}).encode()
    manifest.write_bytes(good[:100] if change == "cut" else newer)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UnsupportedObjectError):
        save({"opaque": Opaque()}, tmp_path, allow_pickle=False)
    assert {path.name for path in tmp_path.iterdir()} == before
    manifest.write_bytes(good)
    target = {"n": 0}
    load(target, tmp_path)
    assert target == {"n": 1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stock_checkpoint_counts_as_one_that_is_there(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(AlreadyExistsError, match="there is a checkpoint"):
        save({"w": torch.ones(3)}, tmp_path, overwrite=False)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert target["w"].tolist() == [0.0, 1.0, 2.0]


class DoublingPlanner(DefaultSavePlanner):
    """Saves twice what is there."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


class PlannerWithoutObjects(DefaultSavePlanner):
    """Gives bytes that are not what `torch.save` makes."""

    def resolve_data(self, write_item: Any) -> Any:
        return io.BytesIO(b"bytes of its own")


def test_what_planners_make_of_values_is_saved(tmp_path: Path) -> None:
    save({"n": 21, "w": torch.ones(2)}, tmp_path, planner=DoublingPlanner())
    target = {"n": 0, "w": torch.zeros(2)}
    load(target, tmp_path)
    assert target["n"] == 42 and target["w"].tolist() == [2.0, 2.0]
    with pytest.raises(UnsupportedObjectError, match=r"torch\.save"):
        save({"n": 21}, tmp_path, planner=PlannerWithoutObjects())


class MaterializingPlanner(DefaultLoadPlanner):
    """Loads into tensors of its own, and puts them in place when they are full."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def test_planners_may_commit_tensors_themselves(tmp_path: Path) -> None:
    whole = torch.randn(10, 3)
    save({"w": whole}, tmp_path)
    target = {"w": torch.zeros(10, 3)}
    load(target, tmp_path, planner=MaterializingPlanner())
    assert bits(target["w"]) == bits(whole)


def test_a_state_can_be_built_from_the_folder_alone(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(4, 3), "layers": [torch.ones(2), torch.zeros(1)]}, "n": 5}
    save(state, tmp_path)
    found: dict[str, Any] = {}
    call(
        lambda: _load_state_dict(
            found, storage_reader=ThinReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    )
    assert found["n"] == 5 and bits(found["model"]["w"]) == bits(state["model"]["w"])


def test_every_file_is_an_ordinary_thin_file(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(4, 3)}, "n": 5}
    save(state, tmp_path)
    (path,) = tmp_path.glob("*.thin")
    thinpoint.verify(path, deep=True)
    found = thinpoint.load(path)
    assert found["objects"] == {"n": 5}
    assert bits(found["tensors"]["model.w"]["0,0"]) == bits(state["model"]["w"])
    with thinpoint.open(path) as file:
        assert file.meta == {"dcp": {"rank": 0, "world_size": 1, "shapes": {"model.w": [4, 3]}}}


class CountingStore(LocalStore):
    """Counts the bytes that are read."""

    read_bytes = 0

    def source(self, name: str) -> LocalSource:
        store = self

        class Counting(LocalSource):
            def read_at(self, offset: int, size: int) -> Any:
                store.read_bytes += size
                return super().read_at(offset, size)

            def read_into(self, offset: int, buffer: Any) -> None:
                store.read_bytes += memoryview(buffer).nbytes
                super().read_into(offset, buffer)

        return Counting(self._path(name))


def test_a_slice_reads_only_the_blocks_that_it_touches(tmp_path: Path) -> None:
    whole = torch.randn(4000, 1000)
    save({"w": whole}, tmp_path)
    store = CountingStore(tmp_path)
    with ThinFolder(store) as folder:
        part = folder.read("w", (slice(100, 110),))
        num_bytes = folder.manifest.num_bytes
    assert bits(part) == bits(whole[100:110])
    assert store.read_bytes < num_bytes / 4


def test_boxes_of_a_folder(tmp_path: Path) -> None:
    whole = torch.randn(6, 5)
    save({"w": whole, "s": torch.tensor(2.0)}, tmp_path)
    with ThinFolder(tmp_path) as folder:
        assert bits(folder.read("w")) == bits(whole)
        assert bits(folder.read("s")) == bits(torch.tensor(2.0))
        assert bits(folder.read("w", slice(-2, None))) == bits(whole[-2:])
        assert bits(folder.read("w", (slice(1, 99), slice(None, 2)))) == bits(whole[1:99, :2])
        assert folder.read("w", (slice(4, 2),)).shape == (0, 5)
        for index in (3, (slice(None, None, 2),), (slice(None),) * 3, ...):
            with pytest.raises(UsageError, match="slices"):
                folder.read("w", index)
        for missing in ("x", "w.0"):
            with pytest.raises(UnknownNameError):
                folder.read(missing)
            with pytest.raises(UnknownNameError):
                folder.load_object(missing)
        for rank in (-1, 1):
            with pytest.raises(UsageError, match="no rank"):
                folder.rank_file(rank)


def test_progress_of_verify_reaches_the_size_of_all_files(tmp_path: Path) -> None:
    save({"w": torch.randn(300_000)}, tmp_path)
    for deep in (False, True):
        done: list[int] = []
        with ThinFolder(tmp_path) as folder:
            folder.verify(deep=deep, progress=done.append)
            assert done == sorted(done) and done[-1] == folder.manifest.num_bytes


def test_options_that_are_not_offered() -> None:
    for options in (
        {"sync_files": False},
        {"single_file_per_rank": False},
        {"thread_count": 0},
        {"codec": "x"},
    ):
        with pytest.raises(UsageError):
            ThinWriter("folder", **options)
    for options in ({"backend": "x"}, {"thread_count": -1}):
        with pytest.raises(UsageError):
            ThinReader("folder", **options)


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="use_collectives"):
        ThinWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(ThinWriter(tmp_path, codec="zstd")))
    call(lambda: dcp.save({"w": torch.ones(5)}, storage_writer=writer, no_dist=True))
    target = {"w": torch.zeros(5)}
    load(target, tmp_path)
    assert target["w"].tolist() == [1.0] * 5


def test_a_folder_without_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotFoundError, match="no manifest"):
            ThinFolder(folder)
        caplog.clear()
        with pytest.raises(AssertionError) as caught:
            load({"n": 0}, folder)
        # DCP tells from torch 2.13 on; before that the log does.
        assert "no manifest" in f"{caught.value}{caplog.text}"


def test_a_checkpoint_of_a_single_file_is_not_one_of_many_ranks(tmp_path: Path) -> None:
    checkpointer = thinpoint.Checkpointer(tmp_path)
    checkpointer.save({"w": torch.ones(3)}, 1)
    checkpointer.close()
    with pytest.raises(UnsupportedError, match="single file"):
        ThinFolder(tmp_path / "step-0000000001")


def test_tensors_without_elements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedObjectError, match="meta") as caught:
        save({"w": torch.empty(3, device="meta")}, tmp_path)
    assert caught.value.tensor == "w"
