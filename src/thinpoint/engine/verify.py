"""Checks a file: every stored byte, and on request every decoded bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.engine.restore import RUN_BYTES, Restorer, Target
from thinpoint.engine.workers import Workers
from thinpoint.errors import LimitExceededError, ThinpointError
from thinpoint.file.reader import FileReader
from thinpoint.file.verify import verify_stored
from thinpoint.state.tree_names import tensor_names


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
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check every digest; if deep, decode every part as well. Goes on after a problem; holds one part at most."""
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
            e for e in _decode_all(reader, backend, workers, progress) if (e.offset, e.tensor) not in known
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
    reader: FileReader, backend: HostBackend, workers: Workers, progress: Callable[[int], None] | None
) -> list[ThinpointError]:
    restorer = Restorer(reader, backend, workers)
    problems: list[ThinpointError] = []
    wave: list[int] = []
    wave_bytes = 0

    def check(parts: list[int]) -> None:
        try:
            restorer.fill(_scratch(reader, part) for part in parts)
        except MemoryError:
            problems.append(
                LimitExceededError("there is not enough memory to decode a part", where=reader.name)
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
        if wave_bytes >= 4 * RUN_BYTES or part + 1 == len(reader.index.parts):
            check(wave)
            wave, wave_bytes = [], 0
            if progress:
                progress(entry.offset + entry.stored_bytes)
    if progress:
        progress(reader.trailer.file_bytes)
    return problems


def _scratch(reader: FileReader, part: int) -> Target:
    entry = reader.index.parts[part]
    return Target(storage=entry.storage, start=entry.start, out=np.empty(entry.raw_bytes, np.uint8))
