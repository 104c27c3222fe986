"""Loading to where the tensors shall be: in waves, straight into their memory, damage located as on the CPU."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same, tensor_bits
from engine_backend import CPU, CopyingBackend, on_cpu, zoo

import thinpoint
from thinpoint import errors
from thinpoint.codec.backend import get_backend
from thinpoint.engine import fetch, restore, runs, views
from thinpoint.engine.backends import Devices
from thinpoint.engine.into import load_state_into
from thinpoint.engine.load import StorageLoader, load_object
from thinpoint.engine.restore import DeviceTarget, Restorer
from thinpoint.engine.save import write_file
from thinpoint.engine.verify import VerifyReport, verify_file
from thinpoint.engine.views import StridedView, read_view
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader
from thinpoint.state.flatten import flatten
from thinpoint.store import FileObjectSink, FileObjectSource, open_source

ZOO = zoo()


@pytest.fixture(scope="module")
def zoo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("zoo") / "s.thin"
    thinpoint.save(ZOO, path)
    return path


@pytest.fixture
def small_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of about 2 blocks of FP32, read in pieces of 100,003 bytes."""
    monkeypatch.setattr(runs, "WAVE_BYTES", 2 << 20)
    monkeypatch.setattr(restore, "DEVICE_RUN_BYTES", 1 << 20)
    monkeypatch.setattr(fetch, "READ_BYTES", 100_003)


@contextmanager
def opened(file: Any, num_threads: int = 2) -> Iterator[tuple[FileReader, Workers]]:
    with open_source(file) as source, Workers(num_threads) as workers:
        yield FileReader(source), workers


def load(file: Any, devices: Devices, num_threads: int = 2, **options: Any) -> Any:
    with opened(file, num_threads) as (reader, workers):
        return load_object(reader, get_backend("cpu"), workers, devices=devices, **options)


def load_into(file: Any, state: Any, devices: Devices, **options: Any) -> Any:
    with opened(file) as (reader, workers):
        return load_state_into(reader, get_backend("cpu"), workers, state, devices=devices, **options)


def assert_same_zoo(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_array_equal(loaded.pop("array"), expected["array"])
    assert_same(loaded, {key: value for key, value in expected.items() if key != "array"})


@pytest.mark.parametrize("num_threads", [1, 4])
def test_everything_comes_back_in_one_wave(zoo_file: Path, num_threads: int) -> None:
    backend = CopyingBackend()
    done: list[int] = []
    loaded = load(zoo_file, on_cpu(backend), num_threads, progress=done.append)
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()
    assert_same_zoo(loaded, ZOO)
    assert len(backend.decoded) == 1
    # The text and the array come after the tensors.
    assert done[-1] - sum(backend.decoded[0]) == 300_000
    assert done == sorted(done)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_everything_comes_back_in_many_waves(zoo_file: Path, small_waves: None, num_threads: int) -> None:
    backend = CopyingBackend()
    assert_same_zoo(load(zoo_file, on_cpu(backend), num_threads), ZOO)
    assert len(backend.decoded) > 5
    # The constant part is larger than a wave, and is one item.
    assert sorted(map(sum, backend.decoded))[-2] <= 2 << 20


class CountingSource(FileObjectSource):
    """Notes offset and size of every read."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, size: int) -> np.ndarray:
        self.reads.append((offset, size))
        return super().read_at(offset, size)

    def read_into(self, offset: int, buffer: Any) -> None:
        self.reads.append((offset, memoryview(buffer).nbytes))
        super().read_into(offset, buffer)


def test_neighbours_in_the_file_are_one_read_with_their_heads(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1000 + i) for i in range(20)}
    thinpoint.save(state, tmp_path / "s.thin")
    source = CountingSource(io.BytesIO((tmp_path / "s.thin").read_bytes()))
    reader = FileReader(source)
    source.reads.clear()
    with Workers(2) as workers:
        loaded = load_object(reader, get_backend("cpu"), workers, devices=on_cpu(CopyingBackend()))
    assert_same(loaded, state)
    first, last = reader.index.parts[0], reader.index.parts[-1]
    assert source.reads == [(first.offset, last.offset + last.stored_bytes - first.offset)]


def test_a_small_part_is_one_read_on_the_cpu(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1000 + i) for i in range(20)}
    thinpoint.save(state, tmp_path / "s.thin")
    source = CountingSource(io.BytesIO((tmp_path / "s.thin").read_bytes()))
    reader = FileReader(source)
    source.reads.clear()
    with Workers(1) as workers:
        assert_same(load_object(reader, get_backend("cpu"), workers), state)
    assert sorted(set(source.reads)) == [(part.offset, part.stored_bytes) for part in reader.index.parts]


def test_file_objects_and_read_only_files(zoo_file: Path, small_waves: None) -> None:
    os.chmod(zoo_file, 0o444)
    assert_same_zoo(load(zoo_file, on_cpu(CopyingBackend())), ZOO)
    memory = io.BytesIO(zoo_file.read_bytes())
    assert_same_zoo(load(memory, on_cpu(CopyingBackend())), ZOO)


@pytest.mark.parametrize("names", [["across"], ["right", "nan"], ["gappy"], ["zeros"]])
def test_a_selection_decodes_the_blocks_it_needs(zoo_file: Path, small_waves: None, names: list[str]) -> None:
    backend = CopyingBackend()
    loaded = load(zoo_file, on_cpu(backend), names=names)
    assert list(loaded) == names
    for name in names:
        assert tensor_bits(loaded[name]) == tensor_bits(ZOO[name])
    wanted = sum(ZOO[name].numel() * ZOO[name].element_size() for name in names)
    assert sum(map(sum, backend.decoded)) <= max(wanted, 2_000_000) + (2 << 20)


def test_load_into_fills_memory_in_place(zoo_file: Path, small_waves: None) -> None:
    state = {
        key: torch.full_like(value, 1) if isinstance(value, torch.Tensor) else value
        for key, value in ZOO.items()
    }
    places = {key: value.data_ptr() for key, value in state.items() if isinstance(value, torch.Tensor)}
    backend = CopyingBackend()
    load_into(zoo_file, state, on_cpu(backend))
    for key, place in places.items():
        assert state[key].data_ptr() == place
        assert tensor_bits(state[key]) == tensor_bits(ZOO[key]), key
    assert len(backend.decoded) > 5


def test_load_into_other_strides_dtypes_and_views(
    zoo_file: Path, small_waves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "DEVICE_SPAN_BYTES", 300_000)
    state = {
        "w": torch.zeros(2400, 1400)[::2, ::2],
        "half": torch.zeros(1024, 900).t(),
        "transposed": torch.zeros(900, 640, dtype=torch.float64),
        "gappy": torch.zeros(150, 22),
        "left": torch.zeros(500_000)[-400_000:],
        "complex": torch.zeros(3000, dtype=torch.complex128),
        "ids": torch.zeros(600_001, dtype=torch.int32),
        "double": torch.zeros(4000, dtype=torch.float64)[1::2],
        "zeros": torch.ones(1_000_000).bfloat16(),
    }
    load_into(zoo_file, state, on_cpu(CopyingBackend()), strict=False, cast=True)
    for key, value in state.items():
        assert tensor_bits(value) == tensor_bits(ZOO[key].to(value.dtype)), key


def test_load_into_elements_that_are_not_aligned_to_words(tmp_path: Path) -> None:
    floats = torch.randn(50_000)
    as_bytes = floats.view(torch.uint8)
    thinpoint.save({"floats": floats, "bytes": as_bytes}, tmp_path / "s.thin")
    with thinpoint.open(tmp_path / "s.thin") as file:
        assert [part.word_bytes for part in file._reader.index.parts] == [4]
    target = torch.zeros(200_003, dtype=torch.uint8)[3:]
    load_into(tmp_path / "s.thin", {"bytes": target}, on_cpu(CopyingBackend()), strict=False)
    assert tensor_bits(target) == tensor_bits(as_bytes)


def test_views_that_share_a_part_are_filled_apart(zoo_file: Path) -> None:
    state = {"left": torch.zeros(400_000), "across": torch.zeros(400_000)}
    load_into(zoo_file, state, on_cpu(CopyingBackend()), strict=False)
    assert tensor_bits(state["left"]) == tensor_bits(ZOO["left"])
    assert tensor_bits(state["across"]) == tensor_bits(ZOO["across"])


def test_autograd_notices_what_the_device_wrote(zoo_file: Path) -> None:
    weight = torch.ones(1200, 700, requires_grad=True)
    product = (weight * weight).sum()
    load_into(zoo_file, {"w": weight}, on_cpu(CopyingBackend()), strict=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_slices_across_the_borders_of_blocks_and_waves(tmp_path: Path, small_waves: None) -> None:
    tensor = torch.randn(1 << 20, 3)
    thinpoint.save({"w": tensor}, tmp_path / "s.thin")
    block_rows = (1 << 18) // 3
    with opened(tmp_path / "s.thin") as (reader, workers):
        restorer = Restorer(reader, get_backend("cpu"), workers, devices=on_cpu(CopyingBackend()))
        whole = StridedView(storage=0, dtype=torch.float32, shape=(1 << 20, 3), stride=(3, 1), offset=0)
        for index in (
            slice(None),
            slice(block_rows, block_rows + 1),
            slice(block_rows - 1, block_rows + 2),
            slice(5, -7),
            slice(2 * block_rows, 8 * block_rows + 1),
            (slice(None, None, 100_000), slice(1, 2)),
            (slice(3, -3), 2),
            slice(7, 7),
            (12345, 1),
        ):
            view = whole.index(index)
            out = torch.empty(view.shape)
            read_view(restorer, view, out)
            assert tensor_bits(out) == tensor_bits(tensor[index]), index


def test_bytes_that_no_part_covers_become_zero(tmp_path: Path, small_waves: None) -> None:
    base = torch.randn(1_000_000)
    thinpoint.save({"a": base[:1000], "b": base[500_000:500_100]}, tmp_path / "s.thin")
    out = torch.full((4 * 500_100,), 7, dtype=torch.uint8)
    with opened(tmp_path / "s.thin") as (reader, workers):
        restorer = Restorer(reader, get_backend("cpu"), workers, devices=on_cpu(CopyingBackend()))
        restorer.fill([DeviceTarget(storage=0, start=0, out=out)])
    expected = torch.zeros(500_100)
    expected[:1000], expected[500_000:] = base[:1000], base[500_000:500_100]
    assert tensor_bits(out) == tensor_bits(expected.view(torch.uint8))
    assert_same(
        load(tmp_path / "s.thin", on_cpu(CopyingBackend())), {"a": base[:1000], "b": base[500_000:500_100]}
    )


@pytest.mark.parametrize("devices", [Devices(), on_cpu(CopyingBackend())], ids=["cpu", "device"])
def test_loaded_storages_hold_no_bytes_of_before(
    tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = StorageLoader._allocate

    def poisoned(*arguments: Any) -> torch.UntypedStorage:
        return allocate(*arguments).fill_(0xEE)

    monkeypatch.setattr(StorageLoader, "_allocate", poisoned)
    base = torch.randn(10_000)
    thinpoint.save({"a": base[:1000], "b": base[5000:5100], "c": base[9000:]}, tmp_path / "s.thin")
    loaded = load(tmp_path / "s.thin", devices)
    memory = torch.tensor([], dtype=torch.float32).set_(loaded["a"].untyped_storage())
    expected = torch.zeros(10_000)
    for part in (slice(0, 1000), slice(5000, 5100), slice(9000, None)):
        expected[part] = base[part]
    assert tensor_bits(memory) == tensor_bits(expected)
    subset = load(tmp_path / "s.thin", devices, names=["b"])["b"]
    memory = torch.tensor([], dtype=torch.float32).set_(subset.untyped_storage())
    assert tensor_bits(subset) == tensor_bits(base[5000:5100]) and int(memory.count_nonzero()) == 100


def found(call: Any) -> dict[str, Any]:
    """What an error says about the place."""
    with pytest.raises(errors.ThinpointError) as caught:
        call()
    error = caught.value
    return {
        "type": type(error),
        **{key: getattr(error, key) for key in ("what", "where", "tensor", "offset", "expected", "actual")},
    }


def test_damage_is_located_as_on_the_cpu(tmp_path: Path, small_waves: None) -> None:
    state = {"a": torch.randn(900, 1024), "ids": torch.arange(40), "b": torch.randn(700, 700).bfloat16()}
    thinpoint.save(state, tmp_path / "s.thin")
    data = (tmp_path / "s.thin").read_bytes()
    with opened(tmp_path / "s.thin") as (reader, _):
        places = []
        for part, entry in enumerate(reader.index.parts):
            head = reader.read_head(part)
            places += [entry.offset + 40]
            for plane in range(head.num_planes):
                for block in range(head.num_blocks):
                    offset, size = reader.block_range(part, head, plane, block, block + 1)
                    places += [offset + size // 2] if size else []
    assert len(places) > 10
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 4
        (tmp_path / "bad.thin").write_bytes(damaged)
        on_host = found(lambda: load(tmp_path / "bad.thin", Devices()))
        assert on_host == found(lambda: load(tmp_path / "bad.thin", on_cpu(CopyingBackend()))), place
        zeros = {key: torch.zeros_like(value) for key, value in state.items()}
        assert on_host == found(lambda: load_into(tmp_path / "bad.thin", zeros, on_cpu(CopyingBackend())))  # noqa: B023


def test_decoded_bits_that_are_wrong_are_noticed(tmp_path: Path, small_waves: None) -> None:
    class Faulty(CopyingBackend):
        def _decode(self, data: np.ndarray, item: Any) -> int:
            partial = super()._decode(data, item)
            return partial ^ (item.first_block == 1)

    thinpoint.save({"a": torch.randn(100), "w": torch.randn(800_000)}, tmp_path / "s.thin")
    with pytest.raises(errors.DigestMismatchError, match="decoded bits") as caught:
        load(tmp_path / "s.thin", on_cpu(Faulty()))
    assert caught.value.tensor == "w" and caught.value.offset and caught.value.where


def test_what_the_device_finds_malformed_is_located(tmp_path: Path) -> None:
    class Refusing(CopyingBackend):
        def _decode(self, data: np.ndarray, item: Any) -> int:
            if item.part.num_elems == 300_000:
                raise errors.MalformedFileError("a lane does not end in its state")
            return super()._decode(data, item)

    thinpoint.save({"a": torch.randn(600), "w": torch.randn(300_000)}, tmp_path / "s.thin")
    with pytest.raises(errors.MalformedFileError, match="a lane") as caught:
        load(tmp_path / "s.thin", on_cpu(Refusing()))
    assert caught.value.tensor == "w" and caught.value.where == str(tmp_path / "s.thin")
    with opened(tmp_path / "s.thin") as (reader, _):
        assert caught.value.offset == reader.index.parts[1].offset


def test_a_source_that_fails_in_the_background_reaches_the_caller(zoo_file: Path, small_waves: None) -> None:
    class Failing(FileObjectSource):
        def read_into(self, offset: int, buffer: Any) -> None:
            if memoryview(buffer).nbytes == 100_003 and offset > 3_000_000:
                raise errors.StorageError("the network is gone", errno=5)
            super().read_into(offset, buffer)

    backend = CopyingBackend()
    reader = FileReader(Failing(io.BytesIO(zoo_file.read_bytes())))
    with Workers(2) as workers, pytest.raises(errors.StorageError, match="network"):
        load_object(reader, get_backend("cpu"), workers, devices=on_cpu(backend))
    assert backend.decoded


def test_a_file_that_shrinks_meanwhile_is_truncated(tmp_path: Path) -> None:
    thinpoint.save({"w": torch.randn(800_000)}, tmp_path / "s.thin")
    with opened(tmp_path / "s.thin") as (reader, workers):
        os.truncate(tmp_path / "s.thin", 1_000_000)
        with pytest.raises(errors.TruncatedFileError):
            load_object(reader, get_backend("cpu"), workers, devices=on_cpu(CopyingBackend()))


def test_several_threads_share_an_open_file(zoo_file: Path, small_waves: None) -> None:
    # The backend refuses two calls at a time.
    with opened(zoo_file) as (reader, workers), ThreadPoolExecutor(4) as pool:
        devices = on_cpu(CopyingBackend())

        def load_again(_: int) -> Any:
            return load_object(reader, get_backend("cpu"), workers, devices=devices)

        for loaded in pool.map(load_again, range(8)):
            assert_same_zoo(loaded, ZOO)


def test_operations_share_a_device_and_wait_for_each_other(zoo_file: Path, small_waves: None) -> None:
    backend = CopyingBackend()
    weights = [torch.randn(300_000) for _ in range(3)]

    def load_or_save(turn: int) -> Any:
        if turn % 2:
            return load(zoo_file, on_cpu(backend))
        memory = io.BytesIO()
        with Workers(2) as workers:
            write_file(
                flatten(weights), FileObjectSink(memory), get_backend("cpu"), workers, devices=on_cpu(backend)
            )
        return memory.getvalue()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(load_or_save, range(10)))
    assert len(set(results[::2])) == 1
    for loaded in results[1::2]:
        assert_same_zoo(loaded, ZOO)


def test_deep_verification_on_a_device_finds_what_the_cpu_finds(tmp_path: Path) -> None:
    def check(scratch: torch.device | None) -> VerifyReport:
        with opened(tmp_path / "s.thin") as (reader, workers):
            return verify_file(
                reader,
                get_backend("cpu"),
                workers,
                deep=True,
                devices=on_cpu(backend),
                scratch=scratch,
            )

    thinpoint.save(zoo(), tmp_path / "s.thin")
    backend = CopyingBackend()
    assert check(CPU).ok and len(backend.decoded) == 1
    data = bytearray((tmp_path / "s.thin").read_bytes())
    for position in (len(data) // 4, len(data) // 2):
        data[position] ^= 1
    (tmp_path / "s.thin").write_bytes(data)
    problems = check(None).problems
    assert len(problems) == 2
    assert [str(error) for error in check(CPU).problems] == [str(error) for error in problems]


def test_a_damaged_byte_anywhere_is_noticed() -> None:
    state = {"w": torch.randn(600) * 0.1, "i": torch.arange(40), "ones": torch.ones(700), "s": "text"}
    memory = io.BytesIO()
    thinpoint.save(state, memory)
    data = bytearray(memory.getvalue())
    devices = on_cpu(CopyingBackend())
    rng = np.random.default_rng(0)
    for position in range(0, len(data), 3):
        bit = 1 << int(rng.integers(8))
        data[position] ^= bit
        with pytest.raises(errors.ThinpointError):
            load(io.BytesIO(data), devices, num_threads=1)
        data[position] ^= bit
    assert_same(load(io.BytesIO(data), devices), state)


def test_where_two_waves_have_no_memory_one_comes_after_the_other(
    zoo_file: Path, small_waves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CopyingBackend()
    begun = short = 0
    direct = restore._direct_or_scratch

    def short_beside_another(run: Any) -> torch.Tensor:
        nonlocal begun, short
        if begun > len(backend.decoded):
            short += 1
            raise torch.cuda.OutOfMemoryError("no memory")
        return direct(run)

    begin = backend.begin_decode

    def noted(data: torch.Tensor, items: Any) -> Any:
        nonlocal begun
        begun += 1
        return begin(data, items)

    monkeypatch.setattr(restore, "_direct_or_scratch", short_beside_another)
    monkeypatch.setattr(backend, "begin_decode", noted)
    assert_same_zoo(load(zoo_file, on_cpu(backend)), ZOO)
    # Every wave but the first, once.
    assert short == begun - 1 > 3
