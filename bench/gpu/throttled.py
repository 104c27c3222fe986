"""Saving to and loading from storage of a given rate, between GPU and a store in memory that takes its time.

The store moves no byte faster than its rate: writes are counted and waited for, reads are copied out of memory by the threads
that ask for them and waited for. At rates that copying in memory does not reach, reading is bound by that; the rate that plain
reads reach is reported beside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from bench.gpu.end_to_end import same, tensors_of
from bench.gpu.measure import release, timed
from bench.gpu.record import attempt
from bench.results import spread

import thinpoint

RATES = (1e9, 2e9, 5e9, 20e9, 50e9)
"""Bytes per second. The published recipe makes saves slower at the last two."""

Row = dict[str, Any]
_SPIN_S = 2e-3


class Throttle:
    """Lets callers pass as if one pipe moved their bytes one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def move(self, num_bytes: int) -> None:
        """Wait until the pipe has moved so many bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
            done = self._free_at
        while (left := done - time.perf_counter()) > 0:
            time.sleep(left - _SPIN_S if left > _SPIN_S else 0)


class ThrottledSink:
    """A file object that takes bytes at a rate; keeps them if it is asked to."""

    def __init__(self, throttle: Throttle, *, keep: bool = False) -> None:
        self.throttle = throttle
        self.kept: list[bytes] | None = [] if keep else None
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.kept is not None:
            self.kept.append(bytes(view))
        self.throttle.move(view.nbytes)
        self.num_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Everything that was written is there."""


class ThrottledSource:
    """See `thinpoint.store.contract.Source`: ranges of bytes in memory, at a rate."""

    name = "throttled"

    def __init__(self, data: np.ndarray, throttle: Throttle) -> None:
        self.data, self.throttle = data, throttle

    @property
    def size(self) -> int:
        return self.data.size

    def read_at(self, offset: int, size: int) -> np.ndarray:
        out = np.empty(size, np.uint8)
        self.read_into(offset, out)
        return out

    def read_into(self, offset: int, buffer: Any) -> None:
        target = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer
        target = target.reshape(-1).view(np.uint8)
        target[...] = self.data[offset : offset + target.size]
        self.throttle.move(target.size)

    def close(self) -> None:
        """Nothing to give back."""


def measure_saves(state: Any, device: torch.device, codec: str, rate: float, num_repeats: int) -> Row:
    """Seconds of a synchronous save, and over what the storage alone would take for the stored bytes."""
    seconds, stored = [], 0
    for _ in range(num_repeats):
        sink = ThrottledSink(Throttle(rate))
        seconds.append(timed(lambda sink=sink: thinpoint.save(state, sink, codec=codec), device).wall)
        stored = sink.num_bytes
    wait = spread(seconds)
    return {"seconds": asdict(wait), "stored_bytes": stored, "over_storage": wait.median * rate / stored}


def measure_loads(data: np.ndarray, state: Any, device: torch.device, rate: float, num_repeats: int) -> Row:
    """Seconds of a load into new tensors on the device, beside reading the same bytes and no more."""
    seconds = []
    loaded: list[Any] = []
    for _ in range(num_repeats):
        loaded.clear()
        source = ThrottledSource(data, Throttle(rate))
        seconds.append(timed(lambda source=source: loaded.append(thinpoint.load(source)), device).wall)
    if not same(tensors_of(state), tensors_of(loaded[0])):
        return {"error": "not exact: bits came back changed"}
    wait = spread(seconds)
    return {
        "seconds": asdict(wait),
        "stored_bytes": data.size,
        "over_storage": wait.median * rate / data.size,
    }


def measure_all(
    state: Any, device: torch.device, num_repeats: int, late: Callable[[str], bool] = lambda piece: False
) -> Iterator[Row]:
    """For each rate a row with saves and loads of thinpoint and of its codec raw.

    Args:
        late: whether a piece is to be left out.
    """
    files = {}
    for codec in ("thin", "raw"):
        sink = ThrottledSink(Throttle(1e12), keep=True)
        thinpoint.save(state, sink, codec=codec)
        assert sink.kept is not None
        files[codec] = np.frombuffer(b"".join(sink.kept), np.uint8)
    for rate in RATES:
        row: Row = {"gb_per_s": rate / 1e9}
        for codec in ("thin", "raw"):
            if late(f"{rate / 1e9:g} GB/s, codec {codec}"):
                continue
            row[codec] = {
                "save": attempt(lambda c=codec, r=rate: measure_saves(state, device, c, r, num_repeats)),
                "load": attempt(
                    lambda c=codec, r=rate: measure_loads(files[c], state, device, r, num_repeats)
                ),
            }
            release(device)
        yield row
