"""Threads for one operation: made when they are first needed, gone when it ends."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from thinpoint.engine.budget import local_ranks
from thinpoint.errors import UsageError

Item = TypeVar("Item")
Middle = TypeVar("Middle")
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
    return max(1, min(len(os.sched_getaffinity(0)) // local_ranks(), MAX_DEFAULT_THREADS))


def checked_threads(num_threads: int | None) -> int:
    """A number of threads; None for `default_threads()`.

    Raises:
        UsageError: it is not positive, or THINPOINT_THREADS is not.
    """
    if num_threads is None:
        return default_threads()
    if num_threads < 1:
        raise UsageError("the number of threads is not valid", expected="at least 1", actual=num_threads)
    return num_threads


class Pool:
    """Threads that call functions in the order given. May be shared between threads, and used after a fork.

    Unlike those of `concurrent.futures` they serve until the very end of the process, and do not keep it from ending when a
    call never returns (a disk that hangs): whoever must see the end waits for the results.

    Args:
        num_threads: at most so many, each started when there is work for it.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call on one of the threads.

        Raises:
            UsageError: the pool is closed.
        """
        if self._pid != os.getpid():
            # A fork inherits no threads, and perhaps a lock that one of them held.
            self._reset()
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise UsageError("its threads have ended: the file is closed")
            self._tasks.put((future, function, arguments))
            if len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
                # Before it starts: Ctrl-C may come while this waits for that.
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:
                    # The system has no thread to give.
                    self._threads.remove(thread)
                    raise
        return future

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of the items, all of which are under way on return; the first error drops the rest."""
        return _results([self.submit(function, item) for item in items])

    def close(self, *, cancel: bool) -> None:
        """End the threads and wait for them; `cancel` drops what has not begun."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._is_closed = True
            while cancel:
                try:
                    task = self._tasks.get_nowait()
                except Empty:
                    break
                if task is not None:
                    task[0].cancel()
            threads, self._threads = self._threads, []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _serve(tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        # Or what they hold would live until the next task.
        del task, future, function, arguments


def _results(futures: list[Future[Result]]) -> Iterator[Result]:
    futures.reverse()
    try:
        while futures:
            # Popped, so that nobody but the caller holds a result.
            yield futures.pop().result()
    finally:
        for future in futures:
            future.cancel()


def _called(function: Callable[[Item], Result], item: Item) -> Future[Result]:
    """As from a pool, but called here and now."""
    future: Future[Result] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:  # noqa: BLE001
        future.set_exception(error)
    return future


class Workers:
    """Three pools of threads; a context manager. One computes, one works in the background, one copies for it.

    A pool's own threads never wait for that pool: copying waits for nothing, computing and the background thread for
    copying, the caller for all. On an error, work that has not begun is dropped and the error reaches the caller.

    Args:
        num_threads: threads that compute, and threads that copy; None for `default_threads()`.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = checked_threads(num_threads)
        self._compute = Pool(self.num_threads, "thinpoint-compute")
        self._background = Pool(1, "thinpoint-background")
        self._copy = Pool(self.num_threads, "thinpoint-copy")

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Those that wait come before those that they wait for.
        for pool in (self._background, self._compute, self._copy):
            pool.close(cancel=error is not None)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        """Results in the order of the items; the first error stops it."""
        return self._map(self._compute, function, items)

    def copy_map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        """As `map`, for what reads and writes: it does not queue behind what computes."""
        return self._map(self._copy, function, items)

    def _map(self, pool: Pool, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
        items = list(items)
        if self.num_threads == 1 or len(items) == 1:
            return [function(item) for item in items]
        return pool.map(function, items)

    def staged(
        self,
        copy: Callable[[Item], Middle],
        compute: Callable[[Item, Future[Middle]], Result],
        items: Iterable[Item],
    ) -> Iterator[Result]:
        """Results of `compute(item, future of copy(item))`, in the order of the items; the first error stops it.

        `copy` runs ahead of `compute`, on the threads that copy: at most 2 (threads + 1) items are under way. A single item is
        done by the caller's thread.
        """
        items = iter(items)
        under_way: deque[tuple[Future[Middle], Future[Result]]] = deque()
        waiting = list(itertools.islice(items, 2))
        if len(waiting) == 1:
            yield compute(waiting[0], _called(copy, waiting[0]))
            return
        try:
            for item in itertools.chain(waiting, items):
                if len(under_way) == 2 * (self.num_threads + 1):
                    yield under_way.popleft()[1].result()
                copied = self._copy.submit(copy, item)
                under_way.append((copied, self._compute.submit(compute, item, copied)))
            while under_way:
                yield under_way.popleft()[1].result()
        finally:
            for pair in under_way:
                for future in pair:
                    future.cancel()

    def in_background(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run on the background thread, in the order of the calls. The function may use `copy_map`."""
        return self._background.submit(function, *arguments)
