"""What the coordinator does when all ranks have written: it checks that everything is there, then commits it."""

from __future__ import annotations

import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from thinpoint.collector import collector_paused
from thinpoint.dcp.leftovers import delete, named_files
from thinpoint.dcp.metadata import layout_of, metadata_of
from thinpoint.dcp.record import RankRecord, check_same_way, roles_of_all, trainable_of_all, versions
from thinpoint.engine.workers import Pool
from thinpoint.errors import (
    AlreadyExistsError,
    DamagedFileError,
    IncompleteSaveError,
    NotFoundError,
    ThinpointError,
)
from thinpoint.file.layout import TRAILER_BYTES, hex64, unpack_trailer
from thinpoint.folder.layout import Layout
from thinpoint.folder.layout_file import dump_layout
from thinpoint.folder.manifest import Manifest, dump_manifest
from thinpoint.folder.names import DCP_METADATA, layout_name, save_id_of
from thinpoint.store.contract import Store

log = logging.getLogger("thinpoint")

ASKED_AT_ONCE = 16
"""Files that the store is asked for at a time."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a checkpoint comes from, for its manifest. See `Manifest`."""

    step: int | None = None
    run_id: str | None = None
    generation: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What all ranks reported.

    Attributes:
        records: of their files, by rank.
        placed: for each name and offset (None for an object) the rank that wrote it.
    """

    records: tuple[RankRecord, ...]
    placed: dict[str, dict[Any, int]]


def commit(
    store: Store,
    metadata: Metadata,
    results: Sequence[Iterable[WriteResult]],
    *,
    origin: Origin,
    storage_meta: StorageMeta,
    put_manifest: Callable[[Manifest, bytes], None],
) -> None:
    """Make a checkpoint of what all ranks have written.

    Args:
        store: the folder.
        metadata: DCP's, with what was planned.
        results: of each rank.
        origin: for the manifest.
        storage_meta: for DCP's own metadata.
        put_manifest: puts the manifest in place, in one step.

    Raises:
        IncompleteSaveError: something that was planned is missing, or a rank's file is not as it was written.
        UsageError: the ranks do not save in the same way.
        StorageError: the store refused.
    """
    written = _names_in(results)
    old = named_files(store)
    try:
        gathered = gather(results)
        layout = layout_of(
            metadata,
            gathered.placed,
            world_size=len(gathered.records),
            rank_states=frozenset(fqn for record in gathered.records for fqn in record.rank_states),
        )
        manifest, layout_bytes = _manifest_and_layout(store, layout, gathered, origin)
        assert manifest.layout is not None
        written.add(manifest.layout.name)
        raw = dump_manifest(manifest)
        store.put(manifest.layout.name, layout_bytes)
    except Exception:
        delete(store, written)
        raise
    try:
        put_manifest(manifest, raw)
    except AlreadyExistsError:
        # After any other error it may be there, or still arrive.
        delete(store, written)
        raise
    try:
        # After the manifest: there are tools that take it for the sign of a complete checkpoint.
        store.put(DCP_METADATA, _dcp_metadata(metadata, layout, storage_meta))
    except ThinpointError as error:
        log.warning("PyTorch's own tools cannot list the checkpoint: %s", error)
    if old is not None:
        delete(store, old - written)


def gather(results: Sequence[Iterable[WriteResult]]) -> Gathered:
    """What all ranks reported, sorted out.

    Raises:
        IncompleteSaveError: a rank has no file, or two ranks wrote the same.
        UsageError: the ranks do not save in the same way.
    """
    records: dict[int, RankRecord] = {}
    placed: dict[str, dict[Any, int]] = defaultdict(dict)
    for of_rank in results:
        for result in of_rank:
            rank, index = result.storage_data, result.index
            if isinstance(rank, RankRecord):
                records[rank.rank] = rank
            elif placed[index.fqn].setdefault(index.offset, rank) != rank:
                raise IncompleteSaveError(
                    f"ranks {placed[index.fqn][index.offset]} and {rank} have written the same chunk",
                    tensor=index.fqn,
                )
    if missing := sorted(set(range(len(results))) - records.keys()):
        raise IncompleteSaveError("ranks have reported no file", actual=missing)
    check_same_way({rank: record.way for rank, record in records.items()})
    return Gathered(records=tuple(records[rank] for rank in range(len(results))), placed=placed)


def check_files(store: Store, records: Iterable[RankRecord]) -> None:
    """Asks the store for the file of every rank, and for its last bytes; never lists.

    Raises:
        IncompleteSaveError: one is missing, or is not what its rank says it wrote.
        StorageError: the store refused.
    """
    pool = Pool(ASKED_AT_ONCE, "thinpoint-ask")
    try:
        for _ in pool.map(lambda record: _check_file(store, record), records):
            pass
    finally:
        pool.close(cancel=True)


def _check_file(store: Store, record: RankRecord) -> None:
    file = record.file
    try:
        with closing(store.source(file.name)) as source:
            size = source.size
            end = source.read_at(max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES)).tobytes()
        trailer = unpack_trailer(end, where=file.name, file_bytes=size)
    except NotFoundError as error:
        raise IncompleteSaveError(
            f"the file that rank {record.rank} has written is not there for the coordinator",
            where=f"{store.url}/{file.name}",
            hint="All ranks must see the same folder: a path on each machine's own disk will not do",
        ) from error
    except DamagedFileError as error:
        raise IncompleteSaveError(
            f"the file of rank {record.rank} is damaged as the store gives it back: {error.what}",
            where=f"{store.url}/{file.name}",
        ) from error
    actual = size, hex64(trailer.file_id), hex64(trailer.index_digest)
    if actual != (file.num_bytes, file.file_id, file.digest):
        raise IncompleteSaveError(
            f"the store gives back another file than rank {record.rank} has written",
            where=f"{store.url}/{file.name}",
            expected=f"{file.num_bytes:,} bytes, file id {file.file_id}",
            actual=f"{size:,} bytes, file id {actual[1]}",
        )


def _manifest_and_layout(
    store: Store, layout: Layout, gathered: Gathered, origin: Origin
) -> tuple[Manifest, bytes]:
    records = gathered.records
    check_files(store, records)
    save_id = save_id_of(records[0].file.name)
    assert save_id is not None
    with collector_paused():
        raw, layout_record = dump_layout(layout, name=layout_name(save_id))
    manifest = Manifest(
        step=origin.step,
        save_id=save_id,
        run_id=origin.run_id,
        generation=origin.generation,
        time_s=time.time(),
        files=tuple(record.file for record in records),
        roles=roles_of_all(records),
        trainable=trainable_of_all(records),
        versions=versions(),
        metadata=origin.metadata,
        world_size=len(records),
        layout=layout_record,
    )
    return manifest, raw


def _dcp_metadata(metadata: Metadata, layout: Layout, storage_meta: StorageMeta) -> bytes:
    """For stock tools that list the folder; thinpoint never reads it."""
    # The tensors of a layout share the chunks that they have in common, and pickle stores each once.
    listed = replace(metadata_of(layout), planner_data=metadata.planner_data)
    return pickle.dumps(replace(listed, storage_data={}, storage_meta=storage_meta))


def _names_in(results: Sequence[Iterable[WriteResult]]) -> set[str]:
    told = (result.storage_data for of_rank in results for result in of_rank)
    return {record.file.name for record in told if isinstance(record, RankRecord)}
