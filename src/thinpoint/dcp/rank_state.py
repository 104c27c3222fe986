"""State that each rank has for itself: random generators, data loaders. Every rank's is kept, none is taken for a copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinpoint.errors import StateMismatchError, UsageError

_NAME = re.compile(r"(?:(.*)\.)?rank([0-9]{5,})", re.DOTALL)


@dataclass(frozen=True)
class RankState:
    """What one rank's `PerRank` hands to the planner, which must not look into it, and what it gets back.

    Attributes:
        values: the value of `rank`, alone; or those of all ranks in order, if it was saved with another number of ranks.
        world_size: ranks that saved it.
        rank: whose value it is; None if `values` are those of all.
        name: the state's name in the checkpoint, for messages; empty if not known.
    """

    values: list[Any]
    world_size: int
    rank: int | None
    name: str = ""


def rank_name(rank: int) -> str:
    """The last key in the name of a rank's own state."""
    return f"rank{rank:05d}"


def rank_in(fqn: str) -> tuple[str, int] | None:
    """(name of the state, rank) for the name of a rank's own state, as in "loader.rank00002"; None for any other name."""
    found = _NAME.fullmatch(fqn)
    if found is None or rank_name(int(found[2])) != f"rank{found[2]}":
        return None
    return found[1] or "", int(found[2])


class PerRank:
    """Wraps what is another one on every rank, so that all are saved, each under its rank's name.

    Goes into a state dict in its object's place: `{"model": ..., "loader": PerRank(loader)}`. Without torch.distributed it is
    rank 0 of 1.

    Args:
        obj: has `state_dict` and `load_state_dict`; or is a dict, whose items are replaced by a restore.
        merge: called with (values of all saved ranks in order, this rank, number of ranks now) where a checkpoint of
            another number of ranks is loaded; returns what this rank is to load. None: that is an error.
        process_group: the group that saves and loads, all of it: its ranks count; None for the default group.

    Raises:
        UsageError: the object is neither.
    """

    def __init__(
        self,
        obj: Any,
        merge: Callable[[list[Any], int, int], Any] | None = None,
        *,
        process_group: Any = None,
    ) -> None:
        self._is_dict = isinstance(obj, dict)
        if not self._is_dict and not all(
            callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            raise UsageError(
                "the state of a rank must have `state_dict` and `load_state_dict`, or be a dict",
                actual=type(obj).__name__,
            )
        self._obj = obj
        self._merge = merge
        self._group = process_group

    def state_dict(self) -> dict[str, RankState]:
        """The object's state, under this rank's name."""
        rank, world_size = rank_and_size(self._group)
        value = dict(self._obj) if self._is_dict else self._obj.state_dict()
        return {rank_name(rank): RankState([value], world_size, rank)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hands the object its state back.

        Raises:
            StateMismatchError: it was saved with another number of ranks, and there is no `merge`; or this rank's is
                missing.
        """
        rank, world_size = rank_and_size(self._group)
        found = state_dict.get(rank_name(rank))
        if not isinstance(found, RankState):
            raise StateMismatchError(
                f"the checkpoint has no state of {rank_name(rank)} for {type(self._obj).__name__}",
                missing=[rank_name(rank)],
            )
        value = self._value(found, rank, world_size)
        if self._is_dict:
            self._obj.clear()
            self._obj.update(value)
        else:
            self._obj.load_state_dict(value)

    def _value(self, found: RankState, rank: int, world_size: int) -> Any:
        if found.world_size == world_size and found.rank in (rank, None):
            return found.values[0 if found.rank == rank else rank]
        named = rank_in(found.name)
        what = (named[0] if named else found.name) or type(self._obj).__name__
        if self._merge is None:
            raise StateMismatchError(
                f"the state of each rank {what!r} was saved by {found.world_size} ranks and is loaded by {world_size}",
                mismatched=[what],
                hint="Give PerRank a function `merge(values, rank, world_size)` that says what a rank is to load",
            )
        if found.rank is not None:
            raise StateMismatchError(
                f"only the state of rank {found.rank} of {what!r} was read, not those of all {found.world_size} ranks",
                mismatched=[what],
            )
        return self._merge(list(found.values), rank, world_size)


def rank_and_size(process_group: Any = None) -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)
