"""Collectives of the ranks of a group that end on every rank, whatever becomes of the others."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from thinpoint.checkpoint.lane import Deadline
from thinpoint.checkpoint.messages import outcome_of, packed, padded, result_of, unpacked
from thinpoint.checkpoint.signs import LOOK_S, Signs
from thinpoint.errors import CheckpointError, RanksFailedError, ThinpointError

Part = TypeVar("Part")
Result = TypeVar("Result")
Failures = dict[int, "BaseException | str"]

CONNECT_S = 1800.0
"""How long the ranks wait for the last of them to connect."""

_NEVER = timedelta(days=7)
"""The timeout of gloo's operations: who waits here gives up by deadlines and signs of life, not by gloo's clock."""

_MAX_PAUSE_S = 2e-3


class Line:
    """One gloo group of its own, for one thread at a time.

    Nothing here waits inside of torch, where nobody could give up: operations are begun and asked for. So a rank that dies
    or raises in the middle ends what runs over the line on all ranks. After an error that not all ranks share, the
    connections are in disorder: `renew` makes new ones.

    Args:
        ranks: global ranks of the group.
        signs: of these ranks.
        name: the same on all ranks, another one for each line.

    Attributes:
        rank, world_size: of this process, within the group.

    Raises (here and in all methods that are collective):
        RankLostError: a rank has ended, or gives no sign of life.
        RanksFailedError: a rank has given up.
        SaveTimeoutError: the deadline has passed.
        CheckpointError: the connections broke, though all ranks are alive.
    """

    def __init__(self, ranks: list[int], signs: Signs, name: str) -> None:
        self._ranks = ranks
        self._signs = signs
        self._name = name
        self._epoch = 0
        # Calls begun over these connections: the same on all ranks.
        self._turn = 0
        self._is_broken = False
        self.rank = ranks.index(dist.get_rank())
        self.world_size = len(ranks)
        self._group = self._connect(CONNECT_S)

    @property
    def is_broken(self) -> bool:
        """Whether this rank, or another one in what this one has gone through, has left it in disorder."""
        return self._is_broken_by(self._signs.given_up_in(self._where))

    def ready(self, most_s: float) -> None:
        """Before a call: new connections if the last one has left them in disorder. Collective.

        Raises what another rank has said of the call that this one is about to make.

        Args:
            most_s: how long to wait for the last rank to connect.
        """
        given_up_in = self._signs.given_up_in(self._where)
        if self._is_broken_by(given_up_in):
            self.renew(most_s)
        elif given_up_in is not None:
            with self._watch("begin"):
                self._signs.look(self._where)

    def give_up(self, what: str, error: BaseException) -> None:
        """Instead of the next call, on one rank: it fails on all."""
        if not self._is_broken:
            self._leave_behind()
            self._signs.give_up(self._where, self._turn + 1, what, error)

    def renew(self, most_s: float) -> None:
        """New connections. Collective. most_s: see `ready`."""
        self._epoch += 1
        self._turn = 0
        self._is_broken = False
        with self._watch("connect"):
            # Torch waits for the dead: it is not asked to.
            self._signs.look(self._where, grace_s=0)
            self._group = self._connect(most_s)

    def exchange(self, what: str, value: Any, deadline: Deadline | None = None) -> list[Any]:
        """The values of all ranks, in their order.

        Args:
            what: for messages.
            value: small; can be pickled.
        """
        with self._watch(what, deadline) as watch:
            mine = packed(value)
            sizes = self._sizes(watch, len(mine))
            found = [torch.empty(max(sizes), dtype=torch.uint8) for _ in self._ranks]
            watch.run(
                lambda: dist.all_gather(found, padded(mine, max(sizes)), group=self._group, async_op=True)
            )
            return [unpacked(one, size) for one, size in zip(found, sizes, strict=True)]

    def largest(self, what: str, values: list[int]) -> list[int]:
        """For each of the values the largest of all ranks."""
        mine = torch.tensor(values, dtype=torch.int64)
        with self._watch(what) as watch:
            watch.run(lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return [int(value) for value in mine]

    def each(
        self, what: str, function: Callable[[], Result], deadline: Deadline | None = None
    ) -> list[Result]:
        """What the function returns on every rank, in their order. If it fails on one, all raise.

        Raises:
            RanksFailedError: it failed on these ranks.
            What it raises, if that is the same on all ranks.
        """
        outcomes = self.exchange(what, outcome_of(function), deadline)
        self._raise({rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}, what)
        return [result for result, _ in outcomes]

    def lead(self, what: str, function: Callable[[], Result], deadline: Deadline | None = None) -> Result:
        """What the function returns on rank 0, which alone calls it; if it fails there, all raise that."""
        with self._watch(what, deadline) as watch:
            outcome = self._broadcast(watch, outcome_of(function) if self.rank == 0 else None)
        return result_of(outcome)

    def share(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], list[Result]],
        deadline: Deadline | None = None,
    ) -> Result:
        """Rank 0 makes of the parts of all ranks something for each; an error anywhere is raised by all."""
        with self._watch(what, deadline) as watch:
            parts = self._gather(watch, outcome_of(part))
            outcomes = None
            if parts is not None:
                made, error = outcome_of(lambda: combine(self._all_good(parts, what)))
                outcomes = (
                    [(None, error)] * self.world_size if error is not None else [(m, None) for m in made]
                )
            outcome = self._scatter(watch, outcomes)
        return result_of(outcome)

    def collect(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], Result],
        deadline: Deadline | None = None,
    ) -> Result:
        """As `share`, but rank 0 makes one thing for all."""
        with self._watch(what, deadline) as watch:
            parts = self._gather(watch, outcome_of(part))
            outcome = None if parts is None else outcome_of(lambda: combine(self._all_good(parts, what)))
            outcome = self._broadcast(watch, outcome)
        return result_of(outcome)

    def _is_broken_by(self, given_up_in: int | None) -> bool:
        return self._is_broken or (given_up_in is not None and given_up_in <= self._turn)

    @property
    def _where(self) -> str:
        return f"{self._name}/{self._epoch}"

    def _connect(self, most_s: float) -> Any:
        # On this thread: one that is left behind inside of torch would abort the process when it ends.
        group = dist.new_group(
            self._ranks, backend="gloo", timeout=timedelta(seconds=most_s), use_local_synchronization=True
        )
        _set_pg_timeout(_NEVER, group)
        return group

    def _leave_behind(self) -> None:
        """The group may hold operations that never end, and its end would wait for them: it is to have none."""
        if not self._is_broken:
            self._is_broken = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _watch(self, what: str, deadline: Deadline | None = None) -> _Watch:
        return _Watch(self, what, deadline)

    def _sizes(self, watch: _Watch, size: int) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        watch.run(lambda: dist.all_gather(sizes, torch.tensor([size]), group=self._group, async_op=True))
        return [int(size) for size in sizes]

    def _gather(self, watch: _Watch, value: Any) -> list[Any] | None:
        mine = packed(value)
        sizes = self._sizes(watch, len(mine))
        found = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.rank == 0 else None
        watch.run(
            lambda: dist.gather(
                padded(mine, max(sizes)), found, dst=self._ranks[0], group=self._group, async_op=True
            )
        )
        if found is None:
            return None
        return [unpacked(one, size) for one, size in zip(found, sizes, strict=True)]

    def _scatter(self, watch: _Watch, values: list[Any] | None) -> Any:
        parts = None if values is None else [packed(value) for value in values]
        sizes = torch.tensor([0] * self.world_size if parts is None else [len(one) for one in parts])
        watch.run(lambda: dist.broadcast(sizes, self._ranks[0], group=self._group, async_op=True))
        longest = int(sizes.max())
        mine = torch.empty(longest, dtype=torch.uint8)
        given = None if parts is None else [padded(one, longest) for one in parts]
        watch.run(lambda: dist.scatter(mine, given, self._ranks[0], group=self._group, async_op=True))
        return unpacked(mine, int(sizes[self.rank]))

    def _broadcast(self, watch: _Watch, value: Any) -> Any:
        raw = packed(value)
        size = torch.tensor([len(raw)])
        watch.run(lambda: dist.broadcast(size, self._ranks[0], group=self._group, async_op=True))
        if self.rank != 0:
            raw = torch.empty(int(size), dtype=torch.uint8)
        watch.run(lambda: dist.broadcast(raw, self._ranks[0], group=self._group, async_op=True))
        return unpacked(raw, int(size))

    def _all_good(self, outcomes: list[Any], what: str) -> list[Any]:
        self._raise({rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}, what)
        return [part for part, _ in outcomes]

    def _raise(self, failures: Failures, what: str) -> None:
        """Raises what these ranks raised: itself if all say the same, else a `RanksFailedError`. Nothing without failures."""
        if not failures:
            return
        first = next(iter(failures.values()))
        assert isinstance(first, BaseException)
        if len(failures) == self.world_size and len({(type(c), str(c)) for c in failures.values()}) == 1:
            raise first
        raise RanksFailedError(failures, f"{what} failed on some of the ranks") from first


class _Watch:
    """Waits for operations on a line, as long as the others can be expected to take part."""

    def __init__(self, line: Line, what: str, deadline: Deadline | None) -> None:
        self._line = line
        self._what = what
        self._deadline = deadline

    def __enter__(self) -> _Watch:
        self._line._turn += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._disorder(error)

    def run(self, begin: Callable[[], Any]) -> None:
        """Begins an operation and returns when it is done."""
        work = begin()
        pause_s, looked_at = 2e-5, time.monotonic()
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            if time.monotonic() - looked_at > LOOK_S:
                self._line._signs.look(self._line._where)
                if self._deadline is not None and self._deadline.remaining() == 0:
                    raise self._deadline.error(self._what)
                looked_at = time.monotonic()
        work.wait()

    def _disorder(self, error: BaseException) -> None:
        """Tells the others, and raises what says who it was."""
        line, signs = self._line, self._line._signs
        line._leave_behind()
        by_torch = isinstance(error, RuntimeError | ValueError) and not isinstance(error, ThinpointError)
        # Gloo names an address, not a rank.
        known = signs.who_is_lost(line._where) if by_torch else None
        reason = known or error
        if signs.given_up_in(line._where) is None:
            signs.give_up(line._where, line._turn, self._what, reason)
        if isinstance(reason, RanksFailedError):
            reason.what = f"{self._what}: {reason.what}"
        if known is not None:
            raise known from error
        if by_torch:
            raise CheckpointError(
                f"{self._what}: the connections of the ranks broke: {error}",
                hint=None
                if dist.is_initialized()
                else "Close the checkpointer before destroy_process_group()",
            ) from error
