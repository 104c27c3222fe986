"""DCP's `Metadata` of a checkpoint to its layout, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from thinpoint.errors import IncompleteSaveError, UnsupportedError
from thinpoint.file.limits import MAX_INT64
from thinpoint.folder.layout import Keys, Layout, TensorLayout
from thinpoint.folder.records import MAX_TEXT_CHARS

log = logging.getLogger("thinpoint")

Placed = Mapping[str, Mapping[Any, int]]
"""For each name and offset (None for an object) the rank that wrote it."""

_KnownChunks = dict[tuple[bytes, bytes], list[ChunkStorageMetadata]]
"""Most tensors of a model are cut in the same few ways: of 1,024 ranks these are seconds of making objects."""


def layout_of(metadata: Metadata, placed: Placed, *, world_size: int, rank_states: frozenset[str]) -> Layout:
    """The layout of what was planned, with the ranks that wrote it.

    Raises:
        IncompleteSaveError: something that was planned was written by nobody.
    """
    tensors: dict[str, TensorLayout] = {}
    objects: dict[str, int] = {}
    for fqn, planned in metadata.state_dict_metadata.items():
        ranks = placed.get(fqn, {})
        try:
            if isinstance(planned, TensorStorageMetadata):
                tensors[fqn] = _tensor_layout(planned, ranks)
            else:
                objects[fqn] = ranks[None]
        except KeyError as error:
            where = "" if error.args[0] is None else f" at {tuple(error.args[0])}"
            raise IncompleteSaveError(f"no rank has written what was planned{where}", tensor=fqn) from None
    return Layout(
        world_size=world_size,
        tensors=tensors,
        objects=objects,
        rank_states=rank_states,
        planner_data=_plain(metadata.planner_data),
    )


def metadata_of(layout: Layout) -> Metadata:
    """What DCP's planners plan a load with.

    Raises:
        UnsupportedError: this version of torch does not know the dtype of a tensor.
    """
    known: _KnownChunks = {}
    entries: dict[str, Any] = {
        fqn: _tensor_metadata(fqn, tensor, known) for fqn, tensor in layout.tensors.items()
    }
    entries.update((fqn, BytesStorageMetadata()) for fqn in layout.objects)
    return Metadata(state_dict_metadata=entries, planner_data=layout.planner_data)


def _tensor_layout(planned: TensorStorageMetadata, ranks: Mapping[Any, int]) -> TensorLayout:
    chunks, dims = planned.chunks, len(planned.size)
    return TensorLayout(
        dtype=str(planned.properties.dtype).removeprefix("torch."),
        shape=tuple(planned.size),
        offsets=_rows((chunk.offsets for chunk in chunks), len(chunks), dims),
        sizes=_rows((chunk.sizes for chunk in chunks), len(chunks), dims),
        ranks=np.fromiter((ranks[chunk.offsets] for chunk in chunks), np.int64, len(chunks)),
    )


def _rows(sizes: Iterable[Sequence[int]], count: int, dims: int) -> np.ndarray:
    """As `np.array(list(sizes))`, in a fifth of its time."""
    return np.fromiter(chain.from_iterable(sizes), np.int64, count * dims).reshape(count, dims)


def _tensor_metadata(fqn: str, tensor: TensorLayout, known: _KnownChunks) -> TensorStorageMetadata:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"this version of torch has no dtype {tensor.dtype}", tensor=fqn)
    way = tensor.offsets.tobytes(), tensor.sizes.tobytes()
    if way not in known:
        rows = zip(tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True)
        known[way] = [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in rows
        ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=torch.Size(tensor.shape), chunks=list(known[way])
    )


def _plain(planner_data: Any) -> dict[str, Keys] | None:
    """What the default planner leaves: for each name the keys that lead there. Of others nothing can be kept."""
    if planner_data is None:
        return None
    if isinstance(planner_data, dict) and all(
        isinstance(fqn, str) and isinstance(keys, tuple | list) and all(map(_is_key, keys))
        for fqn, keys in planner_data.items()
    ):
        return {fqn: tuple(keys) for fqn, keys in planner_data.items()}
    log.warning(
        "the planner's data are no names and keys, and are not stored: %s", type(planner_data).__name__
    )
    return None


def _is_key(key: Any) -> bool:
    if type(key) is str:
        return len(key) <= MAX_TEXT_CHARS
    return type(key) is int and abs(key) <= MAX_INT64
