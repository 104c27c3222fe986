"""What a command is to read: a checkpoint itself, or the newest intact one of a directory of checkpoints."""

from __future__ import annotations

import os

from thinpoint.checkpoint.catalog import committed, folders
from thinpoint.checkpoint.names import step_folder
from thinpoint.errors import CheckpointError, DamagedFileError, NotFoundError
from thinpoint.folder.names import MANIFEST
from thinpoint.store import LocalStore, open_store
from thinpoint.store.contract import Store


def is_checkpoint(store: Store) -> bool:
    """Whether a folder is a checkpoint itself: it has a manifest."""
    if isinstance(store, LocalStore):
        return os.path.isfile(os.path.join(store.url, MANIFEST))
    return any(file.name == MANIFEST for file in store.files(MANIFEST))


def is_folder(target: str) -> bool:
    """Whether this is a local folder, or a URL below which a manifest lies."""
    store = open_store(target)
    return os.path.isdir(store.url) if isinstance(store, LocalStore) else is_checkpoint(store)


def newest_or_itself(target: str) -> str:
    """The path or URL of the newest training step whose files are all there, if `target` is a directory of checkpoints.

    Raises:
        CheckpointError: it is such a directory, and none of them is whole.
        StorageError: the store refused.
    """
    store = open_store(target)
    if (isinstance(store, LocalStore) and not os.path.isdir(store.url)) or is_checkpoint(store):
        return target
    found = folders(store)
    if not found:
        return target
    reasons = []
    for folder in found.values():
        if folder.has_manifest:
            try:
                committed(store, folder)
            except (DamagedFileError, NotFoundError) as error:
                reasons.append(f"step {folder.step}: {error.what}")
            else:
                return f"{target.rstrip('/')}/{step_folder(folder.step)}"
    raise CheckpointError(
        "none of the checkpoints is intact", where=target, actual="; ".join(reasons[:3]) or "no manifest"
    )
