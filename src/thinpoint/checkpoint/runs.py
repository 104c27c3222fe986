"""Who writes to a directory: each run claims it with a file, the run with the largest generation owns it."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from functools import cache

from thinpoint.checkpoint.log import log
from thinpoint.checkpoint.names import RUNS, new_id, run_id_of, run_name
from thinpoint.errors import DamagedFileError, NotFoundError, SupersededError
from thinpoint.file.limits import MAX_INT64
from thinpoint.folder import records
from thinpoint.store.contract import Store

MAX_RUN_BYTES = 64 << 10
_MAX_PID = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, told apart from every other that there has ever been on any machine.

    Attributes:
        host: the machine's name.
        boot_id: another one after each start of the machine; empty where the system gives none.
        pid_namespace: in which `pid` counts; empty where the system gives none.
        pid: its number.
        start_ticks: when it began, in the system's ticks since the start of the machine; 0 where the system gives none.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    def is_dead(self) -> bool:
        """Whether it is proven that the process has ended: it was of this machine, and its number is free or another's."""
        here = this_process()
        if not self.boot_id or not self.pid_namespace or not self.start_ticks:
            return False
        if (self.host, self.boot_id, self.pid_namespace) != (here.host, here.boot_id, here.pid_namespace):
            return False
        ticks = _start_ticks(self.pid)
        return not _exists(self.pid) if ticks is None else ticks != self.start_ticks


def this_process() -> Process:
    """The calling process."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> Process:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot_id = pid_namespace = ""
    return Process(
        host=socket.gethostname(),
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        pid=pid,
        start_ticks=_start_ticks(pid) or 0,
    )


def _start_ticks(pid: int) -> int | None:
    """When a process of this machine began; 0 for one that has ended and is not waited for yet; None if the system is silent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field is the program's name in parentheses and may hold anything.
            fields = file.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _exists(pid: int) -> bool:
    """Whether there is such a process: another user's may be hidden from /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's claim on a directory.

    Attributes:
        run_id: see `names.new_id`; ids of its saves end with its tag.
        process: who.
        claimed_at_s: seconds since 1970.
        generation: the run with the largest one owns the directory; of two equal ones that with the larger id.
    """

    run_id: str
    process: Process
    claimed_at_s: float
    generation: int

    @property
    def rank(self) -> tuple[int, str]:
        """Sorts as claims do."""
        return self.generation, self.run_id

    def __str__(self) -> str:
        return f"run {self.run_id} (generation {self.generation}, process {self.process.pid} on {self.process.host})"


def dump_run(run: Run) -> bytes:
    """A claim as stored."""
    return records.dump(
        {
            "run": 1,
            "run_id": run.run_id,
            "claimed_at_s": run.claimed_at_s,
            "generation": run.generation,
            **vars(run.process),
        }
    )


def parse_run(raw: bytes, *, run_id: str, where: str) -> Run:
    """The claim in untrusted bytes.

    Raises:
        MalformedFileError, LimitExceededError: it is damaged.
    """
    fields = records.Fields.parse(raw, what="the run", where=where)
    if fields.text("run_id") != run_id:
        raise fields.error("run_id is not that of the name", run_id, fields.text("run_id"))
    return Run(
        run_id=run_id,
        process=Process(
            host=fields.text("host"),
            boot_id=fields.text("boot_id"),
            pid_namespace=fields.text("pid_namespace"),
            pid=max(1, fields.number("pid", _MAX_PID)),
            start_ticks=fields.number("start_ticks", MAX_INT64),
        ),
        claimed_at_s=fields.seconds("claimed_at_s"),
        generation=fields.number("generation", MAX_INT64),
    )


def read_runs(store: Store, known: dict[str, Run] | None = None) -> dict[str, Run]:
    """All claims by run id. One that is damaged is left out and logged. Blocks on I/O.

    Args:
        known: claims read before, which are not read again: they never change.
    """
    runs = {}
    for file in store.files(RUNS):
        run_id = run_id_of(file.name)
        if run_id is None:
            continue
        if known and run_id in known:
            runs[run_id] = known[run_id]
            continue
        try:
            runs[run_id] = parse_run(store.get(file.name, MAX_RUN_BYTES), run_id=run_id, where=file.name)
        except NotFoundError:
            continue
        except DamagedFileError as error:
            log.warning("a run's file is damaged and left out: %s", error)
    return runs


class Claim:
    """This process's claim on a directory. May be shared by threads; all methods block on I/O.

    Args:
        store: the directory.
    """

    def __init__(self, store: Store) -> None:
        self._known = read_runs(store)
        self.run = Run(
            run_id=new_id(),
            process=this_process(),
            claimed_at_s=time.time(),
            generation=1 + max((run.generation for run in self._known.values()), default=0),
        )
        store.put(run_name(self.run.run_id), dump_run(self.run), if_absent=True)

    def check(self, store: Store) -> None:
        """Raises SupersededError if a newer run has taken over, or somebody has removed the claim."""
        self._known = read_runs(store, self._known)
        newest = max(self._known.values(), key=lambda run: run.rank, default=None)
        if newest is None or self.run.run_id not in self._known:
            raise SupersededError("this run's claim is gone", where=store.url, expected=str(self.run))
        if newest.rank > self.run.rank:
            raise SupersededError(
                "another run has taken over", where=store.url, expected=str(self.run), actual=str(newest)
            )
