"""Loading into tensors that exist, on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinpoint.codec.backend import HostBackend
from thinpoint.engine.backends import Devices
from thinpoint.engine.load import StorageLoader
from thinpoint.engine.restore import Restorer
from thinpoint.engine.views import StridedView, read_views
from thinpoint.engine.workers import Workers
from thinpoint.file.index import tensor_record
from thinpoint.file.reader import FileReader
from thinpoint.state.into import plan_into
from thinpoint.state.unflatten import unflatten


@dataclass(frozen=True, kw_only=True)
class LoadIntoReport:
    """What a load in place did.

    Attributes:
        num_tensors: tensors that were filled.
        num_bytes: their bytes.
        missing: names in the state that the file does not hold (with strict=False).
        unexpected: names in the file for which the state has no place (with strict=False).
        cast: "name: dtype in the file, dtype in the state" of converted tensors (with cast=True).
        seconds: from the call to the last byte.
    """

    num_tensors: int
    num_bytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    seconds: float


def load_state_into(
    reader: FileReader,
    backend: HostBackend,
    workers: Workers,
    state: Any,
    *,
    devices: Devices | None = None,
    strict: bool = True,
    cast: bool = False,
    weights_only: bool = True,
    progress: Callable[[int], None] | None = None,
) -> LoadIntoReport:
    """Fill `state` from an open file. See `thinpoint.load_into`."""
    import torch

    begin = time.perf_counter()
    index = reader.index
    records = [tensor_record(tensor) for tensor in index.tensors]
    plan = plan_into(index.tree, records, state)
    plan.check(strict=strict, cast=cast)
    restorer = Restorer(reader, backend, workers, progress, devices)
    values = None
    if plan.value_paths:
        storages = StorageLoader(restorer, None)
        values = unflatten(
            index.tree,
            records,
            num_storages=len(index.storages),
            prepare=storages.prepare,
            fetch_storage=storages.storage,
            fetch_blob=storages.blob,
            weights_only=weights_only,
            select=plan.value_paths,
        )
    with torch.no_grad():
        pairs = [(_view(records[pair.tensor_id]), pair.target.detach()) for pair in plan.pairs]
        read_views(restorer, pairs)
    plan.set_values(values)
    return LoadIntoReport(
        num_tensors=len(pairs),
        num_bytes=sum(out.numel() * out.element_size() for _, out in pairs),
        missing=tuple(plan.missing),
        unexpected=tuple(plan.unexpected),
        cast=tuple(plan.dtypes),
        seconds=time.perf_counter() - begin,
    )


def _view(record: dict[str, Any]) -> StridedView:
    import torch

    return StridedView(
        storage=-1 if record["storage"] is None else record["storage"],
        dtype=getattr(torch, record["dtype"]),
        shape=tuple(record["shape"]),
        stride=tuple(record["stride"]),
        offset=record["offset"],
    )
