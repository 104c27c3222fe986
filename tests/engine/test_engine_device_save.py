"""Saving where the tensors are: the same bytes as on the CPU, in waves, written while the next wave is encoded."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same
from engine_backend import CopyingBackend, on_cpu, zoo

import thinpoint
from thinpoint import errors
from thinpoint.codec.backend import get_backend
from thinpoint.device.contract import FinishedParts
from thinpoint.engine import encode as engine_encode
from thinpoint.engine import jobs as engine_jobs
from thinpoint.engine.backends import Devices
from thinpoint.engine.encode import MakeParts, encode_waves
from thinpoint.engine.flow import Flow
from thinpoint.engine.save import backend_names, write_file
from thinpoint.engine.workers import Workers
from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import FlatState
from thinpoint.store import FileObjectSink, open_sink


def saved(flat: FlatState, devices: Devices | None, num_threads: int = 2, **options: Any) -> bytes:
    memory = io.BytesIO()
    with Workers(num_threads) as workers:
        write_file(flat, FileObjectSink(memory), get_backend("cpu"), workers, devices=devices, **options)
    return memory.getvalue()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("wave_bytes", [1, 3_000_000, 256 << 20])
def test_bytes_are_those_of_the_cpu(
    wave_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = zoo()
    expected = saved(flatten(state), None)
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", wave_bytes)
    backend = CopyingBackend()
    done: list[int] = []
    assert saved(flatten(state), on_cpu(backend), num_threads, progress=done.append) == expected
    assert all(len(batch) == 1 or sum(batch) <= wave_bytes for batch in backend.encoded)
    assert (len(backend.encoded) == 1) == (wave_bytes == 256 << 20)
    # Text and array are no tensors: the CPU has them.
    assert sum(map(sum, backend.encoded)) + 100_000 + 200_000 == done[-1]
    assert_same(thinpoint.load(io.BytesIO(expected))["across"], state["across"])


def test_parts_of_one_region_are_spread_over_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_jobs, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(engine_encode, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 3 << 20)
    state = {"w": torch.randn(3000, 700), "v": torch.randn(5)}
    backend = CopyingBackend()
    assert saved(flatten(state), on_cpu(backend)) == saved(flatten(state), None)
    assert len(backend.encoded) == 3
    assert max(max(batch) for batch in backend.encoded) <= 1 << 20


def on_the_host(flat: FlatState, is_on_host: Callable[[tuple[Any, ...]], bool]) -> FlatState:
    """The same state, of which some storages are not on the device."""
    sources = [
        replace(source, view=None) if source.regions and is_on_host(source.regions[0].name) else source
        for source in flat.storages
    ]
    return replace(flat, storages=sources)


def test_a_few_bytes_on_the_cpu_between_do_not_cut_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = {
        i: {"step": torch.tensor(float(i)), "exp_avg": torch.randn(3000), "exp_avg_sq": torch.rand(3000)}
        for i in range(300)
    }
    flat = on_the_host(flatten({"state": moments}), lambda name: name[-1] == "step")
    backend = CopyingBackend()
    assert saved(flat, on_cpu(backend)) == saved(flatten({"state": moments}), None)
    assert [len(batch) for batch in backend.encoded] == [600]
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1_200_000)
    backend = CopyingBackend()
    saved(flat, on_cpu(backend))
    assert [len(batch) for batch in backend.encoded] == [100] * 6


def test_large_tensors_on_the_cpu_keep_their_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_jobs, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(engine_encode, "PART_BYTES", 1 << 20)
    state = {f"{place}{i}": torch.randn(200_000) for i in range(4) for place in ("host", "device")}
    flat = on_the_host(flatten(state), lambda name: name[0].startswith("host"))
    backend = CopyingBackend()
    assert saved(flat, on_cpu(backend)) == saved(flatten(state), None)
    assert [len(batch) for batch in backend.encoded] == [1] * 4


def test_the_report_names_what_took_part() -> None:
    flat = flatten({"a": torch.ones(3), "step": torch.ones(2)})
    host, devices = get_backend("cpu"), on_cpu(CopyingBackend())
    assert backend_names(flat.storages, host, devices) == "copying"
    mixed = on_the_host(flat, lambda name: name == ("a",))
    assert backend_names(mixed.storages, host, devices) == "copying+cpu"
    assert backend_names(flat.storages, host, Devices()) == "cpu"
    assert backend_names(flatten({"a": 1}).storages, host, devices) == "cpu"


class WatchedSink(FileObjectSink):
    """Calls a function before it writes."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__(io.BytesIO())
        self._before = before

    def write_all(self, buffers: Any, map: Any = map) -> None:
        self._before(self.tell())
        super().write_all(buffers, map)


def test_a_wave_is_written_while_the_next_is_encoded_and_no_more_than_four_are_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 20)
    # Nothing here is coded by the CPU, which would have waves of its own.
    monkeypatch.setattr(engine_encode, "PART_BYTES", 0)
    second_is_encoded = threading.Event()
    alive: list[int] = []

    class Watched(CopyingBackend):
        def encode_batch(self, items: Any) -> Any:
            alive.append(sum(any(part() is not None for part in batch) for batch in self.alive))
            parts = super().encode_batch(items)
            if len(self.encoded) == 2:
                second_is_encoded.set()
            return parts

    def before(offset: int) -> None:
        # The header comes first; the first wave waits until the second is encoded, the others dawdle.
        if offset == 32:
            assert second_is_encoded.wait(60)
        time.sleep(0.02)

    flat = flatten([torch.randn(1 << 18) for _ in range(8)])
    with Workers(2) as workers:
        write_file(flat, WatchedSink(before), get_backend("cpu"), workers, devices=on_cpu(Watched()))
    assert alive[0] == 0 and 1 <= max(alive) <= 4


def test_a_device_has_the_next_wave_before_the_last_one_is_sent_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 20)
    monkeypatch.setattr(engine_encode, "PART_BYTES", 0)
    calls: list[tuple[str, int]] = []

    @dataclass(frozen=True)
    class Noted(FinishedParts):
        number: int

        def send(self) -> None:
            calls.append(("send", self.number))

        def wait(self) -> None:
            calls.append(("wait", self.number))

    class Noting(CopyingBackend):
        def begin_batch(self, items: Any) -> FinishedParts:
            calls.append(("begin", len(self.encoded)))
            return Noted(number=len(self.encoded), finished=self.encode_batch(items))

    flat = flatten([torch.randn(1 << 18) for _ in range(5)])
    with Workers(2) as workers:
        flow: Flow[MakeParts] = Flow(1 << 30)
        encode_waves(flat.storages, flow, get_backend("cpu"), workers, devices=on_cpu(Noting()), seconds={})
    first = list(dict.fromkeys(calls))
    for k in range(5):
        begun, sent, waited = (first.index((verb, k)) for verb in ("begin", "send", "wait"))
        assert begun < sent < waited
        if k < 4:
            assert first.index(("begin", k + 1)) < sent
        if k < 3:
            assert first.index(("send", k + 1)) < waited


def test_an_error_of_the_writer_reaches_the_caller_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 20)
    (tmp_path / "s.thin").write_bytes(b"old")
    pwritev = os.pwritev

    def full(fd: int, views: Any, offset: int) -> int:
        if offset > 3_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)
    backend = CopyingBackend()
    flat = flatten([torch.randn(200_000) for _ in range(100)])
    save = partial(write_file, flat, backend=get_backend("cpu"), devices=on_cpu(backend))
    with (
        pytest.raises(errors.NoSpaceError) as caught,
        open_sink(tmp_path / "s.thin") as sink,
        Workers(2) as workers,
    ):
        save(sink=sink, workers=workers)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
    assert len(backend.encoded) < 100
    assert [path.name for path in tmp_path.iterdir()] == ["s.thin"]
    assert (tmp_path / "s.thin").read_bytes() == b"old"


def test_an_error_of_the_device_reaches_the_caller_and_leaves_nothing(tmp_path: Path) -> None:
    class Failing(CopyingBackend):
        def encode_batch(self, items: Any) -> Any:
            raise errors.StateChangedError("words changed")

    flat = flatten(zoo())
    with (
        pytest.raises(errors.StateChangedError),
        open_sink(tmp_path / "s.thin") as sink,
        Workers(2) as workers,
    ):
        write_file(flat, sink, get_backend("cpu"), workers, devices=on_cpu(Failing()))
    assert not list(tmp_path.iterdir())


def test_many_small_tensors_are_one_batch_and_few_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pwritev = os.pwritev

    def count(fd: int, views: Any, offset: int) -> int:
        calls.append(len(views))
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", count)
    state = {f"t{i}": torch.randn(37) for i in range(2000)}
    backend = CopyingBackend()
    with open_sink(tmp_path / "s.thin") as sink, Workers(2) as workers:
        write_file(flatten(state), sink, get_backend("cpu"), workers, devices=on_cpu(backend))
    assert [len(batch) for batch in backend.encoded] == [2000]
    assert len(calls) < 10
    assert_same(thinpoint.load(tmp_path / "s.thin"), state)


def test_a_storage_is_seen_where_it_is_and_a_text_is_not() -> None:
    weight = torch.arange(1000.0)
    flat = flatten({"w": weight[100:], "text": "x" * 100_000})
    tensor, text = flat.storages
    assert tensor.view is not None and text.view is None
    live = tensor.view(4, 12)
    assert live.data_ptr() == weight.data_ptr() + 400 + 4
    assert live.dtype == torch.uint8 and live.shape == (8,)
    assert live.numpy().tobytes() == tensor.read(4, 12).tobytes() == weight[101:103].numpy().tobytes()
