"""Rates measured here: the codec, the link to the GPU, the storage. Bounded, and cleans up."""

from __future__ import annotations

import io
import math
import os
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinpoint.advisor.inputs import Case
from thinpoint.advisor.words import size
from thinpoint.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    import torch

    from thinpoint.store import Store

DEFAULT_BYTES = 256 << 20
LEAST_BYTES = 1 << 20
MOST_BYTES = 8 << 30
MAX_S = 60.0
"""No repeat of a probe begins after this many seconds."""

NUM_REPEATS = 3

_CODECS = {"thinpoint": "thin", "nvcomp-zstd": "nvcomp-zstd", "nvcomp-ans": "nvcomp-ans"}


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """Raw GB/s (decimal) of one codec in memory, on this process's device; encode with what `save` does by default."""

    encode_gb_per_s: float
    decode_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, decimal GB/s, medians of at most NUM_REPEATS. One process, one GPU at most.

    Attributes:
        device: "cpu", "cuda:0": where the state was.
        num_bytes: size of the state.
        codecs: rates by the advisor's name of the codec.
        skipped: why a codec was not measured, by name.
        link_gb_per_s: from the GPU to page-locked host memory; None without a GPU.
        write_gb_per_s, read_gb_per_s: storage; None if no folder was given. Reading may come from a cache.
        folder: that was written to.
    """

    device: str
    num_bytes: int
    codecs: dict[str, CodecRate]
    skipped: dict[str, str]
    link_gb_per_s: float | None
    write_gb_per_s: float | None
    read_gb_per_s: float | None
    folder: str | None

    def apply(self, case: Case, *, keeps_scope: bool = False) -> Case:
        """The case with these rates in place of its own. They are decimal, whatever the case's unit is.

        A probe in one process sees what one node gets, so the storage's scope becomes "node", unless `keeps_scope`.
        """
        factor = 1e9 / case.storage.unit_bytes
        codecs = tuple(
            replace(
                codec,
                encode_gb_per_s=self.codecs[codec.name].encode_gb_per_s * factor,
                decode_gb_per_s=self.codecs[codec.name].decode_gb_per_s * factor,
                scope="gpu",
                source=f"{codec.source}; rates measured here on {self.device}",
            )
            if codec.name in self.codecs
            else codec
            for codec in case.codecs
        )
        cluster, storage = case.cluster, case.storage
        if self.link_gb_per_s is not None:
            cluster = replace(cluster, link_gb_per_s=self.link_gb_per_s * factor)
        if self.write_gb_per_s is not None and self.read_gb_per_s is not None:
            storage = replace(
                storage,
                gb_per_s=self.write_gb_per_s * factor,
                read_gb_per_s=self.read_gb_per_s * factor,
                scope=storage.scope if keeps_scope else "node",
            )
        return replace(case, cluster=cluster, storage=storage, codecs=codecs)


def plan_text(folder: str | None, num_bytes: int) -> str:
    """What `measure` is going to do, in words, to be shown before."""
    what = f"takes about {size(4 * num_bytes)} of memory and up to {MAX_S:.0f} s"
    if folder is None:
        return f"measuring: {what}; writes no files"
    return f"measuring: {what}; writes one file of {size(num_bytes)} to {folder} at a time and deletes it"


def measure(
    folder: str | None = None,
    *,
    num_bytes: int = DEFAULT_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """The rates of this machine: a synthetic AdamW state is saved to and loaded from memory, copied, and saved raw to `folder`.

    Args:
        folder: a path or URL of storage to measure, which need not exist; None for no storage. Files written there are deleted,
            also after an error.
        num_bytes: size of the state; LEAST_BYTES to MOST_BYTES.
        say: called with a line before each probe.

    Raises:
        UsageError: the size is not allowed, or torch is missing.
        StorageError: the folder cannot be written to.
    """
    if not LEAST_BYTES <= num_bytes <= MOST_BYTES:
        raise UsageError(
            "the size to measure with is not valid",
            expected=f"{LEAST_BYTES:,} to {MOST_BYTES:,} bytes",
            actual=f"{num_bytes:,}",
        )
    try:
        import torch
    except ImportError as error:
        raise UsageError("measuring needs torch", hint="`pip install 'thinpoint[torch]'`") from error
    deadline = time.monotonic() + MAX_S
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    # The storage first: what is wrong with the folder shows at once.
    state = synthetic_state(num_bytes, device)
    write = read = None
    if folder is not None:
        say(f"storage: {folder}")
        write, read = _storage_rates(folder, state, deadline)
    rates: dict[str, CodecRate] = {}
    skipped: dict[str, str] = {}
    for name, codec in _CODECS.items():
        if codec != "thin" and device.type == "cpu":
            skipped[name] = "there is no GPU here"
            continue
        say(f"codec: {name} on {device}")
        try:
            rates[name] = _codec_rate(state, codec, deadline)
        except BackendUnavailableError as error:
            skipped[name] = error.what
    link = None
    if device.type == "cuda":
        say(f"link: {device} to host")
        link = _link_rate(num_bytes, device, deadline)
    return Measured(
        device=str(device),
        num_bytes=num_bytes,
        codecs=rates,
        skipped=skipped,
        link_gb_per_s=link,
        write_gb_per_s=write,
        read_gb_per_s=read,
        folder=folder,
    )


def synthetic_state(num_bytes: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """BF16 weights and FP32 moments like AdamW's, in matrices of 1,024 columns; the same values each time.

    Args:
        num_bytes: of all together, rounded down to whole rows.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = max(num_bytes // (10 * 1024), 1)
    # Made on the host, a block repeated: random numbers for all of it would take longer than the probes.
    block = torch.randn((min(rows, 2048), 1024), generator=generator)
    scale = torch.rand((block.shape[0], 1), generator=generator).exp_()
    many = -(-rows // block.shape[0])
    first = block.flip(0) * scale * 1e-4
    made = {"weights": (block * 0.02).bfloat16(), "exp_avg": first, "exp_avg_sq": first.square() * 0.9}
    return {name: tensor.repeat(many, 1)[:rows].to(device) for name, tensor in made.items()}


class _Counter:
    """A file object that takes everything at once."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes

    def flush(self) -> None:
        """There is nothing to flush."""


def _repeated(once: Callable[[], float], deadline: float) -> float:
    """The median of some runs, the first of which warms up and does not count unless time is out."""
    results = [once()]
    while len(results) <= NUM_REPEATS and time.monotonic() < deadline:
        results.append(once())
    return statistics.median(results[1:] or results)


def _codec_rate(state: dict[str, torch.Tensor], codec: str, deadline: float) -> CodecRate:
    from thinpoint.api import load, save
    from thinpoint.store import MemorySource

    raw_bytes = sum(tensor.nbytes for tensor in state.values())

    def encode() -> float:
        report = save(state, _Counter(), codec=codec)
        return raw_bytes / report.stages["encode"] / 1e9

    encode_rate = _repeated(encode, deadline)
    file = io.BytesIO()
    save(state, file, codec=codec)

    def decode() -> float:
        stored: Any = MemorySource(file.getbuffer())
        begin = time.perf_counter()
        loaded = load(stored)
        _wait_for_device(loaded)
        return raw_bytes / (time.perf_counter() - begin) / 1e9

    return CodecRate(encode_gb_per_s=encode_rate, decode_gb_per_s=_repeated(decode, deadline))


def _wait_for_device(state: dict[str, torch.Tensor]) -> None:
    import torch

    for tensor in state.values():
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _link_rate(num_bytes: int, device: torch.device, deadline: float) -> float:
    import torch

    source = torch.empty(min(num_bytes, 1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)

    def copy() -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return source.nbytes / (time.perf_counter() - begin) / 1e9

    return _repeated(copy, deadline)


def _storage_rates(folder: str, state: dict[str, torch.Tensor], deadline: float) -> tuple[float, float]:
    """GB/s of durable writes and of reads after the page cache was dropped, where the system lets us."""
    from thinpoint.api import save
    from thinpoint.store import open_store

    store = open_store(folder)
    name = f"thinpoint-probe-{uuid.uuid4().hex[:12]}.thin"
    existed = os.path.isdir(folder)
    host = {key: tensor.cpu() for key, tensor in state.items()}

    def write() -> float:
        begin = time.perf_counter()
        report = save(host, store.sink(name, overwrite=True), codec="raw")
        return report.file_bytes / (time.perf_counter() - begin) / 1e9

    try:
        write_rate = _repeated(write, deadline)
        return write_rate, _repeated(lambda: _read(store, folder, name), deadline)
    finally:
        store.delete(name)
        if not existed and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)


def _read(store: Store, folder: str, name: str) -> float:
    import numpy as np

    path = os.path.join(folder, name)
    if hasattr(os, "posix_fadvise") and os.path.isfile(path):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    source = store.source(name)
    try:
        buffer = np.empty(min(source.size, 32 << 20), np.uint8)
        begin = time.perf_counter()
        for offset in range(0, source.size, buffer.size):
            source.read_into(offset, buffer[: min(buffer.size, source.size - offset)])
        return source.size / max(time.perf_counter() - begin, math.ulp(1.0)) / 1e9
    finally:
        source.close()
