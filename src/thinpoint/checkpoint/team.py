"""The ranks that save and restore together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from thinpoint.checkpoint.lane import Deadline
from thinpoint.checkpoint.line import Line
from thinpoint.checkpoint.log import set_rank
from thinpoint.checkpoint.runs import this_process
from thinpoint.checkpoint.signs import Signs
from thinpoint.errors import UsageError


@dataclass(frozen=True)
class Agreed:
    """What all ranks decide by, at a training step.

    Attributes:
        stop: any of them is to stop.
        late: rank 0 is late with a save.
        has_failed: a save has failed, and on some rank nobody has asked why.
    """

    stop: bool
    late: bool
    has_failed: bool


_num_teams: dict[str, int] = {}


class Team:
    """The ranks of a process group, with gloo groups of its own: the user's group, NCCL or not, is never used.

    Making one is collective, and so is everything that goes over its lines.

    Args:
        process_group: whose ranks they are; True or None for all.
        lost_after_s: see `Signs`.

    Attributes:
        rank, world_size: of this process, within the group.
        calls: for the thread that calls the checkpointer.
        saves: for the save under way.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in the group.
        RankLostError, SaveTimeoutError: not all ranks could be reached.
    """

    def __init__(self, process_group: Any, lost_after_s: float) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialised",
                hint="Call torch.distributed.init_process_group first, or leave process_group out",
            )
        group = None if process_group is True else process_group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                "process_group is no group that this process belongs to", actual=repr(process_group)
            )
        set_rank(dist.get_rank())
        ranks = dist.get_process_group_ranks(group)
        self.rank, self.world_size = ranks.index(dist.get_rank()), len(ranks)
        self._renew_s = max(lost_after_s, 10.0)
        self._signs = Signs(_own_store(ranks), self.rank, self.world_size, lost_after_s)
        self.calls = Line(ranks, self._signs, "calls")
        self.saves = Line(ranks, self._signs, "saves")
        self._signs.meet(self.calls.exchange("meet", this_process()))

    def close(self) -> None:
        """Lets this rank go; not collective. The groups stay until torch.distributed ends: it would give their names, and
        with them what is left of them in its store, to the next ones."""
        self._signs.close()

    def agree(self, step: int, *, stop: bool, late: bool, has_failed: bool) -> Agreed:
        """The same on all ranks, from what each of them says. Collective.

        Raises:
            UsageError: they are at different training steps.
        """
        self.calls_ready()
        told = [step, -step, stop, late and self.rank == 0, has_failed]
        last, minus_first, *agreed = self.calls.largest("maybe_save", [int(value) for value in told])
        if last != -minus_first:
            raise UsageError(
                "the ranks call maybe_save at different training steps",
                expected=step,
                actual=f"{-minus_first} to {last}",
            )
        return Agreed(*map(bool, agreed))

    def calls_ready(self) -> None:
        """Before anything on `calls`: see `Line.ready`. Collective."""
        self.calls.ready(self._renew_s)

    def ready(self, deadline: Deadline | None = None) -> None:
        """Before a save or a restore: as `calls_ready`, for both lines. Collective."""
        self.calls_ready()
        if any(self.calls.exchange("look at the connections", self.saves.is_broken, deadline)):
            self.saves.renew(self._renew_s)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """What fails in here, on this rank alone and before a call of all, fails that call on the others."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                with suppress(Exception):
                    # Others may be waiting for this rank to connect anew.
                    self.calls_ready()
            self.calls.give_up(what, error)
            raise


def _own_store(ranks: list[int]) -> Any:
    """A part of the ranks' key-value store that no other team uses, by a connection that no other thread waits on."""
    members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    number = _num_teams[members] = _num_teams.get(members, 0) + 1
    store = _get_default_store()
    try:
        store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        # An older torch: the connection is shared.
        pass
    return dist.PrefixStore(f"thinpoint/{members}/{number}", store)
