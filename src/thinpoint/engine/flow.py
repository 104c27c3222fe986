"""From one stage to the next: items in order, a limit on the bytes that are between, and one error that ends both."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from thinpoint.store.contract import Mapper

Item = TypeVar("Item")


class Flow(Generic[Item]):
    """A bounded queue between two threads, in which the first error of either side is raised on both.

    One side calls `reserve`, makes an item and `put`s it, and in the end calls `close`; the other calls `drain`. Whichever
    side fails calls `stop`, and the other learns of it at its next call. Others may call `stop` to cancel.

    Args:
        limit_bytes: what may be reserved at a time; a single item may be larger than it.
        drains_late: `drain` begins only once all items are there, or there is no room for more: both sides share one
            interpreter, so that either slows the other down.

    Attributes:
        peak_bytes: the most that was reserved at a time.
        has_waited: whether `reserve` ever had to wait for `drain`.
    """

    def __init__(self, limit_bytes: int, *, drains_late: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self._must_wait = drains_late
        self.peak_bytes = 0
        self.has_waited = False
        self._reserved_bytes = 0
        self._items: deque[tuple[Item, int]] = deque()
        self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def error(self) -> BaseException | None:
        """What stopped it; None as long as nothing did."""
        return self._error

    def has_room(self, num_bytes: int) -> bool:
        """Whether `reserve` would not wait."""
        with self._changed:
            return not self._reserved_bytes or self._reserved_bytes + num_bytes <= self.limit_bytes

    def reserve(self, num_bytes: int) -> None:
        """Wait until there is room for so many bytes, and take it."""
        with self._changed:
            while (
                self._error is None
                and self._reserved_bytes
                and self._reserved_bytes + num_bytes > self.limit_bytes
            ):
                self.has_waited = True
                self._must_wait = False
                self._changed.notify_all()
                self._changed.wait()
            self.check()
            self._reserved_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._reserved_bytes)

    def put(self, item: Item, *, reserved: int, kept: int) -> None:
        """Pass an item on, which needs `kept` of the `reserved` bytes until it has been used."""
        with self._changed:
            self.check()
            self._items.append((item, kept))
            self._reserved_bytes += kept - reserved
            self.peak_bytes = max(self.peak_bytes, self._reserved_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._is_closed = True
            self._must_wait = False
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """End it on both sides; the first error counts. What has not been used is dropped."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._items.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that stopped it, if one did."""
        if self._error is not None:
            raise self._error

    def drain(self, use: Callable[[Item], Any], settle: Callable[[], Any] = lambda: None) -> None:
        """Call `use` with every item, in order, until the other side closes. Only `use` holds an item meanwhile.

        Args:
            settle: called when there is no further item yet, or none at all: `use` may hold an item until its next call, or
                until this. Its bytes count as long.
        """
        held = 0
        while True:
            if not self._items:
                settle()
                self._give_back(held)
                held = 0
            with self._changed:
                while self._error is None and (self._must_wait or not (self._items or self._is_closed)):
                    self._changed.wait()
                self.check()
                if not self._items:
                    return
                item, kept = self._items.popleft()
            use(item)
            del item
            self._give_back(held)
            held = kept

    def _give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._reserved_bytes -= num_bytes
            self._changed.notify_all()

    def unless_stopped(self, map: Mapper) -> Mapper:
        """The same `map`, which after `stop` goes through its items without calling the function.

        For a sink, which then finds nothing wrong; the next call of `check` tells.
        """

        def stoppable(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
            return map(lambda item: None if self._error is not None else function(item), items)

        return stoppable


def clear_frames(error: BaseException) -> None:
    """Let go of what the ended functions that an error and its causes passed through had in their variables.

    For errors that someone may keep: they would keep tensors and encoded parts with them.
    """
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and each not in seen:
            seen.append(each)
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]
