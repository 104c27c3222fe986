"""The layout of a checkpoint of many ranks: where the chunks of every tensor lie. Trusts nothing it reads (`spec/FOLDER.md`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from thinpoint.errors import MalformedFileError
from thinpoint.folder.coverage import check_coverage

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, as one rank saved it.

    Attributes:
        offsets: of its first element in the whole tensor.
        sizes: elements along each dimension; may be 0.
        rank: whose file holds it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int

    @property
    def key(self) -> str:
        """Its name in the rank's file, below that of its tensor."""
        return chunk_key(self.offsets)


def chunk_key(offsets: Any) -> str:
    """The name of a chunk in its rank's file: the offsets joined by commas, nothing for a scalar."""
    return ",".join(str(int(offset)) for offset in offsets)


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorLayout:
    """A tensor and its chunks. They fill it exactly: no gap, no overlap; empty ones do not count.

    Attributes:
        dtype: torch's name without `torch.`.
        shape: of the whole tensor.
        offsets, sizes: int64, a row for each chunk and a column for each dimension.
        ranks: int64, one for each chunk.
    """

    dtype: str
    shape: tuple[int, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    ranks: np.ndarray

    @property
    def num_chunks(self) -> int:
        return len(self.ranks)

    @property
    def num_elems(self) -> int:
        return prod(self.shape)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks; a new list."""
        rows = zip(self.offsets.tolist(), self.sizes.tolist(), self.ranks.tolist(), strict=True)
        return [Chunk(tuple(offsets), tuple(sizes), rank) for offsets, sizes, rank in rows]

    def chunk(self, row: int) -> Chunk:
        """One chunk."""
        return Chunk(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()), int(self.ranks[row]))

    def overlapping(self, start: tuple[int, ...], end: tuple[int, ...]) -> Iterator[Chunk]:
        """The chunks with elements in the box from `start` to `end` (not included)."""
        low = np.asarray(start, np.int64).reshape(1, -1)
        high = np.asarray(end, np.int64).reshape(1, -1)
        inside = np.maximum(self.offsets, low) < np.minimum(self.offsets + self.sizes, high)
        for row in np.flatnonzero(inside.all(axis=1)).tolist():
            yield self.chunk(row)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything in a checkpoint is.

    Attributes:
        world_size: ranks that saved it.
        tensors: by name.
        objects: for the name of each object that is no tensor the rank whose file holds it.
        rank_states: the names of those objects that are the state of one rank (`thinpoint.dcp.PerRank`).
        planner_data: for the names in the state the keys that lead there; None if the planner left none.
    """

    world_size: int
    tensors: dict[str, TensorLayout]
    objects: dict[str, int]
    rank_states: frozenset[str] = frozenset()
    planner_data: dict[str, Keys] | None = field(default=None)

    @property
    def num_chunks(self) -> int:
        return sum(tensor.num_chunks for tensor in self.tensors.values())

    def check(self, where: object) -> None:
        """Raises MalformedFileError unless the chunks of every tensor fill it exactly."""
        known: set[Any] = set()
        for name, tensor in self.tensors.items():
            # Most tensors of a model are cut in the same few ways.
            way = tensor.shape, tensor.offsets.tobytes(), tensor.sizes.tobytes()
            if way in known:
                continue
            reason = check_coverage(tensor.shape, tensor.offsets, tensor.sizes)
            if reason is not None:
                raise MalformedFileError(f"the layout: {reason}", where=where, tensor=name)
            known.add(way)
