"""Saving and loading a state that lives on the GPU: seconds, rates and peak memory of thinpoint and its peers.

A save ends when the file is durable (fsync included, also for peers that leave it out), a load when the tensors are on
the device. Before a load from a disk the file's pages are dropped from the page cache. After every load every
bit is compared.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench.gpu.measure import POISON, PeakMemory, release, timed
from bench.gpu.raw_io import RawFiles
from bench.gpu.record import attempt
from bench.gpu.states import State
from bench.results import spread
from torch import Tensor

import thinpoint

NUM_THREADS = 8
TARGET = 0.9
"""Share of the raw writer's rate times the ratio that thinpoint is to reach."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Saver:
    """A way to save a whole state.

    Attributes:
        name: for people.
        save: state, path.
        load: path, state of the same structure with other values -> state.
        in_place: load fills the tensors that it is given.
    """

    name: str
    save: Callable[[Any, Path], Any]
    load: Callable[[Path, Any], Any]
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where files go.

    Attributes:
        name: "RAM disk" or "disk".
        folder: exists.
        num_rounds: rounds measured at most, after one that does not count if there are more.
        max_case_s: no further round begins after so many seconds of a case.
        drop_cache: drop files from the page cache before they are loaded.
    """

    name: str
    folder: Path
    num_rounds: int
    max_case_s: float
    drop_cache: bool


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a state in order."""
    if isinstance(value, Tensor):
        return [value]
    children = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    )
    return [tensor for child in children for tensor in tensors_of(child)]


def blank_copy(value: Any) -> Any:
    """A copy of a state whose tensors are poisoned."""
    if isinstance(value, Tensor):
        blank = torch.empty_like(value)
        blank.reshape(-1).view(torch.uint8).fill_(POISON)
        return blank
    if isinstance(value, Mapping):
        return {key: blank_copy(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [blank_copy(child) for child in value]
    return value


def thin(name: str, **options: Any) -> Saver:
    """thinpoint.save with some options; load checks every checksum."""
    return Saver(
        name=name,
        save=lambda state, path: thinpoint.save(state, path, **options),
        load=lambda path, _: thinpoint.load(path),
    )


def raw(name: str, device: torch.device, num_threads: int, file_per_thread: bool = False) -> Saver:
    """The tensors' bytes and nothing else."""

    def files(path: Path) -> RawFiles:
        return RawFiles(path, device, num_threads=num_threads, file_per_thread=file_per_thread)

    def load(path: Path, like: Any) -> Any:
        files(path).load(tensors_of(like))
        return like

    return Saver(
        name=name, save=lambda state, path: files(path).save(tensors_of(state)), load=load, in_place=True
    )


def torch_saver() -> Saver:
    """torch.save and torch.load, and an fsync."""

    def save(state: Any, path: Path) -> None:
        torch.save(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    return Saver(name="torch.save", save=save, load=lambda path, _: torch.load(path, weights_only=True))


def dcp_saver() -> Saver:
    """torch.distributed.checkpoint in one process, several files written by as many threads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    def save(state: Any, path: Path) -> None:
        dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=NUM_THREADS), no_dist=True)

    def load(path: Path, like: Any) -> Any:
        dcp.load(like, storage_reader=FileSystemReader(path), no_dist=True)
        return like

    return Saver(name=f"DCP, {NUM_THREADS} threads", save=save, load=load, in_place=True)


_WARM_UP_PARAMETERS = 12
RAW_NAME = f"raw bytes, one file, {NUM_THREADS} threads"
THIN_NAME = "thinpoint"


def savers(device: torch.device) -> list[Saver]:
    """Everything that is measured; the raw writer first, since the target is made from it."""
    return [
        raw(RAW_NAME, device, NUM_THREADS),
        raw("raw bytes, one file, 1 thread", device, 1),
        raw(
            f"raw bytes, {NUM_THREADS} files, {NUM_THREADS} threads",
            device,
            NUM_THREADS,
            file_per_thread=True,
        ),
        thin(THIN_NAME),
        thin("thinpoint, no proof", prove=False),
        thin("thinpoint, codec nvcomp-zstd", codec="nvcomp-zstd"),
        thin("thinpoint, codec nvcomp-ans", codec="nvcomp-ans"),
        dcp_saver(),
        torch_saver(),
    ]


def measure(saver: Saver, state: Any, place: Place, device: torch.device) -> Row:
    """Seconds, rates, ratio and peak memory of one saver in one place, or an error if a bit did not come back."""
    originals = tensors_of(state)
    raw_bytes = sum(tensor.nbytes for tensor in originals)
    path = place.folder / "thinpoint-bench.out"
    save_s, load_s = [], []
    save_peaks, load_peaks = [], []
    stored_bytes = 0
    memory = PeakMemory(device)
    begin = time.perf_counter()
    try:
        for i_round in range(place.num_rounds + 1):
            if i_round and time.perf_counter() - begin > place.max_case_s:
                break
            remove(path)
            memory.start()
            save_s.append(timed(lambda: saver.save(state, path), device).wall)
            save_peaks.append(memory.stop())
            stored_bytes = bytes_on_disk(path)
            if place.drop_cache:
                _drop_cache(path)
            like = blank_copy(state) if saver.in_place else None
            loaded, seconds, (host, on_device) = _load(saver, path, like, memory)
            load_s.append(seconds)
            if on_device is not None and not saver.in_place:
                on_device -= sum(t.nbytes for t in originals if t.device == device) / 2**20
            load_peaks.append((host, on_device))
            if not same(originals, tensors_of(loaded)):
                return {"error": "not exact: bits came back changed"}
            del loaded, like
    finally:
        remove(path)
        release(device)
    # The first round makes the memory that the others use again; it counts only where there is no other.
    save_s, load_s = save_s[1:] or save_s, load_s[1:] or load_s
    return {
        "num_rounds": len(save_s),
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes,
        "save": _summary(raw_bytes, save_s, save_peaks),
        "load": _summary(raw_bytes, load_s, load_peaks),
    }


def _load(
    saver: Saver, path: Path, like: Any, memory: PeakMemory
) -> tuple[Any, float, tuple[float | None, float | None]]:
    """The loaded state, seconds, and peak memory (which counts a state that the load made)."""
    loaded: list[Any] = []
    memory.start()
    seconds = timed(lambda: loaded.append(saver.load(path, like)), memory.device).wall
    return loaded[0], seconds, memory.stop()


def _summary(raw_bytes: int, seconds: list[float], peaks: list[tuple[float | None, float | None]]) -> Row:
    host, on_device = zip(*peaks, strict=True)
    return {
        "seconds": asdict(spread(seconds)),
        "gb_per_s": asdict(spread([raw_bytes / each / 1e9 for each in seconds])),
        "peak_host_mib": None if None in host else max(host),
        "peak_device_mib": None if None in on_device else max(on_device),
    }


def measure_place(state: State, place: Place, entrants: list[Saver]) -> Iterator[Row]:
    """A row for every saver, as soon as it is measured. A few tensors go first, so that kernels are compiled."""
    whole, few = state.training_state(), state.training_state(_WARM_UP_PARAMETERS)
    for saver in entrants:

        def run(saver: Saver = saver) -> Row:
            warm = measure(saver, few, replace(place, num_rounds=0), state.device)
            return warm if "error" in warm else measure(saver, whole, place, state.device)

        yield {"name": saver.name, **attempt(run)}


def targets(rows: list[Row]) -> dict[str, Row]:
    """For save and load thinpoint's rate, the raw writer's rate times the ratio, and whether the target is met."""
    named = {row["name"]: row for row in rows if "error" not in row}
    if THIN_NAME not in named or RAW_NAME not in named:
        return {}
    ours, plain = named[THIN_NAME], named[RAW_NAME]
    found = {}
    for verb in ("save", "load"):
        ceiling = plain[verb]["gb_per_s"]["median"] * ours["ratio"]
        share = ours[verb]["gb_per_s"]["median"] / ceiling
        found[verb] = {"ceiling_gb_per_s": ceiling, "share": share, "met": share >= TARGET}
    return found


def same(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return len(expected) == len(actual) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.device == b.device
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(expected, actual, strict=True)
    )


def _files(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if found.is_file()] if path.is_dir() else [path]


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _drop_cache(path: Path) -> None:
    for found in _files(path):
        with found.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path) -> None:
    """A file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
