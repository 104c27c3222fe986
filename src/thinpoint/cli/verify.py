"""`thinpoint verify`: whether every byte of a `.thin` file is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from thinpoint.engine.verify import VerifyReport
    from thinpoint.errors import ThinpointError


def verify(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help=".thin files, or folders of them.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Also decode everything and compare the bits with their checksums.")
    ] = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Check .thin files; every problem is listed. Works without torch."""
    with reporting_errors(traceback):
        from thinpoint.cli.worklist import make_worklist
        from thinpoint.errors import ThinpointError, UsageError

        check_threads(threads)
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
                problems: tuple[ThinpointError, ...] = (error,)
            else:
                problems = report.problems
                if report.ok:
                    typer.echo(_ok_line(report))
            if problems:
                num_damaged += 1
                typer.echo(printable(f"BAD  {job.source}  {count_text(len(problems), 'problem')}"))
            for problem in problems:
                # The same advice after every line would hide the lines.
                problem.hint = problem.hint if problem is problems[-1] else None
                print_error(problem, label="     problem", traceback=traceback, to_stdout=True)
            errors += problems
        if len(worklist.jobs) > 1:
            num_ok = len(worklist.jobs) - num_damaged
            typer.echo(f"{count_text(num_ok, 'file')} OK" + (f", {num_damaged:,} not" if num_damaged else ""))
        if errors:
            raise typer.Exit(worst_exit_code(errors))


def _refusal(path: Path, named: bool) -> str | None:
    return None if named or path.suffix.lower() == THIN_SUFFIX else "no .thin file"


def _ok_line(report: VerifyReport) -> str:
    how = "every bit decoded" if report.deep else "every stored byte checked"
    counts = f"{count_text(report.num_tensors, 'tensor')}, {count_text(report.num_parts, 'part')}"
    return printable(f"OK   {report.path}  {size_text(report.file_bytes)}, {counts}, {how}")


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
