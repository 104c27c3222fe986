"""`thinpoint verify`: whether every byte of `.thin` files and checkpoints is as it was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from thinpoint.cli.compress import LABEL_WIDTH, THIN_SUFFIX
from thinpoint.cli.options import Threads, Traceback, check_threads
from thinpoint.cli.reporting import (
    count_text,
    print_error,
    printable,
    reporting_errors,
    shorten_middle,
    size_text,
    worst_exit_code,
)

if TYPE_CHECKING:
    from thinpoint.cli.verify_steps import StepResult
    from thinpoint.engine.verify import VerifyReport
    from thinpoint.errors import ThinpointError
    from thinpoint.store import Store


def verify(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="IN...", help=".thin files, folders of them, directories of checkpoints."),
    ],
    deep: Annotated[
        bool, typer.Option("--deep", help="Also decode everything and compare the bits with their checksums.")
    ] = False,
    sample: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--sample", min=1, metavar="N", help="Check N parts of each checkpoint, chosen at random."
        ),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seed", min=0, metavar="S", help="Repeat the choice of an earlier --sample."),
    ] = None,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Check .thin files and whole directories of checkpoints; every problem is listed. Works without torch."""
    with reporting_errors(traceback):
        from thinpoint.errors import UsageError

        check_threads(threads)
        given = _split(inputs)
        if sample is not None and given.files:
            raise UsageError(
                "--sample is for checkpoints in folders and directories of checkpoints", where=given.files[0]
            )
        if seed is not None and sample is None:
            raise UsageError("--seed goes with --sample")
        errors: list[ThinpointError] = []
        for store in given.directories:
            errors += _verify_folder(
                store, deep=deep, sample=sample, seed=seed, threads=threads, traceback=traceback
            )
        for store in given.checkpoints:
            errors += _verify_checkpoint(
                store, deep=deep, sample=sample, seed=seed, threads=threads, traceback=traceback
            )
        if given.files:
            errors += _verify_files(given.files, deep, threads, traceback)
        if errors:
            raise typer.Exit(worst_exit_code(errors))


@dataclass(kw_only=True)
class _Given:
    """What the user named: directories of checkpoints, checkpoints that are folders with a manifest, files and other folders."""

    directories: list[Store] = field(default_factory=list)
    checkpoints: list[Store] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def _split(inputs: list[str]) -> _Given:
    """What the inputs are.

    Raises:
        UsageError: a URL of something else.
    """
    from thinpoint.checkpoint.catalog import folders
    from thinpoint.cli.sources import is_checkpoint
    from thinpoint.errors import UsageError
    from thinpoint.store import LocalStore, open_store

    found = _Given()
    for given in inputs:
        store = open_store(given)
        is_file = isinstance(store, LocalStore) and not Path(given).is_dir()
        if not is_file and is_checkpoint(store):
            found.checkpoints.append(store)
        elif not is_file and folders(store):
            found.directories.append(store)
        elif isinstance(store, LocalStore):
            found.files.append(Path(given))
        else:
            raise UsageError("there is no checkpoint to verify", where=given)
    return found


def _verify_checkpoint(
    store: Store, *, deep: bool, sample: int | None, seed: int | None, threads: int | None, traceback: bool
) -> list[ThinpointError]:
    """Check the files of one checkpoint and print a line for it; all problems."""
    import random

    from thinpoint.cli.verify_files import Found, How, check_files
    from thinpoint.dcp.folder import read_manifest
    from thinpoint.errors import ThinpointError

    chosen_seed = _seed(seed, sample)
    found = Found()
    try:
        manifest = read_manifest(store)
        how = How(deep=deep, sample=sample, choice=random.Random(chosen_seed), threads=threads)
        check_files(store, manifest, found, how, shorten_middle(store.url, LABEL_WIDTH))
        what = f"{size_text(manifest.num_bytes)}, {count_text(len(manifest.files), 'file')}"
    except ThinpointError as error:
        error.where = error.where or store.url
        found.problems.append(error)
        what = ""
    if found.problems:
        typer.echo(printable(f"BAD  {store.url}  {count_text(len(found.problems), 'problem')}"))
        _print_problems(found.problems, label="     problem", traceback=traceback)
    else:
        typer.echo(
            printable(
                f"OK   {store.url}  {what}, {count_text(found.num_parts, 'part')}, {_how(deep, sample)}"
            )
        )
    return found.problems


def _seed(seed: int | None, sample: int | None) -> int:
    """The seed of a choice of parts; printed before the work, so that a run that is interrupted can be repeated too."""
    import random

    chosen = random.SystemRandom().getrandbits(32) if seed is None else seed
    if sample is not None:
        typer.echo(f"{count_text(sample, 'part')} of each checkpoint, --seed {chosen}")
    return chosen


def _verify_folder(
    store: Store, *, deep: bool, sample: int | None, seed: int | None, threads: int | None, traceback: bool
) -> list[ThinpointError]:
    """Check the checkpoints of a directory and print a table of them; all problems."""
    from thinpoint.cli.verify_steps import verify_steps

    chosen_seed = _seed(seed, sample)
    results = list(verify_steps(store, deep=deep, sample=sample, seed=chosen_seed, threads=threads))
    _print_steps(results)
    typer.echo()
    problems = [problem for result in results for problem in result.problems]
    _print_problems(problems, label="     problem", traceback=traceback)
    num_ok = sum(result.word == "OK" for result in results)
    num_bad = sum(result.word == "BAD" for result in results)
    typer.echo(
        f"{count_text(num_ok, 'checkpoint')} OK"
        + (f", {num_bad:,} not" if num_bad else "")
        + f"; {_how(deep, sample)}"
    )
    return problems


def _print_steps(results: list[StepResult]) -> None:
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="step"),
        Column(title="result", is_number=False),
        *(Column(title=title) for title in ("files", "size", "parts", "checked", "problems")),
    ]
    cells = [
        [
            f"{result.entry.step:,}",
            result.word,
            f"{len(result.entry.files):,}",
            size_text(result.entry.num_bytes),
            f"{result.num_parts:,}",
            f"{result.num_checked:,}",
            f"{len(result.problems):,}" if result.problems else "-",
        ]
        for result in results
    ]
    print_table(columns, cells)


def _verify_files(
    inputs: list[Path], deep: bool, threads: int | None, traceback: bool
) -> list[ThinpointError]:
    """Check files one by one, a line for each; all problems."""
    from thinpoint.cli.worklist import make_worklist
    from thinpoint.errors import ThinpointError, UsageError

    worklist = make_worklist(inputs, None, _refusal, lambda name: f"{name}.verified")
    if not worklist.jobs:
        raise UsageError("there is no .thin file to verify")
    errors: list[ThinpointError] = []
    num_damaged = 0
    for job in worklist.jobs:
        try:
            report = _verify_one(job.source, deep, threads)
        except ThinpointError as error:
            error.where = error.where or job.source
            problems = [error]
        else:
            problems = list(report.problems)
            if report.ok:
                typer.echo(_ok_line(report))
        if problems:
            num_damaged += 1
            typer.echo(printable(f"BAD  {job.source}  {count_text(len(problems), 'problem')}"))
        _print_problems(problems, label="     problem", traceback=traceback)
        errors += problems
    if len(worklist.jobs) > 1:
        num_ok = len(worklist.jobs) - num_damaged
        typer.echo(f"{count_text(num_ok, 'file')} OK" + (f", {num_damaged:,} not" if num_damaged else ""))
    return errors


def _print_problems(problems: list[ThinpointError], *, label: str, traceback: bool) -> None:
    for problem in problems:
        # The same advice after every line would hide the lines.
        problem.hint = problem.hint if problem is problems[-1] else None
        print_error(problem, label=label, traceback=traceback, to_stdout=True)


def _refusal(path: Path, named: bool) -> str | None:
    return None if named or path.suffix.lower() == THIN_SUFFIX else "no .thin file"


def _how(deep: bool, sample: int | None = None) -> str:
    if sample is not None:
        return f"up to {count_text(sample, 'part')} of each " + ("decoded" if deep else "checked")
    return "every bit decoded" if deep else "every stored byte checked"


def _ok_line(report: VerifyReport) -> str:
    counts = f"{count_text(report.num_tensors, 'tensor')}, {count_text(report.num_parts, 'part')}"
    return printable(f"OK   {report.path}  {size_text(report.file_bytes)}, {counts}, {_how(report.deep)}")


def _verify_one(path: Path, deep: bool, threads: int | None) -> VerifyReport:
    from thinpoint.cli.progress import progress_bar
    from thinpoint.cli.run import file_bytes
    from thinpoint.engine.backends import choose_backends
    from thinpoint.engine.verify import verify_file
    from thinpoint.engine.workers import Workers
    from thinpoint.file.reader import FileReader
    from thinpoint.store import open_source

    chosen = choose_backends()
    with (
        open_source(path) as source,
        Workers(threads) as workers,
        progress_bar(shorten_middle(path.name, LABEL_WIDTH), file_bytes(path)) as progress,
    ):
        return verify_file(
            FileReader(source),
            chosen.host,
            workers,
            deep=deep,
            devices=chosen.devices,
            scratch=chosen.scratch,
            progress=progress,
        )
