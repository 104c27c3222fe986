"""Saving to and loading from storage of a given rate, between GPU and a store in memory that takes its time.

The store moves no byte faster than its rate: writes are counted and waited for, reads are copied out of memory by the threads
that ask for them and waited for. At rates that copying in memory does not reach, reading is bound by that; the rate that plain
reads reach is reported beside.
"""

from __future__ import annotations

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
from thinpoint.proof.throttle import Throttle, ThrottledSource

RATES = (1e9, 2e9, 5e9, 20e9, 50e9)
"""Bytes per second. The published recipe makes saves slower at the last two."""

Row = dict[str, Any]


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
