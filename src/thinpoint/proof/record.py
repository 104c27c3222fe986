"""Where and on what a measurement ran, and the JSON file its numbers go to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from thinpoint import version as own_version
from thinpoint.errors import MalformedFileError, NotFoundError, UsageError, from_os_error

FORMAT = "thinpoint-bench"
VERSION = 1
_PACKAGES = ("torch", "triton", "numpy", "numba", "zstandard")

Row = dict[str, Any]


class Deadline:
    """Nothing begins after so many seconds; what is left out is remembered.

    Args:
        max_s: seconds from now; None for no end.
    """

    def __init__(self, max_s: float | None) -> None:
        self._end = None if max_s is None else time.monotonic() + max_s
        self.skipped: list[str] = []

    def is_late(self, piece: str) -> bool:
        """Whether this piece is to be left out."""
        if self._end is None or time.monotonic() < self._end:
            return False
        self.skipped.append(piece)
        return True

    def take_skipped(self) -> list[str]:
        """What was left out since the last call."""
        taken, self.skipped = self.skipped, []
        return taken


def new_record(piece: str, options: Row, gpu: Row | None) -> Row:
    """A record without a result: JSON values, described in docs/bench.md."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "piece": piece,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("THINPOINT_COMMIT") or _commit(),
        "machine": {**_machine(), "gpu": gpu},
        "versions": {
            "thinpoint": own_version.__version__,
            "python": platform.python_version(),
            **{name: installed_version(name) for name in _PACKAGES},
        },
        "options": options,
        "skipped": [],
        "result": {},
    }


def write_record(path: Path, record: Row) -> None:
    """Replaces the file by the record, in one step.

    Raises:
        StorageError: the system refused.
    """
    text = json.dumps(record, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".json.tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise from_os_error(error, "cannot write the file", where=path) from error


def read_record(path: Path) -> Row:
    """The record in a file that `thinpoint bench` wrote.

    Raises:
        NotFoundError, StorageError: it cannot be read.
        MalformedFileError: it is no such file.
        UsageError: it is of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError("there is no such file", errno=error.errno, where=path) from error
    except OSError as error:
        raise from_os_error(error, "cannot read the file", where=path) from error
    except UnicodeDecodeError:
        text = ""
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise MalformedFileError(
            "it is no result of `thinpoint bench`", where=path, hint="Give a JSON file from its --out folder"
        )
    if record.get("version") != VERSION:
        raise UsageError(
            "it is of another version", where=path, expected=VERSION, actual=record.get("version")
        )
    return record


def attempt(function: Callable[[], Row]) -> Row:
    """What the function returns, or {"error": reason}: one contestant that fails does not end the run."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  (whatever a contestant's library raises is its result)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def gpu_facts(device: Any) -> Row | None:
    """Name, memory, driver and CUDA of a torch device; None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": gpu_driver(),
        "cuda": torch.version.cuda,
    }


def filesystem(folder: Path) -> str:
    """The type of the file system that holds the folder, as the kernel names it; "unknown" if it does not say."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, mounted, found, *_ = line.split()
        if folder.resolve().is_relative_to(mounted) and len(mounted) >= len(best):
            best, kind = mounted, found
    return kind


def _machine() -> Row:
    return {
        "cpu": _cpu(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str:
    """The commit of the checkout that the package is in, with "+" if it has changes; "unknown" outside of one."""
    here = Path(own_version.__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        # An environment in somebody else's checkout has a commit too, but not ours.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpu_driver() -> str | None:
    """Version of NVIDIA's driver; None if `nvidia-smi` does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
