"""Layouts as a writer makes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from thinpoint import digest
from thinpoint.file.layout import hex64
from thinpoint.folder.layout import Layout, TensorLayout
from thinpoint.folder.layout_file import parse_layout
from thinpoint.folder.manifest import LayoutRecord

NAME = "0" * 24 + "-layout.zst"


def tensor_layout(shape: tuple[int, ...], chunks: list[tuple[Any, Any, int]]) -> TensorLayout:
    """A float32 tensor of chunks (offsets, sizes, rank)."""
    rows = (len(chunks), len(shape))
    return TensorLayout(
        dtype="float32",
        shape=shape,
        offsets=np.array([offsets for offsets, _, _ in chunks], np.int64).reshape(rows),
        sizes=np.array([sizes for _, sizes, _ in chunks], np.int64).reshape(rows),
        ranks=np.array([rank for _, _, rank in chunks], np.int64),
    )


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> TensorLayout:
    """A tensor cut into so many parts along each dimension, as `torch.chunk` cuts; one rank each."""
    edges = []
    for size, count in zip(shape, parts, strict=True):
        step = -(-size // count)
        edges.append([(min(size, i * step), min(step, max(0, size - i * step))) for i in range(count)])
    chunks = []
    for rank, place in enumerate(np.ndindex(parts)):
        cells = [edges[dim][i] for dim, i in enumerate(place)]
        chunks.append(([start for start, _ in cells], [size for _, size in cells], rank))
    return tensor_layout(shape, chunks)


def some_layout() -> Layout:
    """Tensors of all kinds, objects, the state of a rank, names with separators."""
    return Layout(
        world_size=6,
        tensors={
            "model.weight": grid((40, 6), (3, 2)),
            "scalar": tensor_layout((), [((), (), 5)]),
            "empty": tensor_layout((0, 4), [((0, 0), (0, 4), 2)]),
            "uneven": grid((10,), (4,)),
            "weird/../name.with,all: \u2603\ud800\x00": grid((3,), (1,)),
        },
        objects={"step": 0, "loader.rank00002": 2},
        rank_states=frozenset({"loader.rank00002"}),
        planner_data={"model.weight": ("model", "weight"), "list.0": ("list", 0)},
    )


def record_for(data: bytes) -> LayoutRecord:
    """What an honest manifest would say of these bytes."""
    return LayoutRecord(name=NAME, num_bytes=len(data), digest=hex64(digest.digest(data)))


def parsed(data: bytes) -> Layout:
    return parse_layout(data, record_for(data), where="a test")
