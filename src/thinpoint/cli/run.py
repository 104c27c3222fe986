"""Runs a worklist: one line for each file, failures reported without stopping, totals at the end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from thinpoint.cli.reporting import (
    count_text,
    print_error,
    printable,
    ratio_text,
    shorten_middle,
    size_text,
    worst_exit_code,
)
from thinpoint.cli.worklist import Job, Worklist
from thinpoint.errors import AlreadyExistsError, ThinpointError, UsageError, from_os_error


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one file.

    Attributes:
        target: the file that was written.
        in_bytes, out_bytes: sizes of both files.
    """

    target: Path
    in_bytes: int
    out_bytes: int


def run_worklist(
    worklist: Worklist, work: Callable[[Job], Done], *, is_compressing: bool, nothing: str, traceback: bool
) -> None:
    """Work on every job and print what happened.

    Args:
        work: does one job; what it raises of ours is reported, and the next job follows.
        is_compressing: ratios are input over output; otherwise output over input.
        nothing: the error if there is no job.
        traceback: print where errors arose.

    Raises:
        UsageError: the worklist is empty.
        typer.Exit: with the exit code, if a job failed.
    """
    for path, reason in worklist.skipped:
        typer.echo(printable(f"skipped {path}: {reason}"))
    if not worklist.jobs:
        raise UsageError(nothing)
    begin = time.perf_counter()
    errors: list[ThinpointError] = []
    in_bytes = out_bytes = 0
    for job in worklist.jobs:
        job_begin = time.perf_counter()
        try:
            if worklist.makes_folders:
                _make_folder(job.target.parent)
            done = work(job)
        except ThinpointError as error:
            error.where = error.where or job.source
            if isinstance(error, AlreadyExistsError):
                error.hint = "Choose another name with -o, or allow it with --overwrite"
            print_error(error, label="failed", traceback=traceback)
            errors.append(error)
            continue
        in_bytes += done.in_bytes
        out_bytes += done.out_bytes
        _print_line(_names(job, done), _numbers(done.in_bytes, done.out_bytes, is_compressing, job_begin))
    if len(worklist.jobs) > 1:
        label = count_text(len(worklist.jobs) - len(errors), "file")
        for count, word in ((len(worklist.skipped), "skipped"), (len(errors), "failed")):
            label += f", {count:,} {word}" if count else ""
        _print_line(label, _numbers(in_bytes, out_bytes, is_compressing, begin) if in_bytes else "")
    if errors:
        raise typer.Exit(worst_exit_code(errors))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, "cannot make the folder", where=folder) from error


def _names(job: Job, done: Done) -> str:
    target = done.target.name if done.target.parent == job.source.parent else str(done.target)
    return printable(f"{job.source} -> {target}")


def _numbers(in_bytes: int, out_bytes: int, is_compressing: bool, begin: float) -> str:
    raw, stored = (in_bytes, out_bytes) if is_compressing else (out_bytes, in_bytes)
    seconds = max(time.perf_counter() - begin, 1e-9)
    rate = raw / seconds / 1e6
    rate_text = f"{rate:.0f} MB/s" if rate >= 10 else f"{rate:.1f} MB/s"
    return f"{size_text(in_bytes)} -> {size_text(out_bytes)}  {ratio_text(raw, stored)}  {rate_text}"


def _print_line(left: str, right: str) -> None:
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - len(right) - 2
        left = shorten_middle(left, max(width, 20)).ljust(width)
    typer.echo(f"{left}  {right}".rstrip())


def refuse_same_file(source: Path, target: Path) -> None:
    """Raises UsageError if the target is the source, by whatever name."""
    if target.exists() and target.samefile(source):
        raise UsageError("the output would replace the input", where=source, hint="Name another with -o")


def file_bytes(path: Path) -> int:
    """The size of a file.

    Raises:
        StorageError: the system refused.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise from_os_error(error, "cannot read the file", where=path) from error
