"""Time on the clock and on the device, and peak memory of host and device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.results import spread

POISON = 0xA5
"""Fills outputs before they are written: a byte that was not decoded cannot pass for a decoded one."""


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """How long something took.

    Attributes:
        wall: on the host's clock, until the device was done.
        device: between two events on the current stream, gaps included; None on a CPU.
    """

    wall: float
    device: float | None


def timed(function: Callable[[], Any], device: torch.device) -> Seconds:
    """The time of one call; waits for the device before and after."""
    synchronize(device)
    begin = time.perf_counter()
    if device.type != "cuda":
        function()
        return Seconds(wall=time.perf_counter() - begin, device=None)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    function()
    last.record()
    synchronize(device)
    wall = time.perf_counter() - begin
    return Seconds(wall=wall, device=first.elapsed_time(last) / 1e3)


def rates(num_bytes: int, times: list[Seconds]) -> dict[str, Any]:
    """Decimal GB/s by both clocks, each with median, least and greatest."""
    found = {"wall_gb_per_s": asdict(spread([num_bytes / each.wall / 1e9 for each in times]))}
    on_device = [each.device for each in times if each.device]
    if on_device:
        found["device_gb_per_s"] = asdict(spread([num_bytes / seconds / 1e9 for seconds in on_device]))
    return found


def copy_rates(device: torch.device, num_bytes: int, num_repeats: int = 5) -> dict[str, Any]:
    """Copies within the device (bytes read and written both counted) and between it and page-locked memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(POISON)
    target = torch.empty_like(source)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    directions = {
        "device": (2, lambda: target.copy_(source)),
        "device_to_host": (1, lambda: host.copy_(source, non_blocking=True)),
        "host_to_device": (1, lambda: target.copy_(host, non_blocking=True)),
    }
    found = {}
    for name, (factor, copy) in directions.items():
        timed(copy, device)
        found[name] = rates(factor * num_bytes, [timed(copy, device) for _ in range(num_repeats)])
    return found


def release(device: torch.device) -> None:
    """Give back the memory that PyTorch's allocators keep for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()


class PeakMemory:
    """Peak memory between `start` and `stop`, in MiB beyond what was held at the start.

    Host: the kernel's high-water mark of resident memory. Device: PyTorch's allocator; what a library takes from
    the driver directly is not in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Begin anew."""
        self.host: int | None = _status_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.host = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.on_device = torch.cuda.memory_allocated(self.device)

    def stop(self) -> tuple[float | None, float | None]:
        """(host, device); None where this system or device cannot tell."""
        host = _status_bytes("VmHWM") - self.host if self.host is not None else None
        on_device = None
        if self.device.type == "cuda":
            on_device = torch.cuda.max_memory_allocated(self.device) - self.on_device
        return (
            None if host is None else host / 2**20,
            None if on_device is None else on_device / 2**20,
        )


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")
