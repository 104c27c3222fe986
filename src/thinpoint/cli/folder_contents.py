"""What a checkpoint of many ranks holds, from its manifest, its layout and the indexes of its files. Torch-free."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

from thinpoint.cli.contents import tensor_rows
from thinpoint.dcp.items import TENSORS
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.reader import FileReader
from thinpoint.folder.layout import Layout, TensorLayout
from thinpoint.folder.manifest import Manifest
from thinpoint.store.contract import Store

JSON_FORMAT = "thinpoint-inspect-folder"
JSON_VERSION = 1


@dataclass(kw_only=True)
class GlobalTensor:
    """A tensor of all ranks together.

    Attributes:
        name, dtype, shape: of the whole.
        cut: into how many pieces along each dimension; None if the chunks form no grid.
        num_chunks: of them.
        ranks: those whose files hold one, ascending.
        raw_bytes: elements times their size.
        coded_raw_bytes, stored_bytes: of the parts that are charged to it, before and after coding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    cut: tuple[int, ...] | None
    num_chunks: int
    ranks: list[int]
    raw_bytes: int
    coded_raw_bytes: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """The file of a rank: bytes before coding and in the file, tensors' chunks in it."""

    rank: int
    file: str
    raw_bytes: int
    file_bytes: int
    num_chunks: int


@dataclass(frozen=True, kw_only=True)
class FolderContents:
    """What a folder holds, tensors and files."""

    manifest: Manifest
    layout: Layout
    tensors: list[GlobalTensor]
    files: list[RankRow]


def folder_contents(store: Store, manifest: Manifest, layout: Layout) -> FolderContents:
    """Reads the index of every rank's file, one at a time.

    Raises:
        DamagedFileError, UnsupportedError: an index is damaged, or newer.
        StorageError: the store refused.
    """
    tensors = {name: _global(name, tensor) for name, tensor in layout.tensors.items()}
    files = []
    for rank, record in enumerate(manifest.files):
        with closing(store.source(record.name)) as source:
            reader = FileReader(source)
            num_chunks = 0
            for row in tensor_rows(reader.index):
                if len(row.path) == 3 and row.path[0] == TENSORS and row.path[1] in tensors:
                    num_chunks += 1
                    tensors[row.path[1]].coded_raw_bytes += row.coded_raw_bytes
                    tensors[row.path[1]].stored_bytes += row.stored_bytes
            files.append(
                RankRow(
                    rank=rank,
                    file=record.name,
                    raw_bytes=sum(part.raw_bytes for part in reader.index.parts),
                    file_bytes=record.num_bytes,
                    num_chunks=num_chunks,
                )
            )
    return FolderContents(manifest=manifest, layout=layout, tensors=list(tensors.values()), files=files)


def _global(name: str, tensor: TensorLayout) -> GlobalTensor:
    full = (tensor.sizes > 0).all(axis=1)
    offsets = tensor.offsets[full]
    cut = tuple(len(set(offsets[:, dim].tolist())) for dim in range(offsets.shape[1]))
    return GlobalTensor(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        cut=cut if prod(cut) == len(offsets) else None,
        num_chunks=len(offsets),
        ranks=sorted(set(tensor.ranks[full].tolist())),
        raw_bytes=tensor.num_elems * ITEM_BYTES.get(tensor.dtype, 1),
    )


def ranks_text(ranks: list[int]) -> str:
    """Ranks for people: "0-3,7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"


def as_json(store: Store, found: FolderContents) -> dict[str, Any]:
    """Everything as a JSON object, described in docs/cli.md."""
    manifest = found.manifest
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "url": store.url,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "world_size": found.layout.world_size,
        "num_bytes": manifest.num_bytes,
        "raw_bytes": manifest.raw_bytes,
        "ratio": _ratio(manifest.raw_bytes, manifest.num_bytes),
        "versions": manifest.versions,
        "roles": {
            role: {"raw_bytes": raw, "stored_bytes": stored} for role, (raw, stored) in manifest.roles.items()
        },
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "cut": None if tensor.cut is None else list(tensor.cut),
                "num_chunks": tensor.num_chunks,
                "ranks": tensor.ranks,
                "raw_bytes": tensor.raw_bytes,
                "stored_bytes": tensor.stored_bytes,
                "ratio": _ratio(tensor.coded_raw_bytes, tensor.stored_bytes),
            }
            for tensor in found.tensors
        ],
        "objects": dict(found.layout.objects),
        "files": [{**vars(row), "ratio": _ratio(row.raw_bytes, row.file_bytes)} for row in found.files],
    }


def _ratio(raw_bytes: int, stored_bytes: int) -> float | None:
    return round(raw_bytes / stored_bytes, 6) if stored_bytes else None
