"""Whatever stage fails: the error reaches the caller, the old file stays, and no thread, file or memory is left."""

from __future__ import annotations

import _thread
import errno
import gc
import io
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_backend import CopyingBackend, on_cpu

import thinpoint
from thinpoint import errors
from thinpoint.codec import raw
from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.engine import encode as engine_encode
from thinpoint.engine import jobs as engine_jobs
from thinpoint.engine.save import write_file
from thinpoint.engine.workers import Workers
from thinpoint.state.flatten import flatten
from thinpoint.store import open_sink
from thinpoint.store.local import AtomicWriter


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_jobs, engine_encode):
        monkeypatch.setattr(module, "PART_BYTES", 1 << 20)


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(names)


@contextmanager
def leaves_nothing(folder: Path) -> Iterator[None]:
    """The block leaves threads, open files and the folder as they were."""
    before = threads(), open_files(), sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    yield
    assert (threads(), open_files(), sorted((p.name, p.read_bytes()) for p in folder.iterdir())) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.thin").write_bytes(b"old")
    return tmp_path


def state() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randn(300_000) for i in range(12)}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_sink_that_refuses(folder: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def full(fd: int, views: Any, offset: int) -> int:
        if offset > 3_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)
    with leaves_nothing(folder), pytest.raises(errors.NoSpaceError) as caught:
        thinpoint.save(state(), folder / "s.thin", num_threads=num_threads)
    assert caught.value.errno == errno.ENOSPC and isinstance(caught.value.__cause__, OSError)


def test_a_file_object_that_raises_something_of_its_own(folder: Path) -> None:
    class Broken(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 2_000_000:
                raise ZeroDivisionError("in the middle")
            return super().write(data)

    with leaves_nothing(folder), pytest.raises(ZeroDivisionError, match="in the middle"):
        thinpoint.save(state(), Broken())


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_commit_that_fails(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, step, refuse)
    with leaves_nothing(folder), pytest.raises(errors.StorageError) as caught:
        thinpoint.save(state(), folder / "s.thin")
    assert caught.value.errno == errno.EIO


def test_a_folder_that_does_not_exist(folder: Path) -> None:
    with leaves_nothing(folder), pytest.raises(errors.NotFoundError):
        thinpoint.save(state(), folder / "none" / "s.thin")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("nth", [1, 9])
def test_a_codec_that_raises(
    folder: Path, num_threads: int, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = HostBackend.encode

    def broken(self: HostBackend, words: Any, spec: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise errors.EncodeProofError("a part does not decode to its own bits")
        return encode(self, words, spec, **options)

    monkeypatch.setattr(HostBackend, "encode", broken)
    with leaves_nothing(folder), pytest.raises(errors.EncodeProofError):
        thinpoint.save(state(), folder / "s.thin", num_threads=num_threads)
    assert len(calls) <= nth + 2


def test_a_storage_that_raises_when_it_is_read(folder: Path) -> None:
    flat = flatten(state())

    def gone(start: int, end: int) -> np.ndarray:
        raise RuntimeError("the device is gone")

    storages = [*flat.storages[:6], replace(flat.storages[6], read=gone), *flat.storages[7:]]
    with (
        leaves_nothing(folder),
        pytest.raises(RuntimeError, match="the device is gone"),
        open_sink(folder / "s.thin") as sink,
        Workers(2) as workers,
    ):
        write_file(replace(flat, storages=storages), sink, get_backend("cpu"), workers)


def test_progress_that_raises(folder: Path) -> None:
    def stop(done: int) -> None:
        if done > 4_000_000:
            raise StopIteration

    with leaves_nothing(folder), pytest.raises(StopIteration):
        thinpoint.save(state(), folder / "s.thin", progress=stop)


def test_the_error_that_came_first_is_raised_when_both_sides_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing = threading.Event()

    class Broken(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 100:
                is_writing.set()
                assert has_failed.wait(60)
                time.sleep(0.2)
                raise errors.StorageError("second")
            return super().write(data)

    has_failed = threading.Event()

    class Failing(CopyingBackend):
        def encode_batch(self, items: Any) -> Any:
            # The first batch is handed on once the third has begun.
            if len(self.encoded) == 3:
                assert is_writing.wait(60)
                has_failed.set()
                raise errors.StateChangedError("first")
            return super().encode_batch(items)

    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 20)
    flat, devices = flatten(state()), on_cpu(Failing())
    with (
        leaves_nothing(folder),
        pytest.raises(errors.StateChangedError, match="first"),
        Workers(2) as workers,
        open_sink(Broken()) as sink,
    ):
        write_file(flat, sink, get_backend("cpu"), workers, devices=devices)


def test_a_kept_error_keeps_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    encode_raw = raw.encode_raw
    has_encoded = threading.Event()

    def watched(words: Any, map: Any) -> Any:
        part = encode_raw(words, map)
        alive.append(weakref.ref(part))
        has_encoded.set()
        return part

    def refuse(*arguments: Any) -> int:
        assert has_encoded.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(raw, "encode_raw", watched)
    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(errors.StorageError) as caught:
        thinpoint.save(state(), folder / "s.thin", codec="raw")
    gc.collect()
    assert caught.value and alive
    assert not [part for part in alive if part() is not None]


@pytest.mark.parametrize("where", ["encode", "write", "commit"])
def test_ctrl_c(folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes on the main thread, at a moment in which the stage is under way."""
    interrupted = threading.Event()

    def interrupt_once() -> None:
        if not interrupted.is_set():
            interrupted.set()
            _thread.interrupt_main(signal.SIGINT)
            time.sleep(0.1)

    def after(name: str, owner: Any) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            interrupt_once()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    owners = {
        "encode": ("encode", HostBackend),
        "write": ("write_all", AtomicWriter),
        "commit": ("fsync", os),
    }
    after(*owners[where])
    with (
        leaves_nothing(folder) if where != "commit" else leaves_no_thread(),
        pytest.raises(KeyboardInterrupt),
    ):
        thinpoint.save(state(), folder / "s.thin")
    assert interrupted.is_set()
    # In mid-commit the file may be the old or the new one, but not something else.
    if (folder / "s.thin").read_bytes() != b"old":
        assert thinpoint.verify(folder / "s.thin", deep=True).ok
    assert [path.name for path in folder.iterdir()] == ["s.thin"]


@contextmanager
def leaves_no_thread() -> Iterator[None]:
    before = threads(), open_files()
    yield
    assert (threads(), open_files()) == before
