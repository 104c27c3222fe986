"""Saving to and loading from storage of a given rate, between GPU and a store in memory that takes its time.

The store moves no byte faster than its rate: writes are counted and waited for, reads are copied out of memory by the threads
that ask for them and waited for. At rates that copying in memory does not reach, reading is bound by that; the rate that plain
reads reach is reported beside.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from bench.gpu.end_to_end import blank_copy, bytes_on_disk, same, tensors_of
from bench.gpu.measure import release, timed
from bench.gpu.record import attempt
from bench.results import spread
from torch.distributed.checkpoint.filesystem import FileSystem

import thinpoint
from thinpoint.proof.throttle import Throttle, ThrottledSource, throttled_file
from thinpoint.store.buffers import pieces
from thinpoint.store.contract import Mapper

RATES = (1e9, 2e9, 5e9, 20e9, 50e9)
"""Bytes per second. The published recipe makes saves slower at the last two."""

Row = dict[str, Any]


class ThrottledSink:
    """See `thinpoint.store.contract.Sink`: takes pieces from several threads, as a local file does, at a rate.

    Args:
        keep: whether to keep what is written.
    """

    def __init__(self, throttle: Throttle, *, keep: bool = False) -> None:
        self._throttle = throttle
        self._written = 0
        self.kept: list[bytes] | None = [] if keep else None

    def tell(self) -> int:
        return self._written

    def write(self, buffer: Any) -> None:
        self.write_all([buffer])

    def write_all(self, buffers: Iterable[Any], map: Mapper = map) -> None:
        cut = list(pieces(buffers, self._written))
        if self.kept is not None:
            self.kept += [bytes(view) for views in cut for view in views]
        sizes = [sum(view.nbytes for view in views) for views in cut]
        for _ in map(self._throttle.move, sizes):
            pass
        self._written += sum(sizes)


def measure_saves(state: Any, device: torch.device, codec: str, rate: float, num_repeats: int) -> Row:
    """Seconds of a synchronous save, and over what the storage alone would take for the stored bytes."""
    seconds, stored = [], 0
    for _ in range(num_repeats):
        sink = ThrottledSink(Throttle(rate))
        seconds.append(timed(lambda sink=sink: thinpoint.save(state, sink, codec=codec), device).wall)
        stored = sink.tell()
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


class ThrottledFiles(FileSystem):
    """DCP's files, kept in memory and read at a rate."""

    def __init__(self, folder: Path, throttle: Throttle) -> None:
        super().__init__()
        self._files = {path.name: np.fromfile(path, np.uint8) for path in folder.iterdir()}
        self._throttle = throttle

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb"
        yield throttled_file(self._files[Path(path).name], self._throttle)


def measure_dcp_loads(folder: Path, state: Any, device: torch.device, rate: float, num_repeats: int) -> Row:
    """Seconds of `dcp.load` into tensors that are there, from a checkpoint of DCP's own."""
    throttle = Throttle(rate)
    reader = dcp.FileSystemReader(folder)
    reader.fs = ThrottledFiles(folder, throttle)
    target = blank_copy(state)
    seconds = [
        timed(lambda: dcp.load(target, storage_reader=reader, no_dist=True), device).wall
        for _ in range(num_repeats)
    ]
    if not same(tensors_of(state), tensors_of(target)):
        return {"error": "not exact: bits came back changed"}
    wait, stored = spread(seconds), bytes_on_disk(folder)
    return {"seconds": asdict(wait), "stored_bytes": stored, "over_storage": wait.median * rate / stored}


def measure_all(
    state: Any, device: torch.device, num_repeats: int, late: Callable[[str], bool] = lambda piece: False
) -> Iterator[Row]:
    """For each rate a row with saves and loads of thinpoint and of its codec raw, and loads of DCP.

    Args:
        late: whether a piece is to be left out.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=8), no_dist=True)
        yield from _rows(state, device, num_repeats, late, Path(folder))


def _rows(
    state: Any, device: torch.device, num_repeats: int, late: Callable[[str], bool], of_dcp: Path
) -> Iterator[Row]:
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
        if not late(f"{rate / 1e9:g} GB/s, DCP"):
            row["dcp"] = {
                "load": attempt(lambda r=rate: measure_dcp_loads(of_dcp, state, device, r, num_repeats))
            }
        yield row
