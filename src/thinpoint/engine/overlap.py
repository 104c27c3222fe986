"""Saves that read parameters and optimizer state in place while the next forward and backward run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from thinpoint.engine.backends import Backends
from thinpoint.engine.background import STOPPED_WAIT_S, BackgroundSave, save_in_background
from thinpoint.engine.encode import DEVICE_WAVE_BYTES
from thinpoint.engine.future import SaveFuture
from thinpoint.engine.overlap_check import CheckedFlow, InPlace
from thinpoint.engine.overlap_copies import copied
from thinpoint.engine.overlap_owners import (
    Owned,
    checked_optimizers,
    known_optimizers,
    owned_by,
    storage_key,
    why_not_in_place,
)
from thinpoint.engine.overlap_reading import Reading
from thinpoint.engine.report import timed
from thinpoint.engine.save import Saving
from thinpoint.engine.task import SaveTask
from thinpoint.engine.workers import Workers
from thinpoint.state.leaves import FlatState, StorageSource

log = logging.getLogger("thinpoint")

MAX_COPY_BYTES = DEVICE_WAVE_BYTES
"""What may be copied on each device before the call returns: as much as encoding takes there at a time."""

MIN_HOST_BYTES = 4096
"""A smaller storage in host memory (an optimizer's `step`) is copied sooner than it is watched."""


def save_overlapped(task: SaveTask, obj: Any, optimizers: Any = None) -> SaveFuture:
    """Begin to read an object in place, on a thread of its own; returns at once. See `thinpoint.async_save`.

    Waits first for the end of the save before. Errors are in the future; what interrupts this thread is raised.

    Args:
        optimizers: those whose tensors may be read in place; None for all that can be found.

    Raises:
        UsageError: `optimizers` holds something else.
    """
    given = checked_optimizers(optimizers)
    return save_in_background(task, obj, partial(_make, optimizers=given))


class OverlapSave(BackgroundSave):
    """A save whose caller trains on while it is encoded. See `BackgroundSave`."""

    mode = "overlap"

    def __init__(self, task: SaveTask, saving: OverlapSaving) -> None:
        super().__init__(task, saving)
        self._reading = saving.reading
        self._returned_s = 0.0
        self._reader = threading.Thread(target=super().encode, name="thinpoint-read", daemon=True)

    def encode(self) -> None:
        """Begin to encode, on a thread of its own; steps of the optimizers wait from here on until it is done."""
        try:
            self._reading.begin()
            self._returned_s = time.perf_counter() - self._task.begin
            self._reader.start()
        except BaseException as error:
            self._saving.stop(error)
            self.future.set_outcome(error)
            self._reading.end()
            if not isinstance(error, Exception):
                self._thread.join()
                raise

    def finish(self, wait_s: float) -> bool:
        """See `BackgroundSave.finish`."""
        is_finished = super().finish(wait_s)
        if is_finished and self._reader.is_alive():
            self._reader.join(STOPPED_WAIT_S)
        return is_finished

    def _stalled_s(self) -> float:
        return self._returned_s + self._reading.held_s


class OverlapSaving(Saving):
    """A save of a state of which a part is read in place. See `Saving`.

    Args:
        state: what is saved; only what is in `in_place` may not change until `encode` has returned.
        in_place: its storages that are read in place.
        reading: ends when they have been read.

    Attributes:
        reading: see above.
    """

    def __init__(
        self, state: FlatState, backends: Backends, *, in_place: InPlace, reading: Reading, **options: Any
    ) -> None:
        super().__init__(state, backends, **options)
        # A step that waits for a wave should not wait long, and training needs the memory.
        self._wave_scale = 1
        self.reading = reading
        self._in_place: InPlace | None = in_place
        self._flow: CheckedFlow = CheckedFlow(self._flow.limit_bytes, in_place)

    def encode(self, workers: Workers) -> None:
        """Encode everything, then look at what was read in place once more. See `Saving.encode`."""
        try:
            self._flow.check_read = partial(self._check, workers)
            with self.reading.on_streams():
                super().encode(workers)
        finally:
            self.reading.end()
            self._in_place = None
            self._flow.check_read = dict
            self.seconds["hold"] = self.reading.held_s

    def _check(self, workers: Workers) -> dict[tuple[int, int], int]:
        assert self._in_place is not None
        with timed(self.seconds, "check"):
            return self._in_place.check(workers, self._backends.devices, self.reading.launched)


@dataclass(frozen=True)
class _Choice:
    """What of a state is read in place.

    Attributes:
        places: indices of storages.
        owned: what optimizers own of the state.
        reason: why nothing is; None if it may be.
    """

    places: list[int]
    owned: Owned
    reason: str | None


def _make(task: SaveTask, obj: Any, *, optimizers: list[Optimizer] | None) -> BackgroundSave:
    """The save; a plain one, with the reason in the log and the report, where reading in place is not safe."""
    state, seconds = task.flat(obj)
    options = task.options(seconds, may_fill_budget=True)
    keys = [_key(storage) for storage in state.storages]
    choice = _choose(state.storages, keys, optimizers)
    if choice.reason is not None:
        log_fallback(choice.reason)
        return BackgroundSave(task, Saving(state, task.backends, **options), choice.reason)
    with timed(seconds, "copy"):
        tensors = [choice.owned.tensors[key] for key in (keys[i] for i in choice.places) if key is not None]
        in_place = InPlace(state.storages, choice.places, tensors)
        own = in_place.sources()
        storages = [own.get(i) or copied(storage) for i, storage in enumerate(state.storages)]
        reading = Reading(choice.owned, {torch.device(s.device) for s in state.storages})
    saving = OverlapSaving(
        replace(state, storages=storages), task.backends, in_place=in_place, reading=reading, **options
    )
    return OverlapSave(task, saving)


def _choose(
    storages: list[StorageSource], keys: list[int | None], optimizers: list[Optimizer] | None
) -> _Choice:
    """What to read in place: what the given optimizers own, or those known, or, if that is too little, all there are."""
    if optimizers is not None:
        return _choice(storages, keys, optimizers)
    choice = _choice(storages, keys, known_optimizers())
    if choice.reason is not None and not why_not_in_place(choice.owned.optimizers):
        choice = _choice(storages, keys, known_optimizers(search=True))
    return choice


def _choice(
    storages: list[StorageSource], keys: list[int | None], optimizers: Iterable[Optimizer]
) -> _Choice:
    owned = owned_by(optimizers, {key for key in keys if key is not None})
    places = [i for i, key in enumerate(keys) if key in owned.tensors and _is_worth_it(storages[i])]
    reason = why_not_in_place(owned.optimizers)
    if not owned.optimizers:
        reason = "nothing in the state belongs to a torch optimizer that is known"
    elif reason is None:
        reason = _too_much(storages, frozenset(places))
    return _Choice(places, owned, reason)


def _key(storage: StorageSource) -> int | None:
    return None if storage.view is None or not storage.regions else storage_key(storage.view(0, 0))


def _is_worth_it(storage: StorageSource) -> bool:
    return storage.device != "cpu" or storage.num_bytes >= MIN_HOST_BYTES


def _too_much(storages: list[StorageSource], places: frozenset[int]) -> str | None:
    """The reason if more than MAX_COPY_BYTES would have to be copied on a device."""
    to_copy: dict[str, int] = {}
    for i, storage in enumerate(storages):
        if i not in places:
            to_copy[storage.device] = to_copy.get(storage.device, 0) + storage.num_bytes
    for device, num_bytes in to_copy.items():
        if num_bytes > MAX_COPY_BYTES:
            return (
                f"too much on {device} belongs to no torch optimizer that is known: "
                f"more than {MAX_COPY_BYTES:,} bytes would have to be copied first"
            )
    return None


@cache
def log_fallback(reason: str) -> None:
    """Once for each reason: it is the same at every save of a run."""
    log.warning("saving without overlap, as `async_save` does otherwise: %s", reason)
