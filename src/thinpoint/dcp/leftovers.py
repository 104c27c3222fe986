"""Files of saves that failed: each rank that could write has left one, and no manifest names it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from thinpoint.errors import DamagedFileError, NotFoundError, ThinpointError, UnsupportedError
from thinpoint.folder.manifest import MAX_MANIFEST_BYTES, parse_manifest
from thinpoint.folder.names import MANIFEST, save_id_of, save_id_of_layout, time_of
from thinpoint.store.contract import Store

log = logging.getLogger("thinpoint")

LEFTOVER_AGE_S = 3600.0
"""Younger ones may belong to a save that another process has under way."""


def named_files(store: Store) -> set[str] | None:
    """The files of the checkpoint in a folder, without its manifest; None if that cannot be read: they may be any."""
    try:
        manifest = parse_manifest(store.get(MANIFEST, MAX_MANIFEST_BYTES), where=f"{store.url}/{MANIFEST}")
    except NotFoundError:
        return set()
    except (DamagedFileError, UnsupportedError) as error:
        log.warning("nothing is deleted beside a manifest that cannot be read: %s", error)
        return None
    names = {file.name for file in manifest.files}
    return names if manifest.layout is None else names | {manifest.layout.name}


def remove_leftovers(store: Store) -> None:
    """Deletes what failed saves left in a folder; what cannot be deleted is in nobody's way."""
    try:
        save_ids = {
            file.name: save_id_of(file.name) or save_id_of_layout(file.name) for file in store.files()
        }
        oldest_s = time.time() - LEFTOVER_AGE_S
        old = {name for name, save_id in save_ids.items() if save_id and time_of(save_id) < oldest_s}
        named = named_files(store) if old else None
        if named is not None:
            delete(store, old - named)
    except ThinpointError as error:
        log.warning("files that failed saves may have left were not looked for: %s", error)


def delete(store: Store, names: Iterable[str]) -> None:
    """Deletes files that no manifest names; what cannot be deleted is in nobody's way."""
    for name in sorted(names):
        try:
            store.delete(name)
        except ThinpointError as error:
            log.warning("a file that is not needed any more stays: %s", error)
