"""Which checkpoints are kept, and how one that is not goes away."""

from __future__ import annotations

from collections.abc import Iterable

from thinpoint.checkpoint.catalog import Folder, committed, names_in, read_manifest
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import MANIFEST, TRASH, new_id, step_folder
from thinpoint.errors import AlreadyExistsError, NotFoundError, StorageError, ThinpointError
from thinpoint.folder.manifest import Manifest
from thinpoint.store.contract import Store


def expired(
    store: Store,
    folders: dict[int, Folder],
    newest: int,
    *,
    keep_last: int | None,
    keep_every: int | None,
    damaged: Iterable[int] = (),
) -> list[int]:
    """The steps to delete once `newest` is durable, oldest first. Blocks on I/O.

    Only whole checkpoints count, for keeping and for deleting: whatever is no checkpoint, or a damaged one, stays. Steps
    behind `newest` belong to a history that a rollback has left: `truncate_after` is what deletes those.

    Args:
        folders: see `catalog.folders`.
        newest: the training step just committed; always kept.
        keep_last: how many are kept, `newest` among them; None for all.
        keep_every: multiples of this are kept for ever, and do not count; None for none.
        damaged: steps whose data are known to be damaged, which neither count nor go.
    """
    if keep_last is None:
        return []
    kept, gone = 0, []
    for step, folder in folders.items():
        if step > newest or not folder.has_manifest or step in damaged:
            continue
        if step != newest and keep_every is not None and step % keep_every == 0:
            continue
        try:
            committed(store, folder)
        except StorageError as error:
            if not isinstance(error, NotFoundError):
                raise
            continue
        except ThinpointError:
            continue
        if kept < keep_last:
            kept += 1
        else:
            gone.append(step)
    return gone[::-1]


def drop_step(store: Store, step: int) -> None:
    """Takes a step out of the directory, in one step: it is no checkpoint any more. Blocks on I/O.

    Where the store renames, all of it goes to the trash; elsewhere the manifest is deleted, then the files it named.
    What else lies in the folder is left to the clean-up.
    """
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(store, step)
    except NotFoundError:
        return
    except StorageError:
        raise
    except ThinpointError as error:
        log.warning("deleting a checkpoint whose manifest does not count: %s", error)
    folder = step_folder(step)
    if store.capabilities.rename:
        _rename_to_trash(store, folder, manifest.save_id if manifest else new_id(), "")
        return
    store.delete(f"{folder}/{MANIFEST}")
    for name in sorted(names_in(manifest)) if manifest else ():
        store.delete(f"{folder}/{name}")


def drop_file(store: Store, name: str, save_id: str) -> None:
    """Takes a file that no manifest names any more out of its step's folder. Blocks on I/O."""
    if not store.capabilities.rename:
        store.delete(name)
        return
    try:
        _rename_to_trash(store, name, save_id, f"/{name.rpartition('/')[2]}")
    except NotFoundError:
        return


def _rename_to_trash(store: Store, name: str, label: str, rest: str) -> None:
    for trash in (label, new_id()):
        try:
            store.rename(name, f"{TRASH}{trash}{rest}")
        except AlreadyExistsError:
            continue
        return
