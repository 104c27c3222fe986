"""Writing past the page cache: the same file, or the ordinary way."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from thinpoint.errors import NoSpaceError, UsageError
from thinpoint.proof.record import filesystem
from thinpoint.store.atomic import AtomicWriter
from thinpoint.store.buffers import PIECE_BYTES
from thinpoint.store.direct import DirectFile, is_in_memory

DATA = np.random.default_rng(0).integers(0, 256, 5 * PIECE_BYTES + 1234, np.uint8)
CUTS = [0, 100, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 4096, len(DATA)]


def takes_direct_writes(folder) -> bool:
    path = Path(folder) / "probe"
    path.touch()
    direct = DirectFile()
    direct.open(str(path))
    try:
        return direct.write(0, [memoryview(bytes(PIECE_BYTES))])
    finally:
        direct.close()


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.delenv("THINPOINT_DIRECT_IO", raising=False)
    if not takes_direct_writes(tmp_path):
        pytest.skip("the disk of temporary files takes no direct writes")
    return tmp_path


@pytest.fixture
def count(monkeypatch) -> list[int]:
    """Offsets of all direct writes."""
    real, offsets = os.pwrite, []

    def pwrite(fd, data, offset):
        offsets.append(offset)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return offsets


def write(path, num_threads: int = 3) -> None:
    with ThreadPoolExecutor(num_threads) as pool, AtomicWriter(path) as sink:
        for start, end in pairwise(CUTS):
            middle = (start + end) // 2
            sink.write_all([DATA[start:middle], DATA[middle:end]], map=pool.map)
        sink.commit()


def test_whole_pieces_go_past_the_cache_and_the_file_is_the_same(disk, count):
    write(disk / "a")
    assert (disk / "a").read_bytes() == DATA.tobytes()
    # Each call begins wherever the one before has ended: the first, cut pieces of it go the ordinary way.
    assert sorted(count) == [2 * PIECE_BYTES, 4 * PIECE_BYTES]


def test_variable_turns_it_off(disk, count, monkeypatch):
    monkeypatch.setenv("THINPOINT_DIRECT_IO", "0")
    write(disk / "a")
    assert (disk / "a").read_bytes() == DATA.tobytes()
    assert count == []


@pytest.fixture
def memory():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs on this machine")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


def test_file_in_memory_is_written_by_one_thread_at_a_time_and_without_a_copy(memory, count, monkeypatch):
    real, running, most = os.pwritev, [], []

    def pwritev(fd, views, offset):
        running.append(offset)
        most.append(len(running))
        time.sleep(0.002)
        written = real(fd, views, offset)
        running.remove(offset)
        return written

    monkeypatch.setattr(os, "pwritev", pwritev)
    write(memory / "a")
    assert (memory / "a").read_bytes() == DATA.tobytes()
    assert (count, max(most)) == ([], 1)


def test_only_a_file_on_a_tmpfs_is_in_memory(memory, tmp_path):
    with open(memory / "a", "wb") as there, open(tmp_path / "a", "wb") as here:
        assert is_in_memory(there.fileno())
        assert is_in_memory(here.fileno()) == (filesystem(tmp_path) == "tmpfs")
    read_end, write_end = os.pipe()
    assert not is_in_memory(write_end)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_that_refuses_when_it_comes_to_it_gets_ordinary_writes(disk, monkeypatch, number):
    def pwrite(fd, data, offset):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(disk / "a")
    assert (disk / "a").read_bytes() == DATA.tobytes()


def test_short_direct_write_is_made_good(disk, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: 1 << 20], offset))
    write(disk / "a")
    assert (disk / "a").read_bytes() == DATA.tobytes()


def test_full_disk_is_told_and_nothing_can_be_put_in_place_afterwards(disk, monkeypatch):
    def pwrite(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with AtomicWriter(disk / "a") as sink:
        with pytest.raises(NoSpaceError):
            sink.write(DATA)
        for call in (sink.commit, lambda: sink.write(b"more")):
            with pytest.raises(UsageError, match="writing to it failed"):
                call()
    assert not (disk / "a").exists()


def test_no_descriptor_is_left_open(disk):
    before = set(os.listdir("/proc/self/fd"))
    write(disk / "a")
    with pytest.raises(KeyboardInterrupt), AtomicWriter(disk / "b") as sink:  # noqa: PT012
        sink.write(DATA)
        raise KeyboardInterrupt
    assert set(os.listdir("/proc/self/fd")) == before
