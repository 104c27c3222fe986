"""What a plan puts into a rank's file."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from thinpoint.dcp.rank_state import RankState
from thinpoint.dcp.staged_file import plain
from thinpoint.dcp.staged_tensor import payload_of
from thinpoint.errors import UnsupportedObjectError, UsageError
from thinpoint.folder.layout import chunk_key


class Contents:
    """Tensors and objects of a plan, as they are taken from its planner.

    Args:
        codec: the writer's; what is staged must have been encoded with it.

    Attributes:
        tensors: for each name the chunks, by their keys: on their devices, no copies where they are dense.
        objects: by name.
        shapes: for each tensor's name that of all its chunks together.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self.tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self.objects: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    @property
    def rank_states(self) -> list[str]:
        """The names of the objects that are the state of one rank."""
        return [fqn for fqn, value in self.objects.items() if isinstance(value, RankState)]

    def take(self, item: WriteItem, planner: SavePlanner) -> int:
        """Add what an item stands for; returns its bytes before coding, 0 for an object.

        Raises:
            UnsupportedObjectError: it cannot be stored.
            UsageError: the plan names it twice, or it was staged with another codec.
        """
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            if fqn in self.objects:
                raise UsageError("the plan names an object twice", tensor=fqn)
            self.objects[fqn] = _object(item, planner)
            return 0
        key = chunk_key(item.index.offset or ())
        if key in self.tensors[fqn]:
            raise UsageError(f"the plan names a chunk twice: [{key}]", tensor=fqn)
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedObjectError(
                f"the planner gives a {type(tensor).__name__} for a tensor", tensor=fqn
            )
        self.tensors[fqn][key] = self._checked(tensor, fqn)
        if item.tensor_data is not None:
            self.shapes[fqn] = tuple(item.tensor_data.size)
        return tensor.numel() * tensor.element_size()

    def _checked(self, tensor: torch.Tensor, fqn: str) -> torch.Tensor:
        """The tensor as it is stored, or what stands for one that is encoded already."""
        payload = payload_of(tensor)
        if payload is None:
            if tensor.is_meta:
                raise UnsupportedObjectError(
                    "a tensor on the device 'meta' has no elements to save", tensor=fqn
                )
            return plain(tensor)
        if payload.codec != self._codec:
            raise UsageError(
                "ThinStager and ThinWriter have different codecs",
                tensor=fqn,
                expected=self._codec,
                actual=payload.codec,
            )
        return tensor


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """What an item stands for that is no tensor."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is not None and not _has_own_hooks(planner):
        return lookup(item.index)
    # What the planner makes of it is the result of `torch.save`, in this process.
    data = planner.resolve_data(item)
    try:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"a {type(data).__name__}")
        data.seek(0)
        return torch.load(data, weights_only=False)
    except Exception as error:
        raise UnsupportedObjectError(
            f"the planner does not give what torch.save makes of an object: {error}", tensor=item.index.fqn
        ) from error


def _has_own_hooks(planner: SavePlanner) -> bool:
    """Whether the planner may change objects on their way."""
    return any(
        getattr(type(planner), name, None) is not getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    )
