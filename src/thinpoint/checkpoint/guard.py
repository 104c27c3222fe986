"""A data file on its way into a store whose calls may never return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from thinpoint.checkpoint.lane import Lane, daemon_map
from thinpoint.store.contract import Mapper, Sink, Store


class DataFile:
    """A new file whose bytes are written on a lane; a `Sink`. The thread that waits for the lane always comes back.

    Args:
        store: where.
        lane: what runs the store's calls.
        name: in the store.
        num_threads: that write pieces at the same time.

    Attributes:
        name: in the store.
        error: what the store raised first; whoever writes may have wrapped it.

    Raises (here and in all methods but `discard`):
        StorageError: the store refused.
        SaveTimeoutError: the lane's deadline has passed.
    """

    def __init__(self, store: Store, lane: Lane, name: str, *, num_threads: int) -> None:
        self.name = name
        self.error: Exception | None = None
        self._store = store
        self._lane = lane
        self._map = daemon_map(num_threads)
        self._context: AbstractContextManager[Sink] | None = None
        self._may_be_in_place = False
        self._written = 0

        def enter() -> Sink:
            # Remembered on the lane: if this comes back too late, `discard` finds what it has to close.
            context = store.sink(name)
            sink = context.__enter__()
            self._context = context
            return sink

        try:
            self._sink = lane.once(enter)
        except Exception as error:
            self.discard(error)
            raise

    def __repr__(self) -> str:
        return self.name

    def write(self, buffer: Any) -> None:
        """See `Sink.write`."""
        self.write_all([buffer])

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        """See `Sink.write_all`. The pieces run on threads of its own: those of `map` must not get stuck."""
        taken = list(buffers)
        self._guarded(self._sink.write_all, taken, self._map)
        self._written += sum(memoryview(buffer).nbytes for buffer in taken)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._written

    def finish(self) -> None:
        """Puts the file in place, durable."""

        def leave() -> None:
            context, self._context = self._context, None
            assert context is not None
            self._may_be_in_place = True
            context.__exit__(None, None, None)

        self._guarded(leave)

    def discard(self, error: BaseException) -> None:
        """Removes what was written, in place or not, as soon as the store lets go of it."""

        def leave() -> None:
            context, self._context = self._context, None
            if context is not None:
                context.__exit__(type(error), error, None)
            elif self._may_be_in_place:
                self._store.delete(self.name)

        self._lane.finally_(leave)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._lane.once(function, *arguments)
        except Exception as error:
            self.error = self.error or error
            raise
