"""Encoded tensors put into another state: which of their parts, where, and under which names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinpoint.engine.encode import MakeParts
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.writer import NewPart
from thinpoint.state.leaves import FlatState, Region, StorageSource
from thinpoint.state.storages import MAX_ITEM_BYTES, strided_view
from thinpoint.state.tree import Path


@dataclass(frozen=True)
class Kept:
    """A staged tensor that is written.

    Attributes:
        path: where it stands.
        tensor_id: of the one that stands for it.
        record: of itself, in the staged state.
    """

    path: Path
    tensor_id: int
    record: dict[str, Any]

    @property
    def storage(self) -> int:
        """Index of its storage in the staged state."""
        index: int = self.record["storage"]
        return index

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.record["shape"]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES.get(self.record["dtype"], 1)

    def label(self) -> dict[str, Any]:
        """What salvage without an index needs to know."""
        record = self.record
        view = strided_view(
            shape=tuple(record["shape"]),
            stride=tuple(record["stride"]),
            offset=0,
            dtype=record["dtype"],
            item_bytes=self.item_bytes,
            role=record["role"],
            name=self.path,
            lazy=[flag for flag in ("conj", "neg") if record.get(flag)],
        )
        return {
            "name": list(view.name),
            "dtype": view.dtype,
            "shape": list(view.shape),
            "role": view.role,
            **view.more,
        }


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a staged storage goes.

    Attributes:
        storage: its index in the file.
        shift: bytes that are dropped in front.
        starts, ends: of the kept regions in the staged storage, sorted.
        labels: for each of them what its parts are to be called; None if that is what they are called already.
    """

    storage: int
    shift: int
    starts: list[int]
    ends: list[int]
    labels: list[dict[str, Any] | None]

    @property
    def num_bytes(self) -> int:
        """Length of what is kept."""
        return self.ends[-1] - self.shift if self.ends else 0

    def moved(self, part: NewPart) -> NewPart | None:
        """The part in its place; None if it is not kept."""
        i = bisect_right(self.starts, part.start_bytes) - 1
        if i < 0 or part.start_bytes >= self.ends[i]:
            return None
        start = part.start_bytes - self.shift
        return replace(part, storage=self.storage, start_bytes=start, label=self.labels[i] or part.label)


def places_of(state: FlatState, staged: Sequence[StorageSource], kept: list[Kept]) -> dict[int, Place]:
    """For each staged storage of which something is kept, its place in `state`."""
    inside: dict[int, dict[int, list[Kept]]] = {}
    indices: dict[int, int] = {}
    for tensor in kept:
        indices[tensor.storage] = state.tensors[tensor.tensor_id]["storage"]
        in_storage = inside.setdefault(tensor.storage, {})
        if not tensor.is_empty:
            start = tensor.record["offset"] * tensor.item_bytes
            regions = staged[tensor.storage].regions
            i = bisect_right(regions, start, key=lambda region: region.start_bytes) - 1
            in_storage.setdefault(i, []).append(tensor)
    return {old: _place(indices[old], staged[old].regions, inside[old]) for old in inside}


def _place(index: int, regions: Sequence[Region], inside: Mapping[int, list[Kept]]) -> Place:
    """The place of a storage; `inside`: for each region with kept tensors, which."""
    numbers = sorted(inside)
    labels = [
        None if any(tensor.path == regions[i].name for tensor in inside[i]) else inside[i][0].label()
        for i in numbers
    ]
    return Place(
        storage=index,
        shift=regions[numbers[0]].start_bytes // MAX_ITEM_BYTES * MAX_ITEM_BYTES if numbers else 0,
        starts=[regions[i].start_bytes for i in numbers],
        ends=[regions[i].end_bytes for i in numbers],
        labels=labels,
    )


def spliced(
    state: FlatState, staged: Sequence[StorageSource], kept: list[Kept], places: Mapping[int, Place]
) -> FlatState:
    """The state with the records of the staged tensors, and with storages of which no part is left to encode."""
    tensors, storages = list(state.tensors), list(state.storages)
    for tensor in kept:
        place = places[tensor.storage]
        shift = 0 if tensor.is_empty else place.shift // tensor.item_bytes
        offset = tensor.record["offset"] - shift
        tensors[tensor.tensor_id] = {**tensor.record, "storage": place.storage, "offset": offset}
    for old, place in places.items():
        storages[place.storage] = replace(staged[old], num_bytes=place.num_bytes, regions=())
    return FlatState(tree=state.tree, tensors=tensors, storages=storages)


def parts_at(places: Mapping[int, Place], make_parts: MakeParts) -> list[NewPart]:
    """Those parts of a wave that are kept, in their places."""
    moved = [places[part.storage].moved(part) for part in make_parts() if part.storage in places]
    return [part for part in moved if part is not None]
