"""Threads for one operation: made when it starts, gone when it ends, so that a fork in between inherits none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from thinpoint.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEFAULT_THREADS = 16
"""More cores than this decode faster than any storage reads; a training job needs them for itself."""


def default_threads() -> int:
    """Threads to use: THINPOINT_THREADS, else the CPUs this process may run on divided by the ranks of this node.

    Raises:
        UsageError: THINPOINT_THREADS is not a positive whole number.
    """
    text = os.environ.get("THINPOINT_THREADS")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                "THINPOINT_THREADS is not valid", expected="a whole number of at least 1", actual=repr(text)
            )
        return int(text)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cpus = len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(cpus, MAX_DEFAULT_THREADS))


class Workers:
    """Three pools of threads; a context manager. One computes, one works in the background, one copies for it.

    A pool's own threads never wait for that pool: computing and copying wait for nothing, the background thread for
    copying, the caller for all. On an error, work that has not begun is dropped and the error reaches the caller.

    Args:
        num_threads: threads that compute, and threads that copy; None for `default_threads()`.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = default_threads() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise UsageError("the number of threads is not valid", expected="at least 1", actual=num_threads)
        self._compute = ThreadPoolExecutor(self.num_threads, "thinpoint-compute")
        self._background = ThreadPoolExecutor(1, "thinpoint-background")
        self._copy = ThreadPoolExecutor(self.num_threads, "thinpoint-copy")

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Those that wait come before those that they wait for.
        for pool in (self._background, self._compute, self._copy):
            pool.shutdown(wait=True, cancel_futures=error is not None)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        """Results in the order of the items; the first error stops it."""
        return self._map(self._compute, function, items)

    def copy_map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        """As `map`, for what reads and writes: it does not queue behind what computes."""
        return self._map(self._copy, function, items)

    def _map(
        self, pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterable[Result]:
        items = list(items)
        if self.num_threads == 1 or len(items) == 1:
            return [function(item) for item in items]
        return pool.map(function, items)

    def in_background(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run on the background thread, in the order of the calls. The function may use `copy_map`."""
        return self._background.submit(function, *arguments)
