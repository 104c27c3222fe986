"""Objects that only pickle can take: one pickler for a whole state, with tensors and storages taken out.

One pickler with one memo, so that objects which several pickled objects share stay shared after load; each object
is a piece of the stream, and a piece is read after the pieces before it.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

PROTOCOL = 4

TakeOut = Callable[[Any], "tuple[str, int] | None"]
"""Gives kind ("tensor", "untyped_storage", "typed_storage") and tensor id of an object to take out, else None."""

PutBack = Callable[[Any], Any]
"""Persistent id to the tensor or storage that was taken out."""

PICKLE_ERRORS = (
    pickle.PickleError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    ImportError,
)
"""What pickling an unsuitable object raises (RecursionError is a RuntimeError)."""


class StatePickler(pickle.Pickler):
    """Pickles objects one after the other into pieces of one stream."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=PROTOCOL)
        self._take_out: TakeOut | None = None
        self._classes: dict[str, None] = {}
        self._tensor_ids: dict[int, None] = {}
        self._kept: list[Any] = []

    def piece(self, obj: Any, take_out: TakeOut) -> tuple[bytes, list[int], list[str]]:
        """The bytes of one object, the tensors taken out of it, and the classes and functions it needs."""
        self._classes.clear()
        self._tensor_ids.clear()
        # The memo knows objects by address: they must outlive it.
        self._kept.append(obj)
        # Kept no longer than needed: it knows who made this pickler.
        self._take_out = take_out
        try:
            self.dump(obj)
        finally:
            self._take_out = None
        data = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return data, list(self._tensor_ids), list(self._classes)

    @property
    def num_taken(self) -> int:
        """How many different tensors were taken out of the piece under way."""
        return len(self._tensor_ids)

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        taken = self._take_out(obj) if self._take_out is not None else None
        if taken is not None:
            self._tensor_ids[taken[1]] = None
        return taken

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._classes[f"{obj.__module__}.{obj.__qualname__}"] = None
        return NotImplemented


class StateUnpickler:
    """Reads the pieces of a stream in order. Runs whatever they contain: only for files that are trusted."""

    def __init__(self) -> None:
        self._piece = _Piece()
        self._unpickler = _Unpickler(self._piece)

    def load(self, data: bytes, put_back: PutBack) -> Any:
        """The object of the next piece."""
        self._piece.set(data)
        self._unpickler.put_back = put_back
        try:
            return self._unpickler.load()
        finally:
            self._unpickler.put_back = None


class _Unpickler(pickle.Unpickler):
    put_back: PutBack | None = None

    def persistent_load(self, pid: Any) -> Any:
        if self.put_back is None:
            raise pickle.UnpicklingError("a persistent id outside of a piece")
        return self.put_back(pid)


class _Piece:
    """The file that the unpickler reads. It changes between loads, and has no `peek`: nothing is read ahead."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()

    def set(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def readline(self, size: int = -1) -> bytes:
        return self._stream.readline(size)
