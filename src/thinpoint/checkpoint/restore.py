"""The newest checkpoint that proves to be intact while it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from thinpoint.checkpoint.catalog import Folder, committed, folders
from thinpoint.checkpoint.lane import retry
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import step_folder
from thinpoint.checkpoint.report import RestoreReport, SkippedStep
from thinpoint.collector import collector_paused
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.into import LoadIntoReport, load_state_into
from thinpoint.engine.load import load_object
from thinpoint.engine.workers import Workers
from thinpoint.errors import (
    CheckpointError,
    DamagedFileError,
    DigestMismatchError,
    NotFoundError,
    UnsupportedError,
)
from thinpoint.file.layout import hex64
from thinpoint.file.reader import FileReader
from thinpoint.file.verify import verify_stored
from thinpoint.folder.manifest import FileRecord, Manifest
from thinpoint.store.below import Below
from thinpoint.store.contract import Store

Result = TypeVar("Result")


@dataclass(frozen=True)
class Use(Generic[Result]):
    """Makes something of a checkpoint's data.

    Attributes:
        file: of a single file.
        folder: of the files of many ranks, in a store of their own.
    """

    file: Callable[[FileReader], Result]
    folder: Callable[[Store], Result]


@dataclass(frozen=True, kw_only=True)
class Read(Generic[Result]):
    """A checkpoint that was read.

    Attributes:
        manifest: its manifest.
        result: what was made of its data.
        skipped: newer ones that were passed over, newest first.
    """

    manifest: Manifest
    result: Result
    skipped: tuple[SkippedStep, ...]


def read_newest(store: Store, use: Use[Result], step: int | None, *, retries: int) -> Read[Result] | None:
    """The newest checkpoint whose data `use` could read; None if the directory holds no checkpoint at all.

    Args:
        use: makes something of a data file.
        step: this one and no other; None for the newest.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged; or there is none of this step.
        DamagedFileError, NotFoundError: the checkpoint of this step is damaged.
        StorageError: the store refused, for reasons that say nothing about the data.
        And what `use` raises, other than damage.
    """
    if step is not None:
        return _read_step(store, use, step, retries)
    skipped: list[SkippedStep] = []
    for folder in retry(lambda: folders(store), retries).values():
        if not folder.has_manifest:
            log.info("training step %d was never committed", folder.step)
            continue
        try:
            manifest, result = _read(store, folder, use, retries)
        except (DamagedFileError, NotFoundError) as error:
            log.warning("training step %d is passed over: %s", folder.step, error)
            skipped.append(SkippedStep(step=folder.step, reason=str(error)))
        else:
            return Read(manifest=manifest, result=result, skipped=tuple(skipped))
    if skipped:
        raise none_intact(store, skipped)
    return None


def none_intact(store: Store, skipped: list[SkippedStep]) -> CheckpointError:
    """The error if there are checkpoints, and all were passed over."""
    return CheckpointError(
        "none of the checkpoints is intact",
        where=store.url,
        actual="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
        hint="Do not train on from the state as it is now; `thinpoint salvage` saves what is intact",
    )


def is_damage(error: BaseException | str) -> bool:
    """Whether an error says that a checkpoint is damaged: not that it may be intact, and cannot be read here and now."""
    return isinstance(error, DamagedFileError | NotFoundError)


def _read_step(store: Store, use: Use[Result], step: int, retries: int) -> Read[Result]:
    folder = retry(lambda: folders(store), retries).get(step)
    if folder is None or not folder.has_manifest:
        raise CheckpointError(f"there is no checkpoint of training step {step}", where=store.url)
    manifest, result = _read(store, folder, use, retries)
    return Read(manifest=manifest, result=result, skipped=())


def _read(store: Store, folder: Folder, use: Use[Result], retries: int) -> tuple[Manifest, Result]:
    manifest = retry(lambda: committed(store, folder), retries)
    if manifest.world_size is not None:
        below = Below(store, step_folder(folder.step))
        return manifest, retry(lambda: use.folder(below), retries)
    if len(manifest.files) != 1:
        raise UnsupportedError(
            "the checkpoint is in several files", where=store.url, expected=1, actual=len(manifest.files)
        )
    record = manifest.files[0]
    return manifest, retry(lambda: _use(store, folder, record, use), retries)


@collector_paused()
def _use(store: Store, folder: Folder, record: FileRecord, use: Use[Result]) -> Result:
    with closing(store.source(f"{step_folder(folder.step)}/{record.name}")) as source:
        reader = FileReader(source)
        found = hex64(reader.file_id), hex64(reader.trailer.index_digest)
        if found != (record.file_id, record.digest):
            raise DigestMismatchError(
                "this is not the file that the manifest names",
                where=reader.name,
                expected=(record.file_id, record.digest),
                actual=found,
            )
        return use.file(reader)


def restore_newest(
    store: Store, use: Use[LoadIntoReport], step: int | None, *, retries: int
) -> tuple[RestoreReport, Manifest] | None:
    """Restores one step or the newest; returns the report and the manifest. See `Checkpointer.restore`."""
    begin = time.perf_counter()
    read = read_newest(store, use, step, retries=retries)
    return None if read is None else (report_of(store, read, time.perf_counter() - begin), read.manifest)


def report_of(store: Store, read: Read[LoadIntoReport], seconds: float) -> RestoreReport:
    """What to tell of a restore."""
    manifest, loaded = read.manifest, read.result
    return RestoreReport(
        step=manifest.training_step,
        path=f"{store.url}/{step_folder(manifest.training_step)}",
        save_id=manifest.save_id,
        metadata=manifest.metadata,
        skipped=read.skipped,
        num_tensors=loaded.num_tensors,
        num_bytes=loaded.num_bytes,
        stored_bytes=manifest.num_bytes,
        missing=loaded.missing,
        unexpected=loaded.unexpected,
        cast=loaded.cast,
        seconds=seconds,
        versions=manifest.versions,
    )


def fill(
    state: Any, *, strict: bool, cast: bool, weights_only: bool, backend: str, num_threads: int | None
) -> Use[LoadIntoReport]:
    """Loads into `state`; see `thinpoint.load_into`.

    A fallback fills again whatever a damaged file has overwritten. With `strict=False` it might not: then the file is
    checked before the first tensor is touched.
    """
    chosen = choose_backends(backend)

    def use(reader: FileReader) -> LoadIntoReport:
        if not strict and (problems := verify_stored(reader)):
            raise problems[0]
        with Workers(num_threads) as workers:
            return load_state_into(
                reader,
                chosen.host,
                workers,
                state,
                devices=chosen.devices,
                strict=strict,
                cast=cast,
                weights_only=weights_only,
            )

    def use_folder(store: Store) -> LoadIntoReport:
        from thinpoint.checkpoint.group_restore import fill_together
        from thinpoint.checkpoint.together import Alone

        return fill_together(
            Alone(),
            store,
            state,
            strict=strict,
            cast=cast,
            weights_only=weights_only,
            backend=backend,
            num_threads=num_threads,
        )

    return Use(use, use_folder)


def make(
    *, map_location: Any, weights_only: bool, names: Any, backend: str, num_threads: int | None
) -> Use[Any]:
    """The object; see `thinpoint.load`."""
    chosen = choose_backends(backend)

    def use(reader: FileReader) -> Any:
        with Workers(num_threads) as workers:
            return load_object(
                reader,
                chosen.host,
                workers,
                devices=chosen.devices,
                map_location=map_location,
                weights_only=weights_only,
                names=names,
            )

    def use_folder(store: Store) -> Any:
        from thinpoint.checkpoint.whole import load_whole

        return load_whole(
            store,
            map_location=map_location,
            weights_only=weights_only,
            names=names,
            backend=backend,
            num_threads=num_threads,
        )

    return Use(use, use_folder)
