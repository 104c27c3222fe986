"""Checks a file: every stored byte, and on request every decoded bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.engine.backends import Devices
from thinpoint.engine.restore import RUN_BYTES, WAVE_BYTES, DeviceTarget, Restorer, Target
from thinpoint.engine.workers import Workers
from thinpoint.errors import NotEnoughMemoryError, ThinpointError
from thinpoint.file.reader import FileReader
from thinpoint.file.verify import verify_stored
from thinpoint.state.tree_names import tensor_names

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked and found.

    Attributes:
        path: the file.
        file_bytes: its size.
        num_parts: parts that were checked.
        num_tensors: tensors in the index.
        deep: whether parts were decoded and their bits compared.
        problems: everything that is wrong, in file order; empty if the file is intact.
    """

    path: str
    file_bytes: int
    num_parts: int
    num_tensors: int
    deep: bool
    problems: tuple[ThinpointError, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raise the first problem, with all of them in its attribute `problems`."""
        if self.problems:
            error = self.problems[0]
            error.problems = self.problems  # type: ignore[attr-defined]
            raise error


def verify_file(
    reader: FileReader,
    backend: HostBackend,
    workers: Workers,
    *,
    deep: bool,
    devices: Devices | None = None,
    scratch: torch.device | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check every digest; if deep, decode every part as well. Goes on after a problem.

    Holds one part at most, or WAVE_BYTES on a device.

    Args:
        devices, scratch: the device that decodes, and its backend; None for the CPU.
    """
    problems = verify_stored(reader, None if deep else progress)
    try:
        tensor_names(reader.index.tree, len(reader.index.tensors))
    except ThinpointError as error:
        error.where = error.where or reader.name
        problems.append(error)
    if deep:
        # A damaged block would be found a second time by decoding: report it once.
        known = {(error.offset, error.tensor) for error in problems}
        problems += [
            error
            for error in _decode_all(Restorer(reader, backend, workers, None, devices), scratch, progress)
            if (error.offset, error.tensor) not in known
        ]
    return VerifyReport(
        path=reader.name,
        file_bytes=reader.trailer.file_bytes,
        num_parts=len(reader.index.parts),
        num_tensors=len(reader.index.tensors),
        deep=deep,
        problems=tuple(problems),
    )


def _decode_all(
    restorer: Restorer, scratch: torch.device | None, progress: Callable[[int], None] | None
) -> list[ThinpointError]:
    reader = restorer.reader
    most = 4 * RUN_BYTES if scratch is None else WAVE_BYTES
    problems: list[ThinpointError] = []
    wave: list[int] = []
    wave_bytes = 0

    def check(parts: list[int]) -> None:
        try:
            restorer.fill(_target(reader, part, scratch) for part in parts)
        except MemoryError:
            problems.append(
                NotEnoughMemoryError("there is not enough memory to decode a part", where=reader.name)
            )
        except ThinpointError as error:
            if len(parts) == 1:
                problems.append(error)
            else:
                for part in parts:
                    check([part])

    for part, entry in enumerate(reader.index.parts):
        wave.append(part)
        wave_bytes += entry.raw_bytes
        if wave_bytes >= most or part + 1 == len(reader.index.parts):
            check(wave)
            wave, wave_bytes = [], 0
            if progress:
                progress(entry.offset + entry.stored_bytes)
    if progress:
        progress(reader.trailer.file_bytes)
    return problems


def _target(reader: FileReader, part: int, scratch: torch.device | None) -> Target | DeviceTarget:
    entry = reader.index.parts[part]
    if scratch is None:
        return Target(storage=entry.storage, start=entry.start, out=np.empty(entry.raw_bytes, np.uint8))
    import torch

    try:
        out = torch.empty(entry.raw_bytes, dtype=torch.uint8, device=scratch)
    except RuntimeError as error:
        raise NotEnoughMemoryError(
            f"there is not enough memory on {scratch} to decode a part", where=reader.name
        ) from error
    return DeviceTarget(storage=entry.storage, start=entry.start, out=out)
