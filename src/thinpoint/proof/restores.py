"""How long a restore takes beside one of uncompressed bytes, at storage of given rates and from a folder."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thinpoint
from thinpoint.demo.compare import differences, tensor_bytes
from thinpoint.proof.cache import drop_from_cache, files_of, make_durable
from thinpoint.proof.record import Deadline, attempt, filesystem
from thinpoint.proof.scale import Scale
from thinpoint.proof.spread import spread
from thinpoint.proof.throttle import MemorySink, Throttle, ThrottledSource, throttled_file
from thinpoint.proof.trainer import Trainer, copied, release, synchronize
from thinpoint.proof.trainer import tensor_bytes as total_bytes

GB_PER_S = (1.0, 2.0, 5.0, 20.0, 50.0)
TARGET = 1.0
"""A restore from compressed bytes over one from plain bytes: at most."""

_POISON = 0xA5
THIN, RAW, TORCH, DCP = "thinpoint", "thinpoint, codec raw", "torch.load", "dcp.load"

Row = dict[str, Any]
Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Restore:
    """A way to restore from one place.

    Attributes:
        name: for people.
        stored_bytes: what is read.
        load: a poisoned state of the right shapes, which may be filled in place -> the state.
        path: dropped from the page cache before each load; None if it is in memory.
    """

    name: str
    stored_bytes: int
    load: Callable[[Any], Any]
    path: Path | None = None


def measure_restores(
    scale: Scale, device: torch.device, folder: Path, num_rounds: int, deadline: Deadline, say: Say
) -> Iterator[Row]:
    """A row for each rate of storage, then one for the folder; yields what there is after each.

    Args:
        folder: where files go, and are deleted again.
        num_rounds: of each, in turn; ratios are between restores of one round.
    """
    if deadline.is_late("restore"):
        return
    say("restore: a state is trained")
    trainer = Trainer(scale.busy, device, scale.corpus_bytes)
    state = copied(trainer.state())
    result: Row = {
        "target": TARGET,
        "num_rounds": num_rounds,
        "model": asdict(trainer.shape),
        "num_parameters": trainer.num_parameters,
        "raw_bytes": total_bytes(state),
        "rows": [],
    }
    del trainer
    release(device)
    say("restore: files are made")
    files = {THIN: _thin_bytes(state, "thin"), RAW: _thin_bytes(state, "raw"), TORCH: _torch_bytes(state)}
    like = copied(state)
    for restore in at_rate(files, device, 1e12):
        # Compiles and loads what all use; does not count.
        _timed(restore, like, device)
    for rate in GB_PER_S:
        if deadline.is_late(f"restore at {rate:g} GB/s"):
            continue
        say(f"restore: storage of {rate:g} GB/s")
        rows = measure(at_rate(files, device, rate * 1e9), state, like, device, num_rounds)
        result["rows"].append({"storage": f"{rate:g} GB/s", "gb_per_s": rate, "cold": None, "ways": rows})
        yield result
    files.clear()
    if not deadline.is_late("restore from the folder"):
        say("restore: files in the folder")
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            ways = in_folder(state, Path(inner), device)
            rows = measure(ways, state, like, device, num_rounds)
        place = {
            "storage": "folder",
            "gb_per_s": None,
            "cold": all(row["cold"] for row in rows),
            "filesystem": filesystem(folder),
            "ways": rows,
        }
        result["rows"].append(place)
    release(device)
    yield result


def _thin_bytes(state: Any, codec: str) -> np.ndarray:
    sink: Any = MemorySink(keep=True)
    thinpoint.save(state, sink, codec=codec)
    return sink.data()


def _torch_bytes(state: Any) -> np.ndarray:
    sink: Any = MemorySink(keep=True)
    torch.save(state, sink)
    return sink.data()


def at_rate(files: dict[str, np.ndarray], device: torch.device, bytes_per_s: float) -> list[Restore]:
    """Restores of bytes in memory, each load through a pipe of its own of that rate."""

    def thin(data: np.ndarray) -> Callable[[Any], Any]:
        def load(like: Any) -> Any:
            thinpoint.load_into(ThrottledSource(data, Throttle(bytes_per_s)), like)
            return like

        return load

    def plain(_: Any) -> Any:
        file: Any = throttled_file(files[TORCH], Throttle(bytes_per_s))
        return torch.load(file, map_location=device, weights_only=True)

    loads = {THIN: thin(files[THIN]), RAW: thin(files[RAW]), TORCH: plain}
    return [Restore(name=name, stored_bytes=files[name].size, load=load) for name, load in loads.items()]


def in_folder(state: Any, folder: Path, device: torch.device) -> list[Restore]:
    """Restores of files that are made in a folder."""
    import torch.distributed.checkpoint as dcp

    def thin(path: Path) -> Callable[[Any], Any]:
        def load(like: Any) -> Any:
            thinpoint.load_into(path, like)
            return like

        return load

    def distributed(like: Any) -> Any:
        dcp.load(like, storage_reader=dcp.FileSystemReader(paths[DCP]), no_dist=True)
        return like

    paths = {
        THIN: folder / "thin.thin",
        RAW: folder / "raw.thin",
        TORCH: folder / "torch.pt",
        DCP: folder / "dcp",
    }
    thinpoint.save(state, paths[THIN])
    thinpoint.save(state, paths[RAW], codec="raw")
    torch.save(state, paths[TORCH])
    dcp.save(state, storage_writer=dcp.FileSystemWriter(paths[DCP], thread_count=8), no_dist=True)
    loads: dict[str, Callable[[Any], Any]] = {
        THIN: thin(paths[THIN]),
        RAW: thin(paths[RAW]),
        TORCH: lambda _: torch.load(paths[TORCH], map_location=device, weights_only=True),
        DCP: distributed,
    }
    for path in paths.values():
        make_durable(path)
    return [
        Restore(
            name=name,
            stored_bytes=sum(file.stat().st_size for file in files_of(paths[name])),
            load=load,
            path=paths[name],
        )
        for name, load in loads.items()
    ]


def measure(ways: list[Restore], state: Any, like: Any, device: torch.device, num_rounds: int) -> list[Row]:
    """Seconds of each way, and over the codec raw in the same round. What does not give back the bits has no numbers.

    Args:
        state: what was saved.
        like: tensors of the same shapes, overwritten.
    """
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    cold = {way.name: True for way in ways}
    errors: dict[str, Row] = {}
    for i_round in range(num_rounds):
        for way in ways:
            if way.name in errors:
                continue

            def once(way: Restore = way, check: bool = i_round == 0) -> Row:
                wall, dropped, loaded = _timed(way, like, device)
                seconds[way.name].append(wall)
                cold[way.name] = cold[way.name] and dropped
                found = differences(state, loaded) if check else []
                return {"error": f"not exact: {found[0]}"} if found else {}

            if failed := attempt(once):
                errors[way.name] = failed
    rows = []
    for way in ways:
        row: Row = {"name": way.name, "stored_bytes": way.stored_bytes, "cold": cold[way.name]}
        if way.name in errors:
            rows.append({**row, **errors[way.name]})
            continue
        row["seconds"] = spread(seconds[way.name])
        if RAW not in errors:
            pairs = zip(seconds[way.name], seconds[RAW], strict=True)
            row["over_raw"] = spread([mine / raw for mine, raw in pairs])
        rows.append(row)
    return rows


def _timed(way: Restore, like: Any, device: torch.device) -> tuple[float, bool, Any]:
    """Seconds, whether nothing was in the page cache, and the state."""
    _poison(like)
    dropped = way.path is not None and drop_from_cache(way.path)
    synchronize(device)
    begin = time.perf_counter()
    loaded = way.load(like)
    synchronize(device)
    return time.perf_counter() - begin, dropped, loaded


def _poison(value: Any) -> None:
    """Overwrites all tensors of a nested state: what is not restored cannot pass for restored."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            tensor_bytes(value).fill_(_POISON)
        return
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for child in children:
        _poison(child)
