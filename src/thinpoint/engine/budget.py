"""How much host memory a save may take for what is encoded and not written yet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from thinpoint.errors import UsageError

_SHARE = 2
"""A save takes one half of what is free: the other is for the peaks of training, and for page cache to write through."""

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 spells "no limit" as a number just below 2^63."""


def host_memory_bytes(asked: int | None = None, *, root: Path = Path("/")) -> int:
    """Bytes of host memory that a save of this process may plan with.

    Args:
        asked: bytes, at least 1; None for THINPOINT_HOST_MEMORY, and without that for half of what is free in the
            tightest memory cgroup and on the machine, divided by LOCAL_WORLD_SIZE. What earlier saves have page-locked and
            left to the next counts as free.
        root: where `/proc` and `/sys` are.

    Raises:
        UsageError: the number is not valid.
    """
    if asked is not None:
        if type(asked) is not int or asked < 1:
            raise UsageError("host_memory is not valid", expected="bytes, at least 1", actual=repr(asked))
        return asked
    text = os.environ.get("THINPOINT_HOST_MEMORY")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                "THINPOINT_HOST_MEMORY is not valid",
                expected="a whole number of bytes, at least 1",
                actual=repr(text),
            )
        return int(text)
    return max(1, (free_bytes(root) // local_ranks() + _left_by_earlier_saves()) // _SHARE)


def _left_by_earlier_saves() -> int:
    """Bytes of page-locked memory that saves of this process have left to the next."""
    # Imported by whoever made some; it needs torch.
    pinned = sys.modules.get("thinpoint.device.pinned")
    return 0 if pinned is None else pinned.slab_pool(is_pinned=True).num_free_bytes


def local_ranks() -> int:
    """Processes of the job on this machine: LOCAL_WORLD_SIZE, which torchrun sets, or 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def free_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process can still take, of the machine and of every memory cgroup that it is in.

    Page cache counts as free.
    """
    return max(0, min(_available_bytes(root), *_free_in_cgroups(root), _UNLIMITED_BYTES))


def _available_bytes(root: Path) -> int:
    return _fields(root / "proc/meminfo").get("MemAvailable:", _UNLIMITED_BYTES >> 10) << 10


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Limit less use of the process's memory cgroup and of those above it, version 2 or 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container the path may be the host's, and only the top is there.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(top):
                break
            limit_bytes, used_bytes = _number(place / limit), _number(place / used)
            if limit_bytes is not None and used_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
                stat = _fields(place / "memory.stat")
                reclaimable = stat.get(f"{cache}active_file", 0) + stat.get(f"{cache}inactive_file", 0)
                yield limit_bytes - used_bytes + min(reclaimable, used_bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file."""
    rows = [line.split() for line in _read(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
