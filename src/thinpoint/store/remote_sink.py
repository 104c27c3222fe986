"""Writes a file to an fsspec file system part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from thinpoint.errors import AlreadyExistsError, UsageError
from thinpoint.store.contract import Mapper
from thinpoint.store.remote_errors import RemoteErrors
from thinpoint.store.remote_files import RemoteFiles, Upload

Part = tuple[int, list[memoryview]]
"""Its number, and its bytes."""


@contextmanager
def remote_sink(
    files: RemoteFiles, errors: RemoteErrors, name: str, *, overwrite: bool
) -> Iterator[RemoteSink]:
    """A new file; leaving the block without an error puts it in place, else it never was."""
    with errors.translated("cannot write the file", name):
        if not overwrite and _exists(files, name):
            raise AlreadyExistsError(
                "the file exists already",
                where=errors.where(name),
                hint="Choose another name, or allow overwriting",
            )
        upload = files.upload(name, overwrite)
    sink = RemoteSink(upload, errors, name)
    try:
        yield sink
        sink.finish()
    except BaseException:
        # What goes wrong now must not hide why.
        with suppress(Exception):
            upload.abort()
        raise


def _exists(files: RemoteFiles, name: str) -> bool:
    try:
        files.stat(name)
    except FileNotFoundError:
        return False
    return True


class RemoteSink:
    """Cuts what it takes into parts and uploads them; a `Sink`. Holds less than one part between calls."""

    def __init__(self, upload: Upload, errors: RemoteErrors, name: str) -> None:
        self._upload = upload
        self._errors = errors
        self._name = name
        self._num_parts = 0
        self._rest = bytearray()
        self._written = 0
        self._is_open = True

    @property
    def name(self) -> str:
        """The file's URL, without secrets."""
        return self._errors.where(self._name)

    def tell(self) -> int:
        """See `Sink.tell`."""
        return self._written

    def write(self, buffer: Any) -> None:
        """See `Sink.write`."""
        self.write_all([buffer])

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        """See `Sink.write_all`. Where parts may be uploaded side by side, each thread of `map` holds a copy of one."""
        self._check_open()
        views = [_bytes_of(buffer) for buffer in buffers]
        size = sum(view.nbytes for view in views)
        if len(self._rest) + size < self._upload.part_bytes(self._num_parts):
            for view in views:
                self._rest += view
        else:
            self._is_open = False
            parts, rest = self._cut([memoryview(self._rest), *views])
            self._put(parts, map)
            self._num_parts += len(parts)
            self._rest = bytearray().join(rest)
            self._is_open = True
        self._written += size

    def finish(self) -> None:
        """Uploads what is left and puts the file in place; blocks until it is durable."""
        self._check_open()
        self._is_open = False
        with self._errors.translated("cannot write the file", self._name):
            self._upload.finish(self._num_parts, [memoryview(self._rest)])

    def _put(self, parts: list[Part], map: Mapper) -> None:
        failures: list[Exception] = []

        def put(part: Part) -> None:
            # Failures are collected: on return no part may be under way any more.
            if not failures:
                try:
                    self._upload.put_part(*part)
                except Exception as error:  # noqa: BLE001
                    failures.append(error)

        if self._upload.parallel:
            list(map(put, parts))
        else:
            for part in parts:
                put(part)
        if failures:
            with self._errors.translated("cannot write the file", self._name):
                raise failures[0]

    def _cut(self, views: list[memoryview]) -> tuple[list[Part], list[memoryview]]:
        """Whole parts, and the views that are left; no copy."""
        parts: list[Part] = []
        part: list[memoryview] = []
        room = self._upload.part_bytes(self._num_parts)
        for view in views:
            while view.nbytes:
                part.append(view[:room])
                room -= part[-1].nbytes
                view = view[part[-1].nbytes :]
                if room == 0:
                    parts.append((self._num_parts + len(parts), part))
                    part, room = [], self._upload.part_bytes(self._num_parts + len(parts))
        return parts, part

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("the file is finished, or writing to it failed", where=self.name)


def _bytes_of(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")
