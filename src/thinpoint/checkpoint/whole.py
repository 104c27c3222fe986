"""The state of a checkpoint of many ranks as one object, on one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from thinpoint.dcp.folder import ThinFolder
from thinpoint.dcp.rank_state import RankState
from thinpoint.errors import UsageError
from thinpoint.store.contract import Store


def load_whole(
    store: Store,
    *,
    map_location: Any,
    weights_only: bool,
    names: Any,
    backend: str,
    num_threads: int | None,
) -> dict[str, Any]:
    """The nested dict that was saved: whole tensors, and of each rank's own state those of all ranks.

    Args:
        store: the checkpoint's folder.
        map_location: a device for the tensors, or its name; None for the CPU.
        weights_only: as for `thinpoint.load`.
        names: must be None.

    Raises:
        UsageError: names or a map_location of another kind: `ThinFolder.read` reads single tensors.
        And what `ThinFolder` raises.
    """
    if names is not None or not isinstance(map_location, str | torch.device | None):
        raise UsageError(
            "of a checkpoint of many ranks `load` gives all, on one device",
            where=store.url,
            hint="thinpoint.dcp.ThinFolder reads single tensors, and slices of them",
        )
    with ThinFolder(store, backend=backend, num_threads=num_threads) as folder:
        flat: dict[str, Any] = {}
        for fqn in folder.tensors:
            tensor = folder.read(fqn)
            flat[fqn] = tensor if map_location is None else tensor.to(map_location)
        for fqn, value in folder.load_objects(folder.objects, weights_only=weights_only).items():
            flat[fqn] = value.values[0] if isinstance(value, RankState) else value
        keys = folder.planner_data or {}
    return unflatten_state_dict(flat, {fqn: keys.get(fqn, (fqn,)) for fqn in flat})
