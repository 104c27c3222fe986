"""What a save tells when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinpoint.file.index import PartEntry


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: where, or the file object's name.
        file_id: digest of the index, 16 hex digits: the file's identity.
        file_bytes: size of the file.
        raw_bytes: bytes of all tensors (and large byte strings), shared ones counted once.
        seconds: from the call to the durable file.
        backend: what coded the tensors: "cpu", "triton", "triton+cpu", ...
        codec: what was asked for; with "auto" what was chosen.
        roles: for each role (raw bytes, stored bytes).
        stall_seconds: from the call to its return, in which the caller's thread could do nothing else; with overlap also
            the time for which the host held an optimizer's step back.
        stages: seconds of each: "flatten" the object, "encode" (with the copy to the host and the proof; with a GPU "pin" is
            the part of it that page-locking host memory took), "wait" of the encoder for storage, "write" (with what is left
            to do for each part), "storage" (of that, what the store took), "commit". Encoding and writing overlap. With
            overlap also "copy" of what is not read in place, "check" of what was, and "hold" of an optimizer's step.
        waves: how many times over the encoded bytes filled the memory that was set aside for them; 1 if they fitted. `save`
            sets aside a few batches of parts, `async_save` the whole budget.
        peak_host_bytes: the most host memory that was planned for encoded bytes at a time.
        host_memory_bytes: the budget: what could have been planned.
        mode: what the caller waited for: "sync" the file, "async" encoding, "overlap" neither.
        fallback: why it is not "overlap", if that was asked for.
    """

    path: str
    file_id: str
    file_bytes: int
    raw_bytes: int
    seconds: float
    backend: str
    codec: str
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    stall_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    waves: int = 1
    peak_host_bytes: int = 0
    host_memory_bytes: int = 0
    mode: str = "sync"
    fallback: str | None = None

    @property
    def ratio(self) -> float:
        """raw_bytes / file_bytes."""
        return self.raw_bytes / self.file_bytes


def bytes_of_roles(entries: Iterable[PartEntry]) -> dict[str, tuple[int, int]]:
    """For each role (raw bytes, stored bytes)."""
    roles: dict[str, tuple[int, int]] = {}
    for entry in entries:
        raw, stored = roles.get(entry.role, (0, 0))
        roles[entry.role] = raw + entry.raw_bytes, stored + entry.stored_bytes
    return roles


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the time that the block takes to a stage's seconds, whatever its end."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin
