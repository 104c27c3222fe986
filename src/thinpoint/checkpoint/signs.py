"""Signs of life: what the ranks of a group know of each other while a collective hangs."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

from thinpoint.checkpoint.runs import Process, this_process
from thinpoint.errors import RankLostError, RanksFailedError

LOOK_S = 0.25
"""How often a rank that waits looks for the others."""

GRACE_S = 1.0
"""How long a rank goes on waiting after another was found dead: what that one has sent before may still arrive."""

_PATIENCE_S = 5.0
"""How long after a broken connection a rank asks who it was that broke it."""


class Signs:
    """Beats of every rank, and the words of those who give up, in the key-value store that the ranks share anyhow.

    Once they have met: a rank whose process has ended is found at once by those on its machine, and by rank 0 elsewhere
    when it has not beaten for a while. May be shared by threads. All calls block on the network, for short.

    Args:
        store: a `torch.distributed.Store` for these signs alone, with a connection of its own.
        rank, world_size: of this process, of the group.
        lost_after_s: without a beat a rank counts as lost.
    """

    def __init__(self, store: Any, rank: int, world_size: int, lost_after_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lost_after_s = lost_after_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._neighbours: dict[int, Process] = {}
        self._watched: list[int] = []
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._dead_since: dict[int, float] = {}
        store.set(f"beat/{rank}", "0")
        threading.Thread(target=self._beat, name="thinpoint-beat", daemon=True).start()

    def meet(self, processes: list[Process]) -> None:
        """From here on the others are watched.

        Args:
            processes: of all ranks, in their order; each has made its `Signs`.
        """
        here = this_process()
        self._neighbours = {
            rank: process
            for rank, process in enumerate(processes)
            if rank != self._rank and (process.host, process.boot_id) == (here.host, here.boot_id)
        }
        self._watched = list(range(1, self._world_size)) if self._rank == 0 else [0]

    def close(self) -> None:
        """No beat any more: for those who go on without this rank, it is lost."""
        self._closed.set()

    def give_up(self, where: str, turn: int, what: str, error: BaseException) -> None:
        """Tells the others that from this turn on this rank does not take part in what `where` names, and why."""
        lost = dict(error.failures) if isinstance(error, RankLostError) else {}
        text = f"{what}: {type(error).__name__}: {error}"[:4000]
        with contextlib.suppress(Exception):
            self._store.set(
                f"gone/{where}",
                json.dumps(
                    {
                        "rank": self._rank,
                        "turn": turn,
                        "text": text,
                        "lost": {r: str(t) for r, t in lost.items()},
                    }
                ),
            )

    def given_up_in(self, where: str) -> int | None:
        """The turn in which some rank has given this up; None if none has."""
        return json.loads(self._get(f"gone/{where}"))["turn"] if self._has(f"gone/{where}") else None

    def look(self, where: str, *, grace_s: float = GRACE_S) -> None:
        """Raises what keeps the others from taking part in what `where` names, if anything does.

        Args:
            grace_s: see GRACE_S.

        Raises:
            RankLostError: a rank has ended, or has not beaten for too long.
            RanksFailedError: a rank has given up; the message is its own.
        """
        with self._lock:
            time_s = time.monotonic()
            if self._has(f"gone/{where}"):
                said = json.loads(self._get(f"gone/{where}"))
                if said["lost"]:
                    raise RankLostError({int(rank): text for rank, text in said["lost"].items()})
                raise RanksFailedError({int(said["rank"]): said["text"]})
            lost = dict.fromkeys(self._silent(time_s), f"no sign of life for {self._lost_after_s:,.1f} s")
            lost |= dict.fromkeys(self._ended(time_s, grace_s), "its process has ended")
            if lost:
                raise RankLostError(lost)

    def who_is_lost(self, where: str) -> RankLostError | RanksFailedError | None:
        """After a connection has broken: who it was. Waits for a while for signs of it."""
        end = time.monotonic() + min(_PATIENCE_S, self._lost_after_s)
        while time.monotonic() < end:
            try:
                self.look(where)
            except (RankLostError, RanksFailedError) as error:
                return error
            time.sleep(LOOK_S)
        return None

    def _ended(self, now: float, grace_s: float) -> list[int]:
        """The ranks on this machine whose processes have ended, so long ago."""
        for rank, process in self._neighbours.items():
            if rank not in self._dead_since and process.is_dead():
                self._dead_since[rank] = now
        return [rank for rank, since in self._dead_since.items() if now - since >= grace_s]

    def _silent(self, now: float) -> list[int]:
        """The ranks that have not beaten for too long. Rank 0 watches all, the others rank 0."""
        silent = []
        for rank, beat in zip(self._watched, self._get_beats(), strict=True):
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            elif now - self._beats[rank][1] > self._lost_after_s:
                silent.append(rank)
        return silent

    def _get_beats(self) -> list[bytes]:
        keys = [f"beat/{rank}" for rank in self._watched]
        try:
            if self._store.has_extended_api():
                return [bytes(beat) for beat in self._store.multi_get(keys)] if keys else []
            return [bytes(self._store.get(key)) for key in keys]
        except Exception as error:
            raise self._store_is_gone(error) from error

    def _beat(self) -> None:
        pause_s = min(5.0, self._lost_after_s / 5)
        number = 0
        while not self._closed.wait(pause_s):
            number += 1
            try:
                self._store.set(f"beat/{self._rank}", str(number))
            except Exception:  # noqa: BLE001
                # Whoever waits for the others finds the store gone, and says so.
                return

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except Exception as error:
            raise self._store_is_gone(error) from error

    def _get(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except Exception as error:
            raise self._store_is_gone(error) from error

    def _store_is_gone(self, error: Exception) -> RankLostError:
        text = " ".join(str(error).split())[:200]
        return RankLostError(
            {
                0: f"the store of the process group, which rank 0 or its launcher holds, does not answer: {text}"
            }
        )
