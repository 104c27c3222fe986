"""What a rank's file holds: `{"tensors": {fqn: {"512,0": chunk}}, "objects": {fqn: object}, "rank_states": {fqn: ...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinpoint.dcp.rank_state import RankState
from thinpoint.errors import MalformedFileError
from thinpoint.folder.layout import chunk_key

TENSORS = "tensors"
OBJECTS = "objects"
RANK_STATES = "rank_states"

Path = tuple[str, ...]


def chunk_path(fqn: str, offsets: Any) -> Path:
    """The keys that lead to a chunk in its rank's file."""
    return TENSORS, fqn, chunk_key(offsets)


def object_path(fqn: str, *, is_rank_state: bool) -> Path:
    """The keys that lead to an object in its rank's file."""
    return (RANK_STATES if is_rank_state else OBJECTS), fqn


def file_object(chunks: Mapping[str, Mapping[str, Any]], objects: Mapping[str, Any]) -> dict[str, Any]:
    """The object that a rank's file holds.

    Args:
        chunks: for each tensor's name its chunks, by their keys.
        objects: by name; a `RankState` is stored as plain data.
    """
    obj: dict[str, Any] = {
        TENSORS: {fqn: dict(below) for fqn, below in chunks.items()},
        OBJECTS: {fqn: value for fqn, value in objects.items() if not isinstance(value, RankState)},
    }
    rank_states = {
        fqn: {"world_size": value.world_size, "value": value.values[0]}
        for fqn, value in objects.items()
        if isinstance(value, RankState)
    }
    if rank_states:
        obj[RANK_STATES] = rank_states
    return obj


def file_meta(rank: int, world_size: int | None, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What a rank's file says of the whole: for salvage, should nothing else be left.

    Args:
        world_size: None if it is not known.
        shapes: for each tensor's name that of all its chunks together.
    """
    return {
        "dcp": {
            "rank": rank,
            "world_size": world_size,
            "shapes": {fqn: list(shape) for fqn, shape in shapes.items()},
        }
    }


def rank_state_of(stored: Any, rank: int, *, name: str, where: object) -> RankState:
    """The `RankState` that plain data of a file stand for.

    Raises:
        MalformedFileError: they are something else.
    """
    good = isinstance(stored, dict) and stored.keys() == {"world_size", "value"}
    if not good or type(stored["world_size"]) is not int:
        raise MalformedFileError("the state of a rank is not stored as one", where=where, tensor=name)
    return RankState([stored["value"]], stored["world_size"], rank, name)
