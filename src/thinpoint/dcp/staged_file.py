"""A rank's file, of tensors as they are or staged before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinpoint.collector import collector_paused
from thinpoint.dcp.items import TENSORS, file_object
from thinpoint.dcp.staged_tensor import payload_of
from thinpoint.engine.backends import Backends
from thinpoint.engine.save import Saving
from thinpoint.engine.staged import StagedSaving, StagedState
from thinpoint.engine.views import is_dense
from thinpoint.errors import UsageError
from thinpoint.state.flatten import flatten
from thinpoint.state.tree import Path


@collector_paused()
def saving_of(
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    objects: Mapping[str, Any],
    *,
    backends: Backends,
    allow_pickle: bool = False,
    **options: Any,
) -> Saving:
    """The save of a rank's file, with the same bytes whether its tensors are staged or not.

    A staged state can be written once. It is released by the save, or if this call fails.

    Args:
        tensors: by name and key of the chunk, in the order of the plan: what `planner.resolve_data` gave, staged (all
            together) or `plain`.
        objects: by name; see `file_object`.
        backends: code what is not staged.
        allow_pickle: as for `thinpoint.save`.
        options: as for `Saving`: meta, host_bytes, progress, ...

    Raises:
        UsageError: the chunks were not staged together.
        UnsupportedObjectError: something cannot be stored.
    """
    stands = _Stands()
    chunks = {
        fqn: {key: stands.take(chunk, (TENSORS, fqn, key)) for key, chunk in of_tensor.items()}
        for fqn, of_tensor in tensors.items()
    }
    try:
        state = flatten(file_object(chunks, objects), allow_pickle=allow_pickle)
    except BaseException:
        if stands.staged is not None:
            stands.staged.release()
        raise
    if stands.staged is None:
        return Saving(state, backends, **options)
    return StagedSaving(state, stands.staged, stands.tensor_ids, backends, **options)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A chunk as it is stored: without its history, and dense, as what lies between the rows of a slice is not wanted."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()


class _Stands:
    """Tensors without elements in the places of staged chunks, for `flatten`: one an object, one storage a storage.

    Attributes:
        staged: what holds the chunks; None if there are none.
        tensor_ids: of the chunks there, by path.
    """

    def __init__(self) -> None:
        self.staged: StagedState | None = None
        self.tensor_ids: dict[Path, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def take(self, chunk: torch.Tensor, path: Path) -> torch.Tensor:
        """What stands for a chunk: itself if it is not staged."""
        payload = payload_of(chunk)
        if payload is None:
            return chunk
        if self.staged not in (None, payload.staged):
            raise UsageError("the tensors of a file must be staged together", tensor=path[1])
        self.staged = payload.staged
        self.tensor_ids[path] = payload.tensor_id
        storage_id = payload.staged.tensors[payload.tensor_id]["storage"]
        storage = self._storages.setdefault(storage_id, torch.empty(0))
        return self._tensors.setdefault(payload.tensor_id, storage.detach())
