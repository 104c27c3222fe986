"""Which files a command reads and where each result goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpoint.errors import NotFoundError, UsageError

Accepts = Callable[[Path, bool], "str | None"]
"""`accepts(path, named)`: None to work on the file, else why not. `named`: by the user, not in a folder."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One file to read and the file to write."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class Worklist:
    """What there is to do.

    Attributes:
        jobs: in order.
        skipped: files of the folders that are left alone, each with the reason.
        makes_folders: whether the folders of the targets are to be made.
        names_target: whether the user gave the name of the one target.
    """

    jobs: list[Job]
    skipped: list[tuple[Path, str]]
    makes_folders: bool
    names_target: bool = False


def make_worklist(
    inputs: Sequence[Path], output: Path | None, accepts: Accepts, target_name: Callable[[str], str]
) -> Worklist:
    """The files of `inputs`, folders entered recursively, with their targets.

    Without `output` every target lies beside its input. For one file `output` is a file, or a folder that
    exists. Otherwise it is a folder: one folder is mirrored in it, of several each gets its own.

    Raises:
        NotFoundError: an input, or the folder for the output, does not exist.
        UsageError: nothing to do, an input is of the wrong kind, or two results would have the same name.
    """
    jobs: list[Job] = []
    skipped: list[tuple[Path, str]] = []
    is_single = len(inputs) == 1 and not inputs[0].is_dir()
    into_folder = output is not None and (not is_single or output.is_dir())
    if output is not None:
        _check_output(output, into_folder)
    for given in inputs:
        if not given.is_dir():
            _check_exists(given)
            reason = accepts(given, True)
            if reason is not None:
                raise UsageError(f"cannot be worked on: {reason}", where=given)
            name = target_name(given.name)
            target = given.with_name(name) if output is None else output / name if into_folder else output
            jobs.append(Job(source=given, target=target))
            continue
        base = given if output is None else output if len(inputs) == 1 else output / given.resolve().name
        for path in _files_below(given):
            reason = accepts(path, False)
            if reason is None:
                below = path.relative_to(given)
                jobs.append(Job(source=path, target=base / below.with_name(target_name(below.name))))
            else:
                skipped.append((path, reason))
    _check_targets(jobs)
    return Worklist(
        jobs=jobs,
        skipped=skipped,
        makes_folders=into_folder,
        names_target=output is not None and not into_folder,
    )


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        found += [Path(place) / name for name in sorted(names)]
    return found


def _check_exists(path: Path) -> None:
    if not os.path.lexists(path):
        raise NotFoundError("there is no such file or folder", errno=errno.ENOENT, where=path)


def _check_output(output: Path, into_folder: bool) -> None:
    parent = output.absolute().parent
    if into_folder and output.exists() and not output.is_dir():
        raise UsageError("the output must be a folder for several files or a folder", where=output)
    if not parent.is_dir():
        raise NotFoundError(
            f"the folder {parent} does not exist",
            errno=errno.ENOENT,
            where=output,
            hint="Create the folder first",
        )


def _check_targets(jobs: list[Job]) -> None:
    sources: dict[Path, Path] = {}
    inputs = {job.source.absolute() for job in jobs}
    for job in jobs:
        target = job.target.absolute()
        if target in sources:
            raise UsageError(
                f"{sources[target]} and {job.source} would both become {job.target}",
                hint="Name one of them, or give them different output folders",
            )
        if target in inputs and target != job.source.absolute():
            raise UsageError("the output would be written over an input", where=job.target)
        sources[target] = job.source
