"""Writing to file objects."""

from __future__ import annotations

import io
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from thinpoint.errors import NoSpaceError, StorageError, UsageError
from thinpoint.store.fileobj import FileObjectSink

BUFFERS = [
    b"abc",
    bytearray(b"de"),
    memoryview(b"f"),
    np.arange(5, dtype=np.uint32),
    np.zeros((0, 3), np.uint8),
]
BYTES = b"abcdef" + np.arange(5, dtype=np.uint32).tobytes()


def test_every_kind_of_buffer_is_written_at_the_current_position():
    file = io.BytesIO(b"xx")
    file.seek(2)
    sink = FileObjectSink(file)
    for buffer in BUFFERS:
        sink.write(buffer)
    sink.flush()
    assert file.getvalue() == b"xx" + BYTES
    assert sink.tell() == len(BYTES)
    assert not file.closed


def test_many_buffers_are_written_in_order():
    parts = [bytes([i]) * (i * 37 % 50) for i in range(200)]
    file = io.BytesIO()
    sink = FileObjectSink(file)
    with ThreadPoolExecutor(4) as pool:
        sink.write_all(parts, pool.map)
    assert file.getvalue() == b"".join(parts)
    assert sink.tell() == sum(map(len, parts))


def test_short_writes_are_continued():
    class Short(io.RawIOBase):
        data = b""

        def writable(self):
            return True

        def write(self, buffer):
            self.data += bytes(buffer[:3])
            return min(3, len(buffer))

    file = Short()
    FileObjectSink(file).write(BYTES)
    assert file.data == BYTES


def test_objects_whose_write_returns_nothing_are_taken_at_their_word():
    class Collector:
        def __init__(self):
            self.data = b""

        def write(self, buffer):
            self.data += bytes(buffer)

    file = Collector()
    sink = FileObjectSink(file)
    sink.write(BYTES)
    sink.flush()
    assert file.data == BYTES and sink.tell() == len(BYTES)


@pytest.mark.timeout(30)
def test_socket_is_written():
    left, right = socket.socketpair()
    data = np.random.default_rng(0).bytes(3_000_000)
    received = bytearray()

    def receive() -> None:
        while piece := right.recv(65536):
            received.extend(piece)

    thread = threading.Thread(target=receive)
    thread.start()
    with left, left.makefile("wb") as file:
        sink = FileObjectSink(file)
        sink.write(data)
        sink.flush()
    thread.join()
    right.close()
    assert received == data


@pytest.mark.parametrize("answer", [0, None])
def test_raw_object_that_takes_nothing_is_an_error_not_a_hang(answer):
    class Stuck(io.RawIOBase):
        def write(self, buffer):
            return answer

    with pytest.raises(StorageError):
        FileObjectSink(Stuck()).write(b"x")


def test_full_object_gives_no_space():
    class Full(io.RawIOBase):
        is_full = True

        def write(self, buffer):
            raise OSError(28, "No space left on device")

        def flush(self):
            if self.is_full:
                raise OSError(28, "No space left on device")

    file = Full()
    sink = FileObjectSink(file)
    with pytest.raises(NoSpaceError):
        sink.write(b"x")
    with pytest.raises(NoSpaceError):
        sink.flush()
    # It is flushed once more when it is let go of.
    file.is_full = False


def test_objects_that_take_no_bytes_are_refused(tmp_path):
    for file in (object(), io.StringIO(), None):
        with pytest.raises(UsageError):
            FileObjectSink(file)
    with open(tmp_path / "text", "w", encoding="utf-8") as file, pytest.raises(UsageError, match="text mode"):
        FileObjectSink(file)
    closed = io.BytesIO()
    sink = FileObjectSink(closed)
    closed.close()
    with pytest.raises(UsageError):
        sink.write(b"x")
