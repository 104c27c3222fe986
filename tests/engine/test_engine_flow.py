"""Bounded hand-over between two stages, and threads that end."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from thinpoint.engine.flow import Flow
from thinpoint.engine.workers import Pool, Workers
from thinpoint.errors import UsageError


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    pool = Pool(1, "test")
    future = pool.submit(function, *arguments)
    future.add_done_callback(lambda _: threading.Thread(target=pool.close, kwargs={"cancel": False}).start())
    return future


def test_items_come_in_order_and_within_the_limit() -> None:
    flow: Flow[int] = Flow(10)
    got: list[int] = []

    def make() -> None:
        for i in range(200):
            flow.reserve(4)
            flow.put(i, reserved=4, kept=3)
        flow.close()

    making = in_thread(make)
    flow.drain(got.append)
    making.result(10)
    assert got == list(range(200))
    assert 4 <= flow.peak_bytes <= 10


def test_what_is_held_until_the_next_item_counts_as_long() -> None:
    flow: Flow[int] = Flow(10)
    held: list[int] = []
    most: list[int] = []

    def hold(item: int) -> None:
        most.append(flow.limit_bytes - sum(flow.has_room(n) for n in range(1, 11)))
        held[:] = [item]

    def make() -> None:
        for i in range(50):
            flow.reserve(4)
            flow.put(i, reserved=4, kept=4)
        flow.close()

    making = in_thread(make)
    flow.drain(hold, held.clear)
    making.result(10)
    assert held == [] and flow.has_room(10)
    assert max(most) <= 8


def test_an_item_that_fills_the_limit_is_settled_when_no_other_can_come() -> None:
    flow: Flow[int] = Flow(10)
    settled: list[bool] = []

    def make() -> None:
        for i in range(5):
            flow.reserve(10)
            flow.put(i, reserved=10, kept=10)
        flow.close()

    making = in_thread(make)
    in_thread(flow.drain, lambda item: None, lambda: settled.append(True)).result(10)
    making.result(10)
    assert settled


def test_a_late_drain_waits_for_the_end_or_until_there_is_no_room() -> None:
    for limit_bytes, early in ((100, False), (8, True)):
        flow: Flow[int] = Flow(limit_bytes, drains_late=True)
        got: list[int] = []
        draining = in_thread(flow.drain, got.append)
        for i in range(4):
            flow.reserve(4)
            flow.put(i, reserved=4, kept=4)
        if not early:
            time.sleep(0.05)
        assert bool(got) == early
        flow.close()
        draining.result(10)
        assert got == [0, 1, 2, 3]


def test_one_item_may_be_larger_than_the_limit_but_only_alone() -> None:
    flow: Flow[str] = Flow(10)
    flow.reserve(1000)
    flow.put("large", reserved=1000, kept=900)
    small = in_thread(flow.reserve, 1)
    time.sleep(0.05)
    assert not small.done() and flow.has_waited
    flow.close()
    flow.drain(len)
    small.result(10)
    assert flow.peak_bytes == 1000


def test_what_encoding_saved_makes_room_at_once() -> None:
    flow: Flow[str] = Flow(10)
    flow.reserve(9)
    flow.put("a", reserved=9, kept=1)
    flow.reserve(9)
    assert not flow.has_waited


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_error_ends_the_side_that_makes(is_waiting: bool) -> None:
    flow: Flow[str] = Flow(10)
    error = ValueError("first")
    if is_waiting:
        flow.reserve(10)
        waiting = in_thread(flow.reserve, 10)
        time.sleep(0.05)
        flow.stop(error)
        assert waiting.exception(10) is error
    else:
        flow.stop(error)
    flow.stop(KeyError("second"))
    for call in (lambda: flow.reserve(1), lambda: flow.put("x", reserved=1, kept=1), flow.check):
        with pytest.raises(ValueError, match="first"):
            call()


def test_an_error_ends_the_side_that_uses_and_drops_what_is_between() -> None:
    class Item:
        pass

    flow: Flow[Item] = Flow(10)
    item = Item()
    alive = weakref.ref(item)
    flow.put(item, reserved=0, kept=0)
    del item
    flow.stop(ValueError("first"))
    assert alive() is None
    used: list[Item] = []
    with pytest.raises(ValueError, match="first"):
        flow.drain(used.append)
    assert not used
    waiting_flow: Flow[Item] = Flow(10)
    draining = in_thread(waiting_flow.drain, used.append)
    time.sleep(0.05)
    waiting_flow.stop(ValueError("later"))
    assert isinstance(draining.exception(10), ValueError)


def test_an_item_is_gone_before_its_room_is_given_back() -> None:
    class Item:
        pass

    flow: Flow[Item] = Flow(10)
    items: list[weakref.ref[Item]] = []
    alive: list[int] = []

    def make() -> None:
        for _ in range(50):
            flow.reserve(5)
            alive.append(sum(ref() is not None for ref in items))
            item = Item()
            items.append(weakref.ref(item))
            flow.put(item, reserved=5, kept=5)
            del item
        flow.close()

    making = in_thread(make)
    flow.drain(lambda item: time.sleep(0.001))
    making.result(10)
    assert max(alive) == 1


def test_after_stop_a_map_goes_through_its_items_without_work() -> None:
    flow: Flow[int] = Flow(1)
    done: list[int] = []

    def work(i: int) -> None:
        done.append(i)
        if i == 2:
            flow.stop(ValueError("enough"))

    assert list(flow.unless_stopped(map)(work, range(6))) == [None] * 6
    assert done == [0, 1, 2]


def threads_named(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


def test_a_pool_starts_threads_as_needed_and_ends_them() -> None:
    pool = Pool(3, "pool-a")
    assert not threads_named("pool-a")
    assert list(pool.map(lambda i: i * i, range(20))) == [i * i for i in range(20)]
    assert len(threads_named("pool-a")) == 3
    pool.close(cancel=False)
    assert not threads_named("pool-a")
    with pytest.raises(UsageError, match="ended"):
        pool.submit(int)
    pool.close(cancel=False)


def test_the_first_error_drops_what_has_not_begun() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        if i == 0:
            raise ValueError("broken")
        time.sleep(0.01)
        done.append(i)

    with pytest.raises(ValueError, match="broken"), Workers(2) as workers:
        list(workers.map(work, range(500)))
    assert len(done) < 50


def test_closing_without_cancel_finishes_what_was_asked_for() -> None:
    with Workers(1) as workers:
        futures = [workers.in_background(time.sleep, 0.001) for _ in range(20)]
    assert all(future.done() and not future.cancelled() for future in futures)


def test_a_thread_keeps_nothing_of_what_it_did() -> None:
    class Item:
        pass

    with Workers(2) as workers:
        item = Item()
        alive = weakref.ref(item)
        assert workers.in_background(lambda x: x, item).result(10) is item
        del item
        deadline = time.monotonic() + 10
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert alive() is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_gets_threads_of_its_own() -> None:
    with Workers(2) as workers:
        assert list(workers.map(abs, [-1, -2, -3])) == [1, 2, 3]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if list(workers.map(abs, [-4, -5, -6])) == [4, 5, 6] else 2
            finally:
                os._exit(code)
        assert wait_for(child) == 0


def wait_for(child: int) -> int:
    """The exit status of a forked process; kills it if it hangs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    sys.exit("the forked process hangs")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_items", [0, 1, 2, 100])
def test_two_stages_give_results_in_order(num_threads: int, num_items: int) -> None:
    with Workers(num_threads) as workers:
        staged = workers.staged(lambda i: -i, lambda i, copied: (i, copied.result()), range(num_items))
        assert list(staged) == [(i, -i) for i in range(num_items)]


def test_the_first_stage_runs_ahead_of_the_second_but_not_far() -> None:
    copied: list[int] = []
    begun: list[int] = []

    def compute(i: int, future: Future[None]) -> int:
        future.result()
        deadline = time.monotonic() + 10
        # What is to come is read while this is computed.
        while len(copied) < min(i + 2, 40) and time.monotonic() < deadline:
            time.sleep(0.001)
        begun.append(i)
        return len(copied)

    with Workers(1) as workers:
        counts = list(workers.staged(copied.append, compute, range(40)))
    assert begun == list(range(40))
    assert all(i + 2 <= count or count == 40 for i, count in enumerate(counts))
    assert all(count <= i + 1 + 4 for i, count in enumerate(counts))


@pytest.mark.parametrize("stage", ["copy", "compute"])
def test_an_error_in_either_stage_drops_the_rest(stage: str) -> None:
    begun: list[int] = []

    def copy(i: int) -> int:
        begun.append(i)
        if stage == "copy" and i == 5:
            raise ValueError("copy")
        return i

    def compute(i: int, copied: Future[int]) -> int:
        if copied.result() == 5:
            raise ValueError("compute")
        return i

    got: list[int] = []

    def collect() -> None:
        with Workers(2) as workers:
            got.extend(workers.staged(copy, compute, range(10_000)))

    before = threading.active_count()
    with pytest.raises(ValueError, match=stage):
        collect()
    assert len(begun) < 50 and threading.active_count() == before


def test_a_pool_works_on_after_the_system_had_no_thread_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1, "test")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(int)
    assert pool.submit(lambda: 7).result(10) == 7
    pool.close(cancel=False)
