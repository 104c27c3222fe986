"""Reading ranges: local files and file objects behave the same."""

from __future__ import annotations

import io
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from thinpoint.errors import (
    NotFoundError,
    StorageError,
    TruncatedFileError,
    UsageError,
)
from thinpoint.store.fileobj import FileObjectSource
from thinpoint.store.local import LocalSource
from thinpoint.store.memory import MemorySource

DATA = np.random.default_rng(0).bytes(100_003)


class ReadOnlyRead:
    """A file object with no more than read, seek and tell, which gives at most 1,000 bytes a call."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, 1000))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@pytest.fixture(params=["local", "memory", "BytesIO", "open", "unbuffered", "minimal", "not at 0"])
def source(request, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    if request.param == "local":
        with LocalSource(path) as opened:
            yield opened
    elif request.param == "memory":
        yield MemorySource(DATA)
    elif request.param == "BytesIO":
        yield FileObjectSource(io.BytesIO(DATA))
    elif request.param == "minimal":
        yield FileObjectSource(ReadOnlyRead(DATA))
    elif request.param == "not at 0":
        file = io.BytesIO(b"before" + DATA)
        file.seek(6)
        yield FileObjectSource(file)
    else:
        with open(path, "rb", buffering=0 if request.param == "unbuffered" else -1) as file:
            yield FileObjectSource(file)


class TestEverySource:
    def test_knows_its_size(self, source):
        assert source.size == len(DATA)

    @pytest.mark.parametrize(
        ("offset", "size"), [(0, 0), (0, 1), (3, 5000), (99_999, 4), (0, 100_003), (100_003, 0)]
    )
    def test_gives_exactly_the_range(self, source, offset, size):
        out = source.read_at(offset, size)
        assert out.dtype == np.uint8 and out.shape == (size,)
        assert out.ctypes.data % 8 == 0
        assert out.flags.owndata and out.flags.writeable
        assert out.tobytes() == DATA[offset : offset + size]

    @pytest.mark.parametrize(
        ("offset", "size"), [(100_003, 1), (100_000, 4), (0, 100_004), (1 << 40, 1), (0, 1 << 62)]
    )
    def test_refuses_ranges_beyond_the_end(self, source, offset, size):
        with pytest.raises(TruncatedFileError) as caught:
            source.read_at(offset, size)
        assert caught.value.where == source.name
        assert caught.value.offset == offset

    @pytest.mark.parametrize(("offset", "size"), [(0, 0), (3, 5000), (0, 100_003), (100_003, 0)])
    def test_fills_a_buffer_and_nothing_beside_it(self, source, offset, size):
        memory = np.full(size + 20, 7, np.uint8)
        source.read_into(offset, memory[10 : 10 + size])
        assert memory[10 : 10 + size].tobytes() == DATA[offset : offset + size]
        assert (memory[:10] == 7).all() and (memory[10 + size :] == 7).all()

    def test_fills_buffers_of_any_item_size(self, source):
        words = np.zeros((5, 3), np.uint32)
        source.read_into(40, words)
        assert words.tobytes() == DATA[40:100]

    def test_refuses_to_fill_beyond_the_end_or_what_is_read_only(self, source):
        with pytest.raises(TruncatedFileError):
            source.read_into(100_000, np.empty(4, np.uint8))
        with pytest.raises(UsageError):
            source.read_into(-1, np.empty(4, np.uint8))
        with pytest.raises(UsageError, match="read-only"):
            source.read_into(0, b"1234")

    @pytest.mark.parametrize(("offset", "size"), [(-1, 4), (4, -1)])
    def test_refuses_negative_ranges(self, source, offset, size):
        with pytest.raises(UsageError):
            source.read_at(offset, size)

    def test_may_be_read_by_many_threads(self, source):
        def check(offset: int) -> bool:
            return source.read_at(offset, 3000).tobytes() == DATA[offset : offset + 3000]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(0, 97_000, 211)))

    def test_cannot_be_read_once_closed(self, source):
        source.close()
        source.close()
        with pytest.raises(UsageError, match="closed"):
            source.read_at(0, 1)
        with pytest.raises(UsageError, match="closed"):
            source.read_into(0, bytearray(1))


def test_file_that_shrinks_while_it_is_read_is_truncated(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    with LocalSource(path) as source, open(path, "rb") as file:
        other = FileObjectSource(file)
        os.truncate(path, 50_000)
        for opened in (source, other):
            with pytest.raises(TruncatedFileError) as caught:
                opened.read_at(40_000, 20_000)
            assert "50,000" in str(caught.value)


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(NotFoundError) as caught:
        LocalSource(tmp_path / "nothing")
    assert isinstance(caught.value, FileNotFoundError)
    assert str(tmp_path / "nothing") in str(caught.value)


def test_paths_of_every_kind_are_opened(tmp_path):
    path = tmp_path / "größe"
    path.write_bytes(b"abc")
    os.symlink(path, tmp_path / "link")
    for name in (path, str(path), os.fsencode(path), tmp_path / "link"):
        with LocalSource(name) as source:
            assert source.read_at(0, 3).tobytes() == b"abc"


@pytest.mark.parametrize("path", [7, None, "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(UsageError):
        LocalSource(path)


@pytest.mark.timeout(30)
def test_folder_pipe_and_device_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, word in ((tmp_path, "folder"), (tmp_path / "pipe", "pipe"), (Path("/dev/null"), "device")):
        with pytest.raises(UsageError, match=word):
            LocalSource(path)


def test_no_descriptor_is_left_open(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x")
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        LocalSource(path).close()
        with pytest.raises(UsageError):
            LocalSource(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_file_object_stays_open_and_names_itself(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    with open(path, "rb") as file:
        source = FileObjectSource(file)
        assert source.name == str(path)
        source.close()
        assert not file.closed
    assert FileObjectSource(io.BytesIO()).name == "<BytesIO>"


def test_position_beyond_the_end_is_an_empty_source():
    file = io.BytesIO(b"abc")
    file.seek(10)
    assert FileObjectSource(file).size == 0


def test_objects_that_cannot_seek_are_refused_with_a_way_out(tmp_path):
    read_end, write_end = os.pipe()
    left, right = socket.socketpair()
    with (
        os.fdopen(read_end, "rb") as pipe,
        os.fdopen(write_end, "wb"),
        left,
        right,
        left.makefile("rb") as stream,
    ):
        for file in (pipe, stream, object(), [b"x"]):
            with pytest.raises(UsageError, match="BytesIO first"):
                FileObjectSource(file)


def test_text_files_are_refused(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    with open(path, encoding="utf-8") as file, pytest.raises(UsageError, match="text mode"):
        FileObjectSource(file)


def test_object_that_is_closed_or_write_only_is_refused(tmp_path):
    closed = io.BytesIO(b"abc")
    closed.close()
    with pytest.raises(UsageError):
        FileObjectSource(closed)
    with open(tmp_path / "out", "wb") as file:
        file.write(b"abc")
        file.seek(0)
        source = FileObjectSource(file)
        with pytest.raises((UsageError, StorageError)):
            source.read_at(0, 1)


def test_read_that_gives_no_bytes_is_refused():
    class Texts(ReadOnlyRead):
        def read(self, size):
            return "x" * size

    with pytest.raises(UsageError, match="does not give bytes"):
        FileObjectSource(Texts(b"abc")).read_at(0, 3)


def test_failing_object_gives_a_storage_error_with_its_errno():
    class Broken(ReadOnlyRead):
        def read(self, size):
            raise OSError(5, "Input/output error")

    with pytest.raises(StorageError) as caught:
        FileObjectSource(Broken(b"abc")).read_at(0, 3)
    assert caught.value.errno == 5


def test_slow_object_does_not_mix_up_threads():
    lock = threading.Lock()

    class Interrupted(ReadOnlyRead):
        def read(self, size):
            with lock:
                return super().read(min(size, 7))

    source = FileObjectSource(Interrupted(DATA))
    with ThreadPoolExecutor(4) as pool:
        offsets = range(0, 5000, 97)
        results = pool.map(lambda offset: source.read_at(offset, 500).tobytes(), offsets)
        assert list(results) == [DATA[offset : offset + 500] for offset in offsets]
