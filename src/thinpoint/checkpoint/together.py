"""The steps of a save and of a load that many ranks do together, by the planners of torch.distributed.checkpoint.

The same as `dcp.save` and `dcp.load`, over a `Line`, whose ranks can give up: those wait inside of torch for a rank that died.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from thinpoint.checkpoint.lane import Deadline
from thinpoint.dcp.rank_state import rank_in
from thinpoint.dcp.reader import ThinReader
from thinpoint.errors import StateMismatchError

Part = TypeVar("Part")
Result = TypeVar("Result")


class Ranks(Protocol):
    """A `Line`, or a single process."""

    rank: int
    world_size: int

    def each(
        self, what: str, function: Callable[[], Result], deadline: Deadline | None = None
    ) -> list[Result]: ...

    def lead(self, what: str, function: Callable[[], Result], deadline: Deadline | None = None) -> Result: ...

    def share(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], list[Result]],
        deadline: Deadline | None = None,
    ) -> Result: ...

    def collect(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], Result],
        deadline: Deadline | None = None,
    ) -> Result: ...


class Alone:
    """A single process as a `Line`: all is done at once."""

    rank = 0
    world_size = 1

    def each(
        self, what: str, function: Callable[[], Result], deadline: Deadline | None = None
    ) -> list[Result]:
        """See `Line.each`."""
        return [function()]

    def lead(self, what: str, function: Callable[[], Result], deadline: Deadline | None = None) -> Result:
        """See `Line.lead`."""
        return function()

    def share(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], list[Result]],
        deadline: Deadline | None = None,
    ) -> Result:
        """See `Line.share`."""
        return combine([part()])[0]

    def collect(
        self,
        what: str,
        part: Callable[[], Part],
        combine: Callable[[list[Part]], Result],
        deadline: Deadline | None = None,
    ) -> Result:
        """See `Line.collect`."""
        return combine([part()])


def write_together(
    line: Ranks,
    give_state: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    write: Callable[[Callable[[], list[WriteResult]]], list[WriteResult]],
    deadline: Deadline,
) -> tuple[Metadata | None, list[list[WriteResult]]]:
    """Every rank's file, durable. What is left is `writer.finish` on rank 0, with what this returns there.

    Args:
        line: the ranks.
        give_state: the state dict of this rank, without `Stateful`s.
        writer: for this save alone.
        write: calls its argument, which writes.
        deadline: of all.
    """
    planner = DefaultSavePlanner()
    metadata: list[Metadata] = []
    written: list[list[WriteResult]] = []

    def plan_own() -> SavePlan:
        planner.set_up_planner(
            state_dict=give_state(), storage_meta=writer.storage_meta(), is_coordinator=line.rank == 0
        )
        writer.set_up_storage_writer(line.rank == 0, rank=line.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, planned = planner.create_global_plan(plans)
        metadata.append(planned)
        return writer.prepare_global_plan(plans)

    plan = line.share("plan", plan_own, plan_all, deadline)

    def write_own() -> list[WriteResult]:
        return write(lambda: writer.write_data(planner.finish_plan(plan), planner).wait())

    line.collect("write", write_own, written.extend, deadline)
    return (metadata[0] if metadata else None), written


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank has loaded.

    Attributes:
        num_tensors, num_bytes: that were filled, of this rank.
        missing: names in the state that the checkpoint does not hold.
        unexpected: names in the checkpoint for which no rank has a place.
        cast: as in `LoadIntoReport`.
    """

    num_tensors: int
    num_bytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]


def load_together(
    line: Ranks, state: dict[str, Any], reader: ThinReader, *, strict: bool, cast: bool
) -> Loaded:
    """Fills the tensors of a state dict in place, and puts other values in their places.

    Args:
        line: the ranks.
        state: without `Stateful`s.
        reader: for this load alone; its `cast` is the same.
        strict, cast: as for `thinpoint.load_into`.

    Raises:
        StateMismatchError: the checkpoint and the state differ; nothing was touched.
        RanksFailedError: it failed on these ranks; see `failures`.
        And what reading raises, if that is the same on all ranks.
    """
    planner = DefaultLoadPlanner(allow_partial_load=not strict)

    def plan_own() -> tuple[LoadPlan, Loaded]:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, line.rank == 0)
        reader.set_up_storage_reader(metadata, line.rank == 0, rank=line.rank)
        differences = _differences(planner.state_dict, metadata, strict=strict, cast=cast)
        return reader.prepare_local_plan(planner.create_local_plan()), differences

    def plan_all(parts: list[tuple[LoadPlan, Loaded]]) -> list[tuple[LoadPlan, tuple[str, ...]]]:
        # A name may have its place on one rank alone.
        unexpected = set.intersection(*(set(loaded.unexpected) for _, loaded in parts))
        if strict and unexpected:
            raise _mismatch(unexpected=sorted(unexpected))
        plans = reader.prepare_global_plan(planner.create_global_plan([plan for plan, _ in parts]))
        return [(plan, tuple(sorted(unexpected))) for plan in plans]

    found: list[Loaded] = []

    def plan_and_keep() -> tuple[LoadPlan, Loaded]:
        plan, loaded = plan_own()
        found.append(loaded)
        return plan, loaded

    plan, unexpected = line.share("plan", plan_and_keep, plan_all)
    line.each("read", lambda: reader.read_data(planner.finish_plan(plan), planner).wait())
    tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
    names = {item.dest_index.fqn for item in tensors}
    return Loaded(
        num_tensors=len(names),
        num_bytes=sum(
            item.lengths.numel() * planner.state_dict[item.dest_index.fqn].element_size() for item in tensors
        ),
        missing=found[0].missing,
        unexpected=unexpected,
        cast=found[0].cast,
    )


def _differences(flat: dict[str, Any], metadata: Metadata, *, strict: bool, cast: bool) -> Loaded:
    """How a rank's state and the checkpoint differ.

    Raises:
        StateMismatchError: they may not, by what this rank knows.
    """
    stored = metadata.state_dict_metadata
    missing = [name for name in flat if name not in stored]
    shapes, dtypes = [], []
    for name, value in flat.items():
        there = stored.get(name)
        is_tensor = hasattr(value, "dtype")
        if there is None:
            continue
        if isinstance(there, TensorStorageMetadata) != is_tensor:
            shapes.append(f"{name}: {'a tensor' if not is_tensor else 'no tensor'} in the checkpoint")
        elif isinstance(there, TensorStorageMetadata):
            if tuple(there.size) != tuple(value.shape):
                shapes.append(
                    f"{name}: {tuple(there.size)} in the checkpoint, {tuple(value.shape)} in the state"
                )
            elif there.properties.dtype != value.dtype:
                dtypes.append(
                    f"{name}: {there.properties.dtype} in the checkpoint, {value.dtype} in the state"
                )
    mismatched = [*shapes, *([] if cast else dtypes)]
    if mismatched or (strict and missing):
        raise _mismatch(missing=missing if strict else [], mismatched=mismatched)
    states = {found[0] for name in flat if (found := rank_in(name))}
    unexpected = [name for name in stored if name not in flat and (rank_in(name) or ("", 0))[0] not in states]
    return Loaded(
        num_tensors=0,
        num_bytes=0,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        cast=tuple(dtypes),
    )


def _mismatch(**lists: list[str]) -> StateMismatchError:
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in lists.items()
        if names
    ]
    return StateMismatchError(f"the checkpoint does not fit the state: {'; '.join(parts)}", **lists)  # type: ignore[arg-type]
