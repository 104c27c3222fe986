"""Size and time of thinpoint beside `torch.save`, on one state, in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import thinpoint
from thinpoint.demo.compare import differences


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to save and load.

    Attributes:
        name: for people.
        path: the file it writes.
        save: state, path -> None.
        load: path -> state.
    """

    name: str
    path: Path
    save: Callable[[Any, Path], Any]
    load: Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one contestant took: medians, in seconds; the size of its file in bytes."""

    name: str
    path: Path
    file_bytes: int
    save_s: float
    load_s: float


class NotExactError(RuntimeError):
    """A contestant did not give back the bits it was given; its times mean nothing."""


def _torch_save(state: Any, path: Path) -> None:
    torch.save(state, path)


def _torch_save_durable(state: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _torch_load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def contestants(folder: Path) -> list[Contestant]:
    """thinpoint, which makes every file durable; torch.save as it is, and with the fsync it leaves out."""
    return [
        Contestant(name="thinpoint", path=folder / "final.thin", save=thinpoint.save, load=thinpoint.load),
        Contestant(name="torch.save", path=folder / "plain.pt", save=_torch_save, load=_torch_load),
        Contestant(
            name="torch.save + fsync", path=folder / "durable.pt", save=_torch_save_durable, load=_torch_load
        ),
    ]


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(state: Any, entrants: Iterable[Contestant], num_rounds: int = 5) -> list[Timing]:
    """Save and load `state` with each entrant in turn, `num_rounds` times after a round that does not count.

    Raises:
        NotExactError: what an entrant loaded is not what it saved.
    """
    entrants = list(entrants)
    saves: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    loads: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    for i_round in range(num_rounds + 1):
        for entrant in entrants:
            save_s, _ = _timed(entrant.save, state, entrant.path)
            load_s, loaded = _timed(entrant.load, entrant.path)
            if i_round:
                saves[entrant.name].append(save_s)
                loads[entrant.name].append(load_s)
            elif found := differences(state, loaded):
                raise NotExactError(f"{entrant.name}: {found[0]}")
    return [
        Timing(
            name=entrant.name,
            path=entrant.path,
            file_bytes=entrant.path.stat().st_size,
            save_s=median(saves[entrant.name]),
            load_s=median(loads[entrant.name]),
        )
        for entrant in entrants
    ]
