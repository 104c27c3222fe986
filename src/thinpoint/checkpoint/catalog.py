"""What is in a directory of checkpoints, from its listing and manifests alone. Torch-free; trusts nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from thinpoint.checkpoint.names import (
    MANIFEST,
    TRASH,
    manifest_name,
    save_id_in,
    step_folder,
    step_of,
    trash_label,
)
from thinpoint.errors import NotFoundError, ThinpointError, TruncatedFileError
from thinpoint.folder.manifest import (
    MAX_MANIFEST_BYTES,
    FileRecord,
    LayoutRecord,
    Manifest,
    parse_manifest,
)
from thinpoint.folder.names import DCP_METADATA
from thinpoint.store.contract import Store, StoredFile

State = Literal["committed", "incomplete", "trash"]


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One save as it lies in a directory.

    Attributes:
        step: training step; None if nothing says so any more (a data file in the trash).
        state: "committed": a manifest names its files and they are there, with their sizes. "incomplete": not so: it is
            being written, was given up, or is damaged. "trash": waits to be deleted.
        files: names in the store.
        num_bytes: of these files.
        raw_bytes: of what they hold before coding; None without a manifest.
        age_s: seconds since the newest of them was written.
        save_id: None if it is not known.
        error: why a manifest that is there does not count.
    """

    step: int | None
    state: State
    files: tuple[str, ...]
    num_bytes: int
    raw_bytes: int | None
    age_s: float
    save_id: str | None
    error: ThinpointError | None


@dataclass(kw_only=True)
class Folder:
    """A training step's folder as listed.

    Attributes:
        step: training step.
        files: by their names in the folder.
    """

    step: int
    files: dict[str, StoredFile] = field(default_factory=dict)

    @property
    def has_manifest(self) -> bool:
        return MANIFEST in self.files


def folders(store: Store) -> dict[int, Folder]:
    """The folders of all training steps, by step, newest first. Blocks on I/O, as all functions here do."""
    found: dict[int, Folder] = {}
    for file in store.files("step-"):
        folder, _, name = file.name.partition("/")
        step = step_of(folder)
        if step is not None and name:
            found.setdefault(step, Folder(step=step)).files[name] = file
    return dict(sorted(found.items(), reverse=True))


def read_manifest(store: Store, step: int) -> Manifest:
    """The manifest of a training step.

    Raises:
        NotFoundError: there is none.
        MalformedFileError, LimitExceededError, UnsupportedVersionError: it does not count.
        StorageError: the store refused.
    """
    name = manifest_name(step)
    return parse_manifest(store.get(name, MAX_MANIFEST_BYTES), where=name, step=step)


def committed(store: Store, folder: Folder) -> Manifest:
    """The manifest of a folder whose files are all there.

    Raises:
        What `read_manifest` raises, and TruncatedFileError, NotFoundError: a file is shorter than it was, or gone.
    """
    manifest = read_manifest(store, folder.step)
    named: list[FileRecord | LayoutRecord] = [*manifest.files]
    for file in named if manifest.layout is None else [*named, manifest.layout]:
        where = f"{step_folder(folder.step)}/{file.name}"
        if file.name not in folder.files:
            raise NotFoundError("a file that the manifest names is gone", where=where)
        if folder.files[file.name].size != file.num_bytes:
            raise TruncatedFileError(
                "the size of a file is not what the manifest says",
                where=where,
                expected=f"{file.num_bytes:,} bytes",
                actual=f"{folder.files[file.name].size:,}",
            )
    return manifest


def names_in(manifest: Manifest) -> set[str]:
    """The files beside a manifest that belong to its checkpoint, as names in the folder."""
    names = {file.name for file in manifest.files}
    return names if manifest.layout is None else names | {manifest.layout.name, DCP_METADATA}


def entries(store: Store, *, now: float | None = None) -> list[StepEntry]:
    """Every save in a directory, newest step first, the trash at the end. Nothing in it makes this fail.

    Args:
        now: seconds since 1970 by the store's clock; None for this machine's.

    Raises:
        StorageError: the store refused to list; what it refuses for one step is that step's `error`.
    """
    now = time.time() if now is None else now
    found: list[StepEntry] = []
    for folder in folders(store).values():
        found += _of_folder(store, folder, now)
    return found + _in_trash(store, now)


def _of_folder(store: Store, folder: Folder, now: float) -> list[StepEntry]:
    """The save that the manifest names, or what is there instead of it; then all others."""
    manifest: Manifest | None = None
    error: ThinpointError | None = None
    if folder.has_manifest:
        try:
            manifest = read_manifest(store, folder.step)
            committed(store, folder)
        except ThinpointError as problem:
            error = problem
    named = {MANIFEST} | (names_in(manifest) if manifest else set())
    groups: dict[str | None, list[StoredFile]] = {}
    for name, file in folder.files.items():
        save_id = save_id_in(name)
        if name in named:
            save_id = manifest.save_id if manifest else None
        groups.setdefault(save_id, []).append(file)
    current = manifest.save_id if manifest else None
    found = []
    for save_id, files in sorted(groups.items(), key=lambda item: (item[0] != current, item[0] or "")):
        is_current = folder.has_manifest and save_id == current
        found.append(
            _entry(
                folder.step,
                "committed" if is_current and error is None else "incomplete",
                files,
                now,
                save_id,
                manifest=manifest if is_current else None,
                error=error if is_current else None,
            )
        )
    return found


def _in_trash(store: Store, now: float) -> list[StepEntry]:
    groups: dict[str, list[StoredFile]] = {}
    for file in store.files(TRASH):
        label = trash_label(file.name)
        if label is not None:
            groups.setdefault(label, []).append(file)
    found = []
    for label, files in groups.items():
        manifest = None
        for file in files:
            if file.name == f"{TRASH}{label}/{MANIFEST}":
                try:
                    raw = store.get(file.name, MAX_MANIFEST_BYTES)
                    manifest = parse_manifest(raw, where=file.name)
                except ThinpointError:
                    pass
        ids = {save_id_in(file.name.rpartition("/")[2]) for file in files} - {None}
        save_id = manifest.save_id if manifest else min(ids, default=None, key=str)
        step = manifest.step if manifest else None
        found.append(_entry(step, "trash", files, now, save_id, manifest=manifest))
    return found


def _entry(
    step: int | None,
    state: State,
    files: Iterable[StoredFile],
    now: float,
    save_id: str | None,
    *,
    manifest: Manifest | None = None,
    error: ThinpointError | None = None,
) -> StepEntry:
    files = list(files)
    return StepEntry(
        step=step,
        state=state,
        files=tuple(file.name for file in files),
        num_bytes=sum(file.size for file in files),
        raw_bytes=manifest.raw_bytes if manifest else None,
        age_s=max(0.0, now - max(file.modified for file in files)),
        save_id=save_id,
        error=error,
    )
