"""Where and on what a benchmark ran, and the file its numbers go to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from thinpoint.version import __version__

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "numpy", "numba", "zstandard", "zipnn", "safetensors")


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several measurements."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.greatest:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values))


def commit() -> str:
    """The commit measured, with "+" if the checkout has changes; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GB, load average, operating system, versions."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {"thinpoint": __version__, **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(kind: str, values: dict[str, Any]) -> Path:
    """Write one run's numbers with commit, machine and date; the path of the new file."""
    now = datetime.datetime.now(datetime.timezone.utc)
    record = {
        "kind": kind,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        **values,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{kind}-{now:%Y%m%d-%H%M%S}-{record['commit'].rstrip('+')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def describe() -> str:
    """The machine and the versions in two lines, for the head of a table."""
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["packages"].items() if number)
    return (
        f"{here['cpu']}, {here['num_cores']} cores, {here['memory_gb']} GB, load {here['load_average'][0]}, "
        f"Python {here['python']}, commit {commit()}\n{versions}"
    )
