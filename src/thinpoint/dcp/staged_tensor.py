"""What stands in a staged state dict for its tensors: DCP plans with it, its elements are encoded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from thinpoint.engine.staged import StagedState
from thinpoint.errors import UsageError
from thinpoint.state.tree import Path


@dataclass(frozen=True, eq=False)
class Payload:
    """The elements of one chunk of a tensor, encoded.

    Attributes:
        staged: holds them, with those of all tensors that were staged together.
        path: of the chunk there.
        codec: that it was encoded with.
    """

    staged: StagedState
    path: Path
    codec: str

    @property
    def tensor_id(self) -> int:
        """Of the chunk, among the tensors of the staged state."""
        return self.staged.tensor_ids[self.path]


def payload_of(tensor: torch.Tensor) -> Payload | None:
    """What `planner.resolve_data` gave, if that is a staged chunk; None for any other tensor."""
    return tensor.payload if isinstance(tensor, StagedChunk) else None


class _StandIn(torch.Tensor):
    """Shape and dtype of a tensor whose elements are not to be had."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsageError(
            f"a staged tensor has no elements that {func} could work on",
            hint="ThinStager goes with ThinWriter, and with planners that pass tensors on as they are",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a staged tensor can neither be pickled nor go to another process",
            hint="Use AsyncCheckpointerType.THREAD with ThinStager, and planners that flatten the state dict",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class StagedChunk(_StandIn):
    """Stands for a chunk of a tensor that is encoded.

    Attributes:
        payload: its elements.
    """

    payload: Payload | None

    def __new__(cls, chunk: torch.Tensor) -> StagedChunk:
        made: StagedChunk = torch.Tensor._make_wrapper_subclass(cls, chunk.shape, dtype=chunk.dtype)
        made.payload = None
        return made


class StagedTensor(_StandIn):
    """Stands for a tensor of a state dict, of which this rank has some chunks.

    DCP's planners learn from it what they would from the tensor: the same dtype, global shape and chunks.

    Args:
        tensor: what it stands for; not kept.
        items: what the planner wrote for it, or for another that is sharded alike.
        chunks: for each item, its `StagedChunk`, or a copy in host memory.
    """

    _items: list[WriteItem]
    _chunks: dict[tuple[int, ...], torch.Tensor]

    def __new__(
        cls, tensor: torch.Tensor, items: list[WriteItem], chunks: dict[tuple[int, ...], torch.Tensor]
    ) -> StagedTensor:
        made: StagedTensor = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)
        made._items, made._chunks = items, chunks
        return made

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return [
            replace(item, index=MetadataIndex(fqn, item.index.offset, item.index.index))
            for item in self._items
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        found = self._chunks.get(tuple(index.offset or ()))
        if found is None:
            raise UsageError(f"no chunk at {tuple(index.offset or ())} is staged", tensor=index.fqn)
        return found
