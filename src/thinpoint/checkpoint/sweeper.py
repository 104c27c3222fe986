"""Deletions, in the background: one after the other, on a thread that holds nobody up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from thinpoint.checkpoint.lane import Deadline, retry
from thinpoint.checkpoint.leftovers import dead
from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import new_id, save_id_in
from thinpoint.checkpoint.retention import drop_file, drop_step
from thinpoint.checkpoint.runs import Claim
from thinpoint.errors import SupersededError
from thinpoint.store.contract import Store


class Sweeper:
    """Cleans a directory up. May be shared by threads.

    A superseded run deletes nothing. What fails is logged and tried again at the next sweep.

    Args:
        store, claim: what is cleaned up, in whose name.
        orphan_age_s: see `leftovers.dead`.
        pause_s: seconds between two files.
        retries: see `lane.retry`.
    """

    def __init__(
        self, store: Store, claim: Claim, *, orphan_age_s: float, pause_s: float, retries: int
    ) -> None:
        self._store = store
        self._claim = claim
        self._orphan_age_s = orphan_age_s
        self._pause_s = pause_s
        self._retries = retries
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._changed = threading.Condition()
        self._hurry = threading.Event()

    def request(self, expired: Callable[[], Iterable[int]] = tuple, replaced: Iterable[str] = ()) -> None:
        """Asks for a sweep; returns at once.

        Args:
            expired: gives the steps to delete; called in the background.
            replaced: files to delete, of checkpoints that were replaced.
        """
        with self._changed:
            self._jobs.append(lambda: self._sweep(expired, tuple(replaced)))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="thinpoint-sweep", daemon=True).start()

    def finish(self, timeout_s: float) -> bool:
        """Waits until everything asked for is done, without pauses between files; False if it takes longer."""
        deadline = Deadline(timeout_s)
        self._hurry.set()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._is_running, deadline.remaining())
        self._hurry.clear()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except SupersededError as error:
                log.warning("nothing is deleted: %s", error)
            except Exception as error:  # noqa: BLE001
                log.warning("the clean-up did not get to its end: %s", error)

    def _sweep(self, expired: Callable[[], Iterable[int]], replaced: tuple[str, ...]) -> None:
        store, retries = self._store, self._retries
        retry(lambda: self._claim.check(store), retries)
        for step in retry(lambda: tuple(expired()), retries):
            retry(lambda step=step: drop_step(store, step), retries)  # type: ignore[misc]
        for name in replaced:
            label = save_id_in(name.rpartition("/")[2]) or new_id()
            retry(lambda name=name, label=label: drop_file(store, name, label), retries)  # type: ignore[misc]
        for file in retry(lambda: dead(store, orphan_age_s=self._orphan_age_s), retries):
            log.debug("deleting %s: %s", file.name, file.reason)
            retry(lambda name=file.name: store.delete(name), retries)  # type: ignore[misc]
            self._hurry.wait(self._pause_s)
