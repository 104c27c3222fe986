"""The newest checkpoint that proves to be intact on all ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from thinpoint.checkpoint.catalog import committed, folders, read_manifest
from thinpoint.checkpoint.group_saving import plain_state
from thinpoint.checkpoint.group_writer import not_shared
from thinpoint.checkpoint.lane import retry
from thinpoint.checkpoint.line import Line
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import step_folder
from thinpoint.checkpoint.report import RestoreReport, SkippedStep
from thinpoint.checkpoint.restore import Read, is_damage, none_intact, report_of
from thinpoint.checkpoint.stateful import give_back
from thinpoint.checkpoint.together import Ranks, load_together
from thinpoint.dcp.folder import ThinFolder
from thinpoint.dcp.reader import ThinReader
from thinpoint.engine.into import LoadIntoReport
from thinpoint.errors import (
    CheckpointError,
    DamagedFileError,
    NotFoundError,
    RanksFailedError,
    UnsupportedError,
)
from thinpoint.folder.manifest import Manifest
from thinpoint.store.below import Below
from thinpoint.store.contract import Store


def restore_group(
    line: Line, store: Store, state: Any, step: int | None, *, retries: int, **options: Any
) -> tuple[RestoreReport, Manifest] | None:
    """Restores one step or the newest that is intact on all ranks. Collective; see `Checkpointer.restore`.

    Args:
        options: of `fill_together`.
    """
    begin = time.perf_counter()
    passed: list[SkippedStep] = []
    candidates = _candidates(store, step, retries, passed) if line.rank == 0 else None

    def look() -> tuple[Manifest | None, list[SkippedStep]]:
        assert candidates is not None
        return next(candidates, None), passed

    while True:
        manifest, skipped = line.lead("look for a checkpoint", look)
        if manifest is None:
            _check_nothing(line, store, skipped)
            return None
        try:
            loaded = _restore(line, store, manifest, state, retries, options)
        except (DamagedFileError, NotFoundError, RanksFailedError) as error:
            causes = list(error.failures.values()) if isinstance(error, RanksFailedError) else [error]
            if step is not None or not all(map(is_damage, causes)):
                raise
            log.warning("training step %d is passed over: %s", manifest.training_step, error)
            passed.append(SkippedStep(step=manifest.training_step, reason=str(error)))
        else:
            read = Read(manifest=manifest, result=loaded, skipped=tuple(skipped))
            return report_of(store, read, time.perf_counter() - begin), manifest


def _restore(
    line: Line, store: Store, manifest: Manifest, state: Any, retries: int, options: dict[str, Any]
) -> LoadIntoReport:
    seen = line.each("look at the checkpoint", lambda: _sees(store, manifest, retries))
    if not all(seen):
        raise not_shared(store, [str(rank) for rank, sees in enumerate(seen) if not sees])
    folder = Below(store, step_folder(manifest.training_step))
    if manifest.world_size is None:
        raise UnsupportedError(
            "the checkpoint was saved by a single process",
            where=folder.url,
            hint="Restore it without process_group",
        )
    return fill_together(line, folder, state, **options)


def fill_together(
    line: Ranks,
    store: Store,
    state: Any,
    *,
    strict: bool,
    cast: bool,
    weights_only: bool,
    backend: str,
    num_threads: int | None,
) -> LoadIntoReport:
    """Loads what many ranks have saved, into the state of each. Collective.

    Args:
        store: the checkpoint's folder.
        state: as the user gave it; filled in place.
        strict, cast, weights_only, backend, num_threads: as for `thinpoint.load_into`.

    Raises: as `load_together`, and what the state's objects raise when they get their state back.
    """
    begin = time.perf_counter()
    if not strict:
        # A fallback might not fill again what a damaged file has overwritten.
        line.each("verify", lambda: _verify(line, store, backend, num_threads))
    taken: list[dict[str, Any]] = []
    line.each("take the state", lambda: taken.append(plain_state(state)))
    plain = taken[0]
    reader = ThinReader(
        store, backend=backend, thread_count=num_threads, cast=cast, weights_only=weights_only
    )
    loaded = load_together(line, plain, reader, strict=strict, cast=cast)
    line.each("give the state back", lambda: give_back(state, plain))
    return LoadIntoReport(
        num_tensors=loaded.num_tensors,
        num_bytes=loaded.num_bytes,
        missing=loaded.missing,
        unexpected=loaded.unexpected,
        cast=loaded.cast,
        seconds=time.perf_counter() - begin,
    )


def _candidates(
    store: Store, step: int | None, retries: int, skipped: list[SkippedStep]
) -> Iterator[Manifest]:
    """The checkpoints by their manifests, newest first; those that do not count are added to `skipped`."""
    listed = retry(lambda: folders(store), retries)
    if step is not None and (step not in listed or not listed[step].has_manifest):
        raise CheckpointError(f"there is no checkpoint of training step {step}", where=store.url)
    for folder in listed.values():
        if not folder.has_manifest or step not in (None, folder.step):
            continue
        try:
            yield retry(lambda folder=folder: committed(store, folder), retries)  # type: ignore[misc]
        except (DamagedFileError, NotFoundError) as error:
            if step is not None:
                raise
            log.warning("training step %d is passed over: %s", folder.step, error)
            skipped.append(SkippedStep(step=folder.step, reason=str(error)))


def _check_nothing(line: Line, store: Store, skipped: list[SkippedStep]) -> None:
    """For when rank 0 finds nothing more: whether there is nothing indeed."""
    if skipped:
        raise none_intact(store, skipped)
    others = line.each("look at the directory", lambda: any(f.has_manifest for f in folders(store).values()))
    if any(others):
        raise CheckpointError(
            f"the directory is not shared: rank {others.index(True)} has checkpoints there, rank 0 has none",
            where=store.url,
            hint="Give all ranks the same folder of a shared file system, or a URL",
        )


def _sees(store: Store, manifest: Manifest, retries: int) -> bool:
    """Whether this rank finds the checkpoint that rank 0 has found."""
    try:
        own = retry(lambda: read_manifest(store, manifest.training_step), retries)
    except NotFoundError:
        return False
    return own.save_id == manifest.save_id


def _verify(line: Ranks, store: Store, backend: str, num_threads: int | None) -> None:
    """Each rank checks the stored bytes of its share of the files."""
    with ThinFolder(store, backend=backend, num_threads=num_threads) as folder:
        for _, file in folder.files(range(line.rank, folder.world_size, line.world_size)):
            file.verify(deep=False)
