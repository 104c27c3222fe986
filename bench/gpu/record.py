"""Where a benchmark ran on a GPU, and the JSON file its numbers go to while it runs."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.results import commit, machine

from thinpoint.proof.record import gpu_driver, installed_version

_GPU_PACKAGES = ("triton", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")


class Record:
    """The numbers of one run.

    Attributes:
        path: the file; it is replaced as a whole each time.
        values: what is in it; JSON values.
    """

    def __init__(self, folder: Path, kind: str, device: torch.device, settings: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        measured = os.environ.get("THINPOINT_COMMIT") or commit()
        self.path = folder / f"{kind}-{now:%Y%m%d-%H%M%S}-{measured.rstrip('+')}.json"
        self.values: dict[str, Any] = {
            "kind": kind,
            "date": now.isoformat(timespec="seconds"),
            "commit": measured,
            "machine": {**machine(), "gpu": gpu(device)},
            "settings": settings,
        }

    def write(self) -> None:
        """Put what there is so far into the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.values, indent=1) + "\n")
        unfinished.replace(self.path)


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the function returns, or {"error": reason}: one contestant that fails does not end the run."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - whatever a contestant's library raises is its result
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def gpu(device: torch.device) -> dict[str, Any] | None:
    """Name, memory, driver, CUDA and versions of what runs on it; None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "num_multiprocessors": properties.multi_processor_count,
        "driver": gpu_driver(),
        "cuda": torch.version.cuda,
        "packages": {name: found for name in _GPU_PACKAGES if (found := installed_version(name))},
    }
