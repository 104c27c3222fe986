"""What a clean-up may delete: only what is provably dead, or older than a stated age."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from thinpoint.checkpoint.catalog import Folder, folders, names_in, read_manifest
from thinpoint.checkpoint.names import RUNS, TRASH, run_name, save_id_in, tag_of, trash_label
from thinpoint.checkpoint.runs import Run, read_runs
from thinpoint.errors import ThinpointError
from thinpoint.folder.names import DCP_METADATA
from thinpoint.store.contract import Store, StoredFile
from thinpoint.store.local_store import Leftover

ORPHAN_AGE_S = 7 * 86_400.0
"""Default age from which on what belongs to no checkpoint is dead, whoever wrote it."""


@runtime_checkable
class _HasLeftovers(Protocol):
    """What `LocalStore` has besides a `Store`."""

    def leftovers(self, prefix: str = "") -> list[Leftover]: ...


@dataclass(frozen=True, kw_only=True)
class DeadFile:
    """A file that a clean-up may delete.

    Attributes:
        name: in the store.
        num_bytes: its size.
        reason: why nobody needs it, for people.
    """

    name: str
    num_bytes: int
    reason: str


def dead(store: Store, *, orphan_age_s: float = ORPHAN_AGE_S, now: float | None = None) -> list[DeadFile]:
    """What a clean-up would delete now, in the order in which it may be deleted. Blocks on I/O.

    Dead are: the trash; data files that no manifest names, files that were never completed and claims of superseded
    runs, if their process has provably ended or they are older than `orphan_age_s`. Never a file beside a manifest
    that cannot be read: that is damage, for a person to look at.

    Args:
        orphan_age_s: seconds since a file was last written.
        now: seconds since 1970 by the store's clock; None for this machine's.

    Raises:
        StorageError: the store refused.
    """
    now = time.time() if now is None else now
    # Before the files: what a process that has ended by now has committed is in every listing from here on.
    runs = read_runs(store)
    judge = _Judge(runs.values(), orphan_age_s, now)
    found = [_dead(file, "in the trash") for file in store.files(TRASH) if trash_label(file.name)]
    listed = folders(store)
    for folder in listed.values():
        for save_id, file in _orphans(store, folder):
            found += judge.of_save(file, save_id)
    for file in _unfinished(store, now):
        found += judge.of_save(file, save_id_in(file.name))
    gone = {file.name for file in found}
    kept = [file.name for folder in listed.values() for file in folder.files.values()]
    return found + _old_claims(store, runs, judge, [name for name in kept if name not in gone])


def _unfinished(store: Store, now: float) -> list[StoredFile]:
    """Files whose writing was never completed, where a store can name them: a local disk."""
    if not isinstance(store, _HasLeftovers):
        return []
    return [
        StoredFile(name=file.name, size=file.size, modified=now - file.age_s) for file in store.leftovers()
    ]


def _orphans(store: Store, folder: Folder) -> Iterator[tuple[str | None, StoredFile]]:
    """(save that it belongs to, file) for the files of saves in a folder that its manifest does not name."""
    named: set[str] = set()
    if folder.has_manifest:
        try:
            named = names_in(read_manifest(store, folder.step))
        except ThinpointError:
            return
    # What DCP's tools list belongs to the last save that was tried.
    last = max((save_id_in(name) or "" for name in folder.files), default="") or None
    for name, file in folder.files.items():
        save_id = last if name == DCP_METADATA else save_id_in(name)
        if name not in named and (save_id is not None or name == DCP_METADATA):
            yield save_id, file


def _old_claims(store: Store, runs: dict[str, Run], judge: _Judge, kept: Iterable[str]) -> list[DeadFile]:
    """The claims of superseded runs that no file is left of.

    While there is one, the claim says who wrote it: it may become an orphan yet. The newest claim stays for ever: it is
    what keeps older runs out.
    """
    newest = max(runs.values(), key=lambda run: run.rank, default=None)
    needed = {tag_of(save_id) for name in kept if (save_id := save_id_in(name))}
    older = {
        run_name(run_id): run_id
        for run_id, run in runs.items()
        if run is not newest and tag_of(run_id) not in needed
    }
    found: list[DeadFile] = []
    for file in store.files(RUNS):
        if file.name in older:
            found += judge.of_save(file, older[file.name])
    return found


class _Judge:
    def __init__(self, runs: Iterable[Run], orphan_age_s: float, now: float) -> None:
        self._ended = {tag_of(run.run_id): run for run in runs if run.process.is_dead()}
        self._orphan_age_s = orphan_age_s
        self._now = now

    def of_save(self, file: StoredFile, save_id: str | None) -> list[DeadFile]:
        """A file that only this save could need, if it is dead."""
        run = self._ended.get(tag_of(save_id)) if save_id else None
        if run is not None:
            return [_dead(file, f"process {run.process.pid} of this machine, which wrote it, has ended")]
        age = self._now - file.modified
        if age > self._orphan_age_s:
            return [_dead(file, f"in no checkpoint, and {age / 86_400:.1f} days old")]
        return []


def _dead(file: StoredFile, reason: str) -> DeadFile:
    return DeadFile(name=file.name, num_bytes=file.size, reason=reason)
