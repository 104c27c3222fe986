"""Which tensors of a checkpoint of many ranks are still whole, after the files of its ranks were salvaged. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinpoint.cli.salvage_file import SalvageReport
from thinpoint.dcp.folder import read_manifest
from thinpoint.dcp.items import chunk_path, object_path
from thinpoint.folder.layout_file import MAX_LAYOUT_BYTES, parse_layout
from thinpoint.folder.names import MANIFEST
from thinpoint.state.tree import display
from thinpoint.store import open_store


@dataclass(kw_only=True)
class Losses:
    """What of a checkpoint is lost.

    Attributes:
        num_tensors, num_objects: that it held.
        tensors: for the name of each that is not whole: lost chunks, chunks, ranks whose files lost one.
        objects: names of those that are lost.
    """

    num_tensors: int
    num_objects: int
    tensors: dict[str, tuple[int, int, list[int]]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)


def losses_of(folder: Path, reports: Sequence[SalvageReport]) -> Losses | None:
    """What is lost of the checkpoint in a folder; None if it has no manifest, or that of a single file.

    Args:
        reports: of the files in it; one without a report is lost whole.

    Raises:
        DamagedFileError, UnsupportedError, StorageError: manifest or layout cannot be read.
    """
    if not (folder / MANIFEST).is_file():
        return None
    store = open_store(folder)
    manifest = read_manifest(store)
    if manifest.layout is None:
        return None
    name = manifest.layout.name
    layout = parse_layout(store.get(name, MAX_LAYOUT_BYTES), manifest.layout, where=f"{store.url}/{name}")
    saved = {report.path.name: _saved(report) for report in reports}
    of_rank = [saved.get(record.name) for record in manifest.files]
    found = Losses(num_tensors=len(layout.tensors), num_objects=len(layout.objects))
    for fqn, tensor in layout.tensors.items():
        chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]
        lost = [c.rank for c in chunks if not _has(of_rank[c.rank], chunk_path(fqn, c.offsets))]
        if lost:
            found.tensors[fqn] = len(lost), len(chunks), sorted(set(lost))
    for fqn, rank in layout.objects.items():
        path = object_path(fqn, is_rank_state=fqn in layout.rank_states)
        if not _has(of_rank[rank], path, is_object=True):
            found.objects.append(fqn)
    return found


@dataclass(frozen=True)
class _Saved:
    """What is left of a file: everything, or rows by name. Without an index nothing that is no tensor is left."""

    is_intact: bool
    has_index: bool
    names: frozenset[str]
    lost: tuple[str, ...]


def _saved(report: SalvageReport) -> _Saved:
    return _Saved(
        report.is_intact,
        report.has_index,
        frozenset(row.name for row in report.rows if row.reason is None),
        tuple(row.name for row in report.rows if row.reason is not None),
    )


def _has(saved: _Saved | None, path: tuple[str, ...], *, is_object: bool = False) -> bool:
    if saved is None:
        return False
    name = display(path)
    if saved.is_intact:
        return True
    if is_object:
        return saved.has_index and not any(lost == name or lost.startswith(f"{name}.") for lost in saved.lost)
    return name in saved.names
