"""How much of the time a GPU does nothing, by torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events during which the device works; annotations span idle time and do not count."""


def idle_share(step: Callable[[], object], device: torch.device, num_steps: int = 10) -> float | None:
    """The share of the time, 0 to 1, in which no kernel and no copy runs; None on a CPU.

    From the begin of the first kernel to the end of the last one of `num_steps` training steps. Only the device is traced:
    tracing the host would slow it down, and the device would look idler than it is.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return idle_of(json.loads(path.read_text())["traceEvents"])


def idle_of(events: Iterable[dict[str, Any]]) -> float | None:
    """As `idle_share`, of the events of a Chrome trace; None if the device did nothing at all."""
    busy = sorted(
        (event["ts"], event["ts"] + event.get("dur", 0)) for event in events if event.get("cat") in _ON_DEVICE
    )
    if not busy or busy[0][0] == max(end for _, end in busy):
        return None
    covered, reached = 0.0, busy[0][0]
    for begin, end in busy:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (reached - busy[0][0])
