"""What a user does with save, load, open, load_into and verify, and what can go wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same, tensor_bits
from torch import nn

import thinpoint
from thinpoint import errors
from thinpoint.codec.backend import get_backend
from thinpoint.engine.save import write_file
from thinpoint.engine.workers import Workers
from thinpoint.state.flatten import flatten
from thinpoint.store import open_sink


def training_state(steps: int = 3, width: int = 96) -> dict[str, Any]:
    """A real, small training state: model, AdamW, scheduler, RNG, numbers and text."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(300, width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 300)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        tokens = torch.randint(0, 200, (8, 16))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    schedule = {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule,
        "rng": torch.get_rng_state(),
        "step": steps,
        "loss": [loss.item()],
        "note": "naïve",
    }


def big_state() -> dict[str, torch.Tensor]:
    """Tensors of several blocks, one in BF16, one transposed."""
    generator = torch.Generator().manual_seed(1)
    return {
        "w": torch.randn(1500, 700, generator=generator) * 0.02,
        "half": (torch.randn(900, 1024, generator=generator) * 0.02).bfloat16(),
        "transposed": torch.randn(640, 900, generator=generator).t(),
        "step": torch.tensor(7.0),
    }


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("codec", ["thin", "zstd", "raw"])
def test_a_training_state_comes_back_bit_for_bit(tmp_path: Path, codec: str, backend: str) -> None:
    state = training_state()
    report = thinpoint.save(state, tmp_path / "state.thin", codec=codec, backend=backend)
    assert report.file_bytes == (tmp_path / "state.thin").stat().st_size
    assert (report.codec, report.backend) == (codec, backend)
    assert_same(
        thinpoint.load(tmp_path / "state.thin"),
        {**state, "model": thinpoint.load(tmp_path / "state.thin")["model"]},
    )
    assert_same(dict(thinpoint.load(tmp_path / "state.thin")["model"]), dict(state["model"]))


def test_the_model_and_optimizer_load_it(tmp_path: Path) -> None:
    state = training_state()
    thinpoint.save(state, tmp_path / "state.thin")
    loaded = thinpoint.load(tmp_path / "state.thin")
    model = nn.Sequential(nn.Embedding(300, 96), nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 300))
    model.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    assert tensor_bits(optimizer.state_dict()["state"][0]["exp_avg"]) == tensor_bits(
        state["optimizer"]["state"][0]["exp_avg"]
    )


def test_same_bytes_whatever_the_backend_and_the_number_of_threads(tmp_path: Path) -> None:
    state = {"optimizer": training_state()["optimizer"], **big_state()}
    files = []
    for i, options in enumerate(
        ({"num_threads": 1}, {"num_threads": 3}, {"backend": "reference"}, {"prove": True})
    ):
        thinpoint.save(state, tmp_path / f"{i}.thin", **options)  # type: ignore[arg-type]
        files.append((tmp_path / f"{i}.thin").read_bytes())
    assert len(set(files)) == 1


def test_roles_are_reported(tmp_path: Path) -> None:
    roles = thinpoint.save(training_state(), tmp_path / "s.thin").roles
    assert set(roles) == {"weight", "first_moment", "second_moment", "other"}
    assert roles["weight"][0] == roles["first_moment"][0] == roles["second_moment"][0]


def test_file_objects(tmp_path: Path) -> None:
    state = training_state()
    memory = io.BytesIO()
    thinpoint.save(state, memory)
    memory.seek(0)
    assert_same(thinpoint.load(memory)["optimizer"], state["optimizer"])
    with (tmp_path / "x.thin").open("wb") as file:
        thinpoint.save(state, file)
    with (tmp_path / "x.thin").open("rb") as file:
        assert_same(thinpoint.load(file)["optimizer"], state["optimizer"])
    with pytest.raises(errors.UsageError, match="text mode"), (tmp_path / "x.txt").open("w") as file:
        thinpoint.save(state, file)
    with pytest.raises(errors.UsageError, match="binary file object"):
        thinpoint.save(state, 7)


class CountingFile(io.BytesIO):
    """A file that counts the bytes that are read from it."""

    num_read = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.num_read += count
        return count

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data


def counting(state: Any) -> CountingFile:
    file = CountingFile()
    thinpoint.save(state, file)
    file.seek(0)
    return file


def test_a_subset_reads_little_else() -> None:
    state = big_state()
    file = counting(state)
    subset = thinpoint.load(file, names=["half"])
    assert_same(subset, {"half": state["half"]})
    assert file.num_read < 0.4 * len(file.getvalue())


def test_names_select_by_prefix_glob_and_tuple(tmp_path: Path) -> None:
    state = training_state()
    thinpoint.save(state, tmp_path / "s.thin")
    load = lambda names: thinpoint.load(tmp_path / "s.thin", names=names)  # noqa: E731
    assert_same(load("optimizer")["optimizer"], state["optimizer"])
    assert load(["step", "note"]) == {"step": 3, "note": "naïve"}
    assert set(load("*.exp_avg")["optimizer"]["state"]) == set(state["optimizer"]["state"])
    assert list(load(("optimizer", "state", 0, "exp_avg"))["optimizer"]["state"][0]) == ["exp_avg"]
    with pytest.raises(errors.UnknownNameError, match="optimizer"):
        load("optimiser")


@pytest.mark.parametrize(
    "index",
    [
        (slice(10, 20),),
        (slice(None, None, 700),),
        (Ellipsis, slice(3, 9)),
        (7,),
        (slice(1490, None), slice(None, None, 3)),
        (None, 5, slice(2, 4)),
        (slice(5, 5),),
        (0, 0),
        (),
    ],
)
def test_slices_equal_those_of_the_tensor(index: tuple[Any, ...], tmp_path: Path) -> None:
    state = big_state()
    thinpoint.save(state, tmp_path / "s.thin")
    with thinpoint.open(tmp_path / "s.thin") as file:
        for name in ("w", "half"):
            part = file[name][index]
            assert part.is_contiguous()
            assert part.shape == state[name][index].shape
            assert tensor_bits(part) == tensor_bits(state[name][index])
        assert tensor_bits(file["transposed"][100:300, 5]) == tensor_bits(state["transposed"][100:300, 5])


def test_a_slice_decodes_only_the_blocks_it_touches() -> None:
    file = counting({"w": torch.randn(8000, 512)})
    with thinpoint.open(file) as opened:
        before = file.num_read
        opened["w"][4000:4010]
        assert file.num_read - before < len(file.getvalue()) / 8
        before = file.num_read
        opened["w"][::4000, :4]
        assert file.num_read - before < len(file.getvalue()) / 4


def test_open_lists_what_the_file_holds(tmp_path: Path) -> None:
    state = training_state()
    thinpoint.save(state, tmp_path / "s.thin")
    with thinpoint.open(tmp_path / "s.thin") as file:
        assert "optimizer.state.0.exp_avg" in file and ("optimizer", "state", 0, "exp_avg") in file
        stored = file["optimizer.state.0.exp_avg"]
        assert (stored.shape, stored.dtype, stored.role, stored.device) == (
            (300, 96),
            torch.float32,
            "first_moment",
            "cpu",
        )
        assert stored.num_bytes == 300 * 96 * 4
        assert_same(stored.load(), state["optimizer"]["state"][0]["exp_avg"])
        assert len(list(file)) == len(file)
        with pytest.raises(errors.UnknownNameError):
            file["nothing.of.that.name"]
        with pytest.raises(IndexError):
            stored[300]
        with pytest.raises(TypeError):
            stored[torch.tensor([1, 2])]


def test_equal_names_need_the_keys(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(3), "a": {"b": torch.ones(3)}}
    thinpoint.save(state, tmp_path / "s.thin")
    assert_same(thinpoint.load(tmp_path / "s.thin"), state)
    with thinpoint.open(tmp_path / "s.thin") as file:
        with pytest.raises(errors.UsageError, match="2 tensors"):
            file["a.b"]
        assert file["a", "b"][0] == 1


def test_load_into_fills_what_is_there(tmp_path: Path) -> None:
    state = {**training_state(), **big_state()}
    thinpoint.save(state, tmp_path / "s.thin")
    target = {**training_state(steps=1), **{k: torch.empty_like(v) for k, v in big_state().items()}}
    kept = {key: value.data_ptr() for key, value in target["model"].items()}
    report = thinpoint.load_into(tmp_path / "s.thin", target)
    assert_same(dict(target["model"]), dict(state["model"]))
    assert_same(target["optimizer"], state["optimizer"])
    assert_same(target["transposed"], state["transposed"])
    assert (target["step"], target["loss"]) == (state["step"], state["loss"])
    assert kept == {key: value.data_ptr() for key, value in target["model"].items()}
    assert report.num_tensors == len(thinpoint.open(tmp_path / "s.thin"))


def test_load_into_other_strides_and_dtypes(tmp_path: Path) -> None:
    state = big_state()
    thinpoint.save(state, tmp_path / "s.thin")
    target = {**state, "w": torch.zeros(700, 1500).t(), "half": torch.zeros(900, 1024)}
    with pytest.raises(errors.StateMismatchError) as caught:
        thinpoint.load_into(tmp_path / "s.thin", target)
    assert len(caught.value.mismatched) == 1 and "half" in caught.value.mismatched[0]
    assert not target["w"].any()
    thinpoint.load_into(tmp_path / "s.thin", target, cast=True)
    assert tensor_bits(target["w"]) == tensor_bits(state["w"])
    assert torch.equal(target["half"], state["half"].float())


def test_load_into_lists_what_differs_and_touches_nothing(tmp_path: Path) -> None:
    thinpoint.save({"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(2)}, tmp_path / "s.thin")
    target = {"a": torch.zeros(3), "b": torch.zeros(5), "d": torch.zeros(1)}
    with pytest.raises(errors.StateMismatchError, match=r"1 missing.*1 unexpected.*1 mismatched") as caught:
        thinpoint.load_into(tmp_path / "s.thin", target)
    assert (caught.value.missing, caught.value.unexpected) == (["d"], ["c"])
    assert not target["a"].any()
    del target["b"]
    report = thinpoint.load_into(tmp_path / "s.thin", target, strict=False)
    assert (report.missing, set(report.unexpected)) == (("d",), {"b", "c"})
    assert target["a"].all()


def test_views_that_share_a_part_are_filled_and_checked_apart(tmp_path: Path) -> None:
    base = torch.randn(700_000)
    views = {"a": base[:400_000], "b": base[400_000:], "both": base[100_000:500_000]}
    thinpoint.save(views, tmp_path / "s.thin")
    target = {"a": torch.zeros(400_000), "b": torch.zeros(300_000)}
    thinpoint.load_into(tmp_path / "s.thin", target, strict=False)
    assert_same(target, {"a": views["a"].clone(), "b": views["b"].clone()})
    loaded = thinpoint.load(tmp_path / "s.thin")
    assert_same(loaded, views)
    assert loaded["a"].untyped_storage().data_ptr() == loaded["both"].untyped_storage().data_ptr()


def test_decoded_bits_that_are_wrong_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinpoint.codec.rans import cpu_kernels

    weight = torch.randn(300_000)
    thinpoint.save({"w": weight, "tied": weight}, tmp_path / "s.thin")
    join_words = cpu_kernels.join_words

    def faulty(*arguments: Any) -> None:
        join_words(*arguments)
        arguments[-1][7] ^= 1

    monkeypatch.setattr(cpu_kernels, "join_words", faulty)
    with pytest.raises(errors.DigestMismatchError, match="decoded bits"):
        thinpoint.load(tmp_path / "s.thin")
    with pytest.raises(errors.DigestMismatchError, match="decoded bits"):
        thinpoint.load_into(tmp_path / "s.thin", {"w": torch.zeros(300_000), "tied": torch.zeros(300_000)})
    with pytest.raises(errors.DigestMismatchError, match="decoded bits"):
        thinpoint.verify(tmp_path / "s.thin", deep=True)


def test_autograd_notices_a_load_into(tmp_path: Path) -> None:
    weight = torch.ones(2000, requires_grad=True)
    thinpoint.save({"w": weight.detach()}, tmp_path / "s.thin")
    product = (weight * weight).sum()
    thinpoint.load_into(tmp_path / "s.thin", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_file_from_a_gpu_loads_without_one(tmp_path: Path) -> None:
    state = {"w": torch.randn(3000), "v": torch.rand(10)}
    flat = flatten(state, device_of=lambda storage: "cuda:7")
    with open_sink(tmp_path / "s.thin") as sink, Workers() as workers:
        write_file(flat, sink, get_backend(), workers)
    loaded = thinpoint.load(tmp_path / "s.thin")
    assert_same(loaded, state)
    seen = []

    def locate(storage: Any, location: str) -> Any:
        seen.append(location)
        return storage

    assert_same(thinpoint.load(tmp_path / "s.thin", map_location=locate), state)
    assert_same(thinpoint.load(tmp_path / "s.thin", map_location={"cuda:7": "cpu"}), state)
    assert thinpoint.load(tmp_path / "s.thin", map_location="meta")["w"].device.type == "meta"
    assert seen == ["cuda:7", "cuda:7"]
    with pytest.raises(errors.UsageError, match="map_location"):
        thinpoint.load(tmp_path / "s.thin", map_location="no such device")


def test_the_environment_turns_compression_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = big_state()
    monkeypatch.setenv("THINPOINT_CODEC", "raw")
    report = thinpoint.save(state, tmp_path / "raw.thin", codec="zstd")
    assert report.codec == "raw" and report.file_bytes >= report.raw_bytes
    assert report.file_bytes < report.raw_bytes + 10_000
    monkeypatch.setenv("THINPOINT_CODEC", "gzip")
    with pytest.raises(errors.UsageError, match="gzip"):
        thinpoint.save(state, tmp_path / "no.thin")
    assert not (tmp_path / "no.thin").exists()
    monkeypatch.delenv("THINPOINT_CODEC")
    assert_same(thinpoint.load(tmp_path / "raw.thin"), state)


@pytest.mark.parametrize(("option", "value"), [("codec", "lz4"), ("backend", "tpu"), ("num_threads", 0)])
def test_options_that_make_no_sense_are_named(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match=str(value)):
        thinpoint.save({}, tmp_path / "s.thin", **{option: value})
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept_if_asked(tmp_path: Path) -> None:
    thinpoint.save({"a": 1}, tmp_path / "s.thin")
    with pytest.raises(errors.AlreadyExistsError):
        thinpoint.save({"a": 2}, tmp_path / "s.thin", overwrite=False)
    assert thinpoint.load(tmp_path / "s.thin") == {"a": 1}


def test_a_missing_file_or_folder_is_an_os_error_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        thinpoint.load(tmp_path / "none.thin")
    assert isinstance(caught.value, errors.NotFoundError) and caught.value.errno == 2
    with pytest.raises(errors.NotFoundError):
        thinpoint.save({}, tmp_path / "no" / "s.thin")


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    thinpoint.save({"a": 1}, tmp_path / "s.thin")

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    with pytest.raises(errors.UnsupportedObjectError, match="inner"):
        thinpoint.save({"inner": Unpicklable()}, tmp_path / "s.thin")
    with pytest.raises(errors.UnsupportedObjectError):
        thinpoint.save({"inner": object()}, tmp_path / "s.thin", allow_pickle=False)
    assert [p.name for p in tmp_path.iterdir()] == ["s.thin"]
    assert thinpoint.load(tmp_path / "s.thin") == {"a": 1}


def test_a_value_that_changes_during_the_save_never_reaches_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinpoint.codec import backend

    weight = torch.randn(100_000).bfloat16().float()
    make_plan = backend.make_plan

    def change_then_plan(*arguments: Any) -> Any:
        plan = make_plan(*arguments)
        weight[5] = -1.2345
        return plan

    monkeypatch.setattr(backend, "make_plan", change_then_plan)
    with pytest.raises(errors.StateChangedError):
        thinpoint.save({"w": weight}, tmp_path / "s.thin")
    assert not list(tmp_path.iterdir())


def test_a_pickled_object_needs_trust(tmp_path: Path) -> None:
    thinpoint.save({"w": torch.ones(3), "model": nn.Linear(2, 2)}, tmp_path / "s.thin")
    with pytest.raises(errors.UnsafeObjectError, match="weights_only=False"):
        thinpoint.load(tmp_path / "s.thin")
    assert isinstance(thinpoint.load(tmp_path / "s.thin", weights_only=False)["model"], nn.Linear)
    assert thinpoint.load(tmp_path / "s.thin", names=["w"])["w"].sum() == 3


def test_a_damaged_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    memory = io.BytesIO()
    thinpoint.save({"w": torch.randn(600) * 0.1, "i": torch.arange(40), "s": "text"}, memory)
    data = bytearray(memory.getvalue())
    rng = np.random.default_rng(0)
    for position in range(len(data)):
        bit = 1 << int(rng.integers(8))
        data[position] ^= bit
        with pytest.raises(errors.ThinpointError):
            thinpoint.load(io.BytesIO(data))
        with pytest.raises(errors.ThinpointError):
            thinpoint.verify(io.BytesIO(data))
        data[position] ^= bit
    thinpoint.verify(io.BytesIO(data), deep=True)


def test_verify_lists_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "s.thin"
    thinpoint.save(big_state(), path)
    assert thinpoint.verify(path).ok and thinpoint.verify(path, deep=True).ok
    data = bytearray(path.read_bytes())
    for position in (len(data) // 4, len(data) // 2, 3 * len(data) // 4):
        data[position] ^= 1
    path.write_bytes(data)
    for deep in (False, True):
        with pytest.raises(errors.DigestMismatchError) as caught:
            thinpoint.verify(path, deep=deep)
        assert len(caught.value.problems) == 3  # type: ignore[attr-defined]


def test_a_file_that_asks_for_more_memory_than_there_is_is_refused() -> None:
    from thinpoint.file.index import StorageEntry, TensorEntry
    from thinpoint.file.writer import FileWriter

    memory = io.BytesIO()
    writer = FileWriter(memory)
    writer.finish(
        storages=[StorageEntry(bytes=1 << 47, device="cpu")],
        tensors=[TensorEntry(storage=0, dtype="float32", shape=(1 << 45,), stride=(1,), offset=0)],
        tree={"tensor": 0},
        meta={},
        encoder=0,
        writer_version="0",
    )
    memory.seek(0)
    with pytest.raises(errors.LimitExceededError, match="more memory"):
        thinpoint.load(memory)


_MEMORY_SCRIPT = """
import resource, sys, torch, thinpoint
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
def now(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) << 10
small = {"w": torch.randn(300000)}
thinpoint.save(small, sys.argv[1]); thinpoint.load(sys.argv[1])
if sys.argv[2] == "save":
    state = {"w": torch.randn(600 << 18), "v": torch.rand(1 << 20)}
    start = now(); open("/proc/self/clear_refs", "w").write("5")
    thinpoint.save(state, sys.argv[3]); print(peak() - start)
else:
    start = now(); open("/proc/self/clear_refs", "w").write("5")
    state = thinpoint.load(sys.argv[3]); print(peak() - start - 4 * (601 << 18) - 4 * (3 << 18))
"""


def test_save_and_load_of_600_mb_take_little_more_memory(tmp_path: Path) -> None:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    path = os.path.join(folder, f"thinpoint-test-{os.getpid()}.thin")
    try:
        for what in ("save", "load"):
            command = [sys.executable, "-c", _MEMORY_SCRIPT, str(tmp_path / "small.thin"), what, path]
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
            assert int(output) < 400 << 20, (what, output)
    finally:
        if os.path.exists(path):
            os.remove(path)
