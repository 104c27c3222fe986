"""Open binary file objects: io.BytesIO, the result of `open`, and whatever behaves like them."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from typing import Any

from thinpoint.errors import StorageError, UsageError, from_os_error
from thinpoint.store.buffers import ReadAt, check_range, pieces, truncated, writable_bytes
from thinpoint.store.contract import Mapper


class FileObjectSink:
    """Writes to any object with `write`, from its current position on; never closes it.

    Args:
        file: opened for writing bytes; need not be seekable.

    Raises:
        UsageError: the object cannot write, or is a text file.
    """

    def __init__(self, file: Any) -> None:
        _refuse_text(file)
        if not callable(getattr(file, "write", None)):
            raise UsageError(f"a {type(file).__name__} has no write method", where=_name(file))
        self._file = file
        self._name = _name(file)
        self._written = 0

    def tell(self) -> int:
        """Bytes written so far through this sink."""
        return self._written

    def write(self, buffer: Any) -> None:
        """See `Sink.write`. A raw file's short writes are continued."""
        self.write_all([buffer])

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        """See `Sink.write_all`. One after the other: an object has one position."""
        for piece in (view for views in pieces(buffers) for view in views):
            done = 0
            while done < piece.nbytes:
                try:
                    count = self._file.write(piece[done:])
                except OSError as error:
                    raise from_os_error(error, "cannot write", where=self._name) from error
                except (TypeError, ValueError) as error:
                    raise UsageError(f"the object does not take bytes: {error}", where=self._name) from error
                # Objects that are no io classes often return nothing; a raw file means by it "not now".
                if count is None and isinstance(self._file, io.RawIOBase):
                    raise StorageError("the object does not take more bytes now", where=self._name)
                if count == 0:
                    raise StorageError("the object takes no more bytes", where=self._name)
                count = piece.nbytes - done if count is None else count
                done += count
                self._written += count

    def flush(self) -> None:
        """Flushes the object if it can be flushed.

        Raises:
            StorageError: the system refused.
        """
        flush = getattr(self._file, "flush", None)
        if callable(flush):
            try:
                flush()
            except OSError as error:
                raise from_os_error(error, "cannot write", where=self._name) from error


class FileObjectSource(ReadAt):
    """Reads a seekable binary file object from its current position to its end; never closes it.

    May be shared between threads: a lock guards position and read. Leaves the object's position undefined.

    Args:
        file: opened for reading bytes.

    Raises:
        UsageError: the object cannot read or seek, or is a text file.
        StorageError: the system refused.
    """

    def __init__(self, file: Any) -> None:
        _refuse_text(file)
        self._name = _name(file)
        for method in ("read", "seek", "tell"):
            if not callable(getattr(file, method, None)):
                raise self._not_seekable(f"a {type(file).__name__} has no {method} method")
        self._file: Any = file
        self._lock = threading.Lock()
        try:
            if hasattr(file, "seekable") and not file.seekable():
                raise self._not_seekable("the object cannot seek")
            self._start = file.tell()
            self._size = max(file.seek(0, io.SEEK_END) or file.tell(), self._start) - self._start
            file.seek(self._start)
        except io.UnsupportedOperation as error:
            raise self._not_seekable(f"the object cannot seek ({error})") from error
        except OSError as error:
            raise from_os_error(error, "cannot read", where=self._name) from error
        except ValueError as error:
            raise UsageError(f"the object cannot be read: {error}", where=self._name) from error

    def _not_seekable(self, what: str) -> UsageError:
        return UsageError(
            what, where=self._name, hint="Read all of it into an io.BytesIO first, or give the path of a file"
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffer: Any) -> None:
        """See `Source.read_into`."""
        view = writable_bytes(buffer)
        size = view.nbytes
        check_range(offset, size, self._size, self._name)
        with self._lock:
            if self._file is None:
                raise UsageError("the source is closed", where=self._name)
            try:
                self._file.seek(self._start + offset)
                done = 0
                while done < size:
                    count = self._read_into(view[done:])
                    if count == 0:
                        raise truncated(offset, size, offset + done, self._name)
                    done += count
            except OSError as error:
                raise from_os_error(error, "cannot read", where=self._name) from error
            except ValueError as error:
                raise UsageError(f"the object cannot be read: {error}", where=self._name) from error

    def _read_into(self, view: memoryview) -> int:
        if hasattr(self._file, "readinto"):
            return self._file.readinto(view) or 0
        data = self._file.read(view.nbytes)
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) > view.nbytes:
            raise UsageError(
                "the object's read method does not give bytes",
                where=self._name,
                expected=f"at most {view.nbytes} bytes",
                actual=type(data).__name__,
            )
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """See `Source.close`; the object itself stays open."""
        with self._lock:
            self._file = None


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"<{type(file).__name__}>"


def _refuse_text(file: Any) -> None:
    if isinstance(file, io.TextIOBase):
        raise UsageError(
            "the file is open in text mode", where=_name(file), hint="Open it in binary mode, with a b"
        )
