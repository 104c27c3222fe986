"""How fast codec, link and storage are on this machine: what decides how long saves and restores take."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thinpoint
from thinpoint.proof.cache import drop_from_cache
from thinpoint.proof.record import filesystem
from thinpoint.proof.scale import Scale
from thinpoint.proof.spread import Spread, spread
from thinpoint.proof.throttle import MemorySink, Throttle, ThrottledSource
from thinpoint.proof.trainer import Trainer, copied, release, synchronize, tensor_bytes

Row = dict[str, Any]
Say = Callable[[str], object]

_NUM_REPEATS = 5
_CHUNK_BYTES = 16 << 20
_MAX_FILE_BYTES = 1 << 30
_NUM_THREADS = 8


def measure_rates(scale: Scale, device: torch.device, folder: Path, say: Say) -> Row:
    """Decimal GB/s, each with median, least and greatest.

    encode: raw bytes of a state through `thinpoint.save` into nothing: with checksums, and on a GPU with the proof and the copy
    to the host. decode: `thinpoint.load_into` from memory. Both also for the codec raw, which copies. to_host, from_host: copies
    of page-locked memory. write: to a new file, until it is durable. read: of that file, not from the page cache if it can be
    dropped; 8 threads.
    """
    say("rates: a state is trained")
    trainer = Trainer(scale.busy, device, scale.corpus_bytes)
    state = copied(trainer.state())
    about = {"model": asdict(trainer.shape), "num_parameters": trainer.num_parameters}
    del trainer
    raw_bytes = tensor_bytes(state)
    result: Row = {**about, "raw_bytes": raw_bytes, "gb_per_s": {}}
    rates = result["gb_per_s"]
    for codec, suffix in (("thin", ""), ("raw", ", codec raw")):
        say(f"rates: codec {codec}")
        stored_bytes, encode, decode = _codec_rates(state, device, codec, raw_bytes)
        rates[f"encode{suffix}"], rates[f"decode{suffix}"] = encode, decode
        if codec == "thin":
            result["ratio"] = raw_bytes / stored_bytes
    num_bytes = min(raw_bytes, _MAX_FILE_BYTES)
    if device.type == "cuda":
        say("rates: link")
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rates["to_host"] = _gb_per_s(num_bytes, device, lambda: on_host.copy_(on_device, non_blocking=True))
        rates["from_host"] = _gb_per_s(num_bytes, device, lambda: on_device.copy_(on_host, non_blocking=True))
        del on_device, on_host
    del state
    release(device)
    say("rates: storage")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        path = Path(inner) / "bytes"
        # Random: some storage compresses.
        data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        rates["write"] = _gb_per_s(num_bytes, device, lambda: _write(path, data))
        result["cold"] = drop_from_cache(path)
        rates["read"] = _gb_per_s(num_bytes, device, lambda: _read(path, data), lambda: drop_from_cache(path))
    result["filesystem"] = filesystem(folder)
    return result


def _codec_rates(state: Any, device: torch.device, codec: str, raw_bytes: int) -> tuple[int, Spread, Spread]:
    """Stored bytes, and the rates of saving into nothing and of loading from memory."""
    sink: Any = MemorySink(keep=True)
    thinpoint.save(state, sink, codec=codec)
    data = sink.data()

    def encode() -> None:
        nowhere: Any = MemorySink(keep=False)
        thinpoint.save(state, nowhere, codec=codec)

    def decode() -> None:
        thinpoint.load_into(ThrottledSource(data, Throttle(1e15)), state)

    return data.size, _gb_per_s(raw_bytes, device, encode), _gb_per_s(raw_bytes, device, decode)


def _gb_per_s(
    num_bytes: int,
    device: torch.device,
    function: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
) -> Spread:
    """The rate of a function that moves so many bytes, after a call that does not count."""
    found = []
    for _ in range(_NUM_REPEATS + 1):
        prepare()
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        found.append(num_bytes / (time.perf_counter() - begin) / 1e9)
    return spread(found[1:])


def _write(path: Path, data: np.ndarray) -> None:
    view = data.data
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())


def _read(path: Path, out: np.ndarray) -> None:
    view = out.data
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_NUM_THREADS) as pool:

        def read(start: int) -> None:
            end = min(start + _CHUNK_BYTES, len(view))
            while start < end:
                start += os.preadv(file.fileno(), [view[start:end]], start)

        list(pool.map(read, range(0, len(view), _CHUNK_BYTES)))
