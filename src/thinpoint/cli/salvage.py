"""`thinpoint salvage`: what is intact of damaged `.thin` files, in new files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpoint.cli.compress import THIN_SUFFIX
from thinpoint.cli.options import Overwrite, Threads, Traceback, check_threads
from thinpoint.cli.reporting import (
    count_text,
    print_error,
    printable,
    reporting_errors,
    size_text,
    worst_exit_code,
)

if TYPE_CHECKING:
    from thinpoint.cli.salvage_file import SalvageReport
    from thinpoint.cli.salvage_folder import Losses
    from thinpoint.cli.worklist import Job, Worklist
    from thinpoint.errors import ThinpointError

JSON_FORMAT = "thinpoint-salvage"
JSON_VERSION = 1


def salvage(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A .thin file, or a folder of them.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="The new file; for a folder, a folder.")
    ],
    overwrite: Overwrite = False,
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Save what is intact of damaged .thin files into new ones. Works without torch.

    A tensor is saved only if every byte of it is proven by its digests. Intact files are left alone, and
    nothing is changed in place. The exit code is 3 if anything is lost.
    """
    with reporting_errors(traceback):
        from thinpoint.cli.worklist import make_worklist
        from thinpoint.errors import UsageError

        check_threads(threads)
        worklist = make_worklist([path], output, _refusal, lambda name: name)
        if not worklist.jobs:
            raise UsageError("there is no .thin file to salvage", where=path)
        errors, reports = _run(worklist, overwrite, threads, traceback, json_output)
        losses = _losses(path, reports, errors)
        if json_output:
            import json

            files = [_as_json(report) for report in reports]
            whole = {} if losses is None else {"checkpoint": _losses_json(losses)}
            report = {"format": JSON_FORMAT, "version": JSON_VERSION, "files": files, **whole}
            typer.echo(json.dumps(report, indent=1))
        else:
            if len(worklist.jobs) > 1:
                typer.echo(_totals(reports, len(errors)))
            if losses is not None:
                _print_losses(losses)
        if any(report.lost for report in reports) or (losses and (losses.tensors or losses.objects)):
            raise typer.Exit(3)
        if errors:
            raise typer.Exit(worst_exit_code(errors))


def _losses(path: Path, reports: list[SalvageReport], errors: list[ThinpointError]) -> Losses | None:
    """What the checkpoint of many ranks in a folder has lost as a whole; None if there is none to speak of."""
    from thinpoint.cli.salvage_folder import losses_of
    from thinpoint.errors import ThinpointError

    if not path.is_dir():
        return None
    try:
        return losses_of(path, reports)
    except ThinpointError as error:
        error.hint = "Which tensors are whole is not known without it"
        print_error(error, label="problem")
        errors.append(error)
        return None


def _print_losses(losses: Losses) -> None:
    from thinpoint.cli.folder_contents import ranks_text
    from thinpoint.cli.tables import Column, print_table

    if losses.tensors:
        columns = [
            Column(title="tensor that is not whole", is_number=False, min_width=24),
            Column(title="lost chunks"),
            Column(title="of"),
            Column(title="in the files of ranks", is_number=False),
        ]
        cells = [
            [name, f"{lost:,}", f"{num:,}", ranks_text(ranks)]
            for name, (lost, num, ranks) in losses.tensors.items()
        ]
        print_table(columns, cells)
    for name in losses.objects:
        typer.echo(printable(f"lost: {name}"))
    num_whole = losses.num_tensors - len(losses.tensors)
    num_left = losses.num_objects - len(losses.objects)
    typer.echo(
        f"{num_whole:,} of {count_text(losses.num_tensors, 'tensor')} whole, "
        f"{num_left:,} of {count_text(losses.num_objects, 'other value')} left"
    )


def _losses_json(losses: Losses) -> dict[str, Any]:
    return {
        "num_tensors": losses.num_tensors,
        "num_objects": losses.num_objects,
        "not_whole": [
            {"name": name, "lost_chunks": lost, "num_chunks": num, "ranks": ranks}
            for name, (lost, num, ranks) in losses.tensors.items()
        ],
        "lost_objects": losses.objects,
    }


def _refusal(path: Path, named: bool) -> str | None:
    return None if named or path.suffix.lower() == THIN_SUFFIX else "no .thin file"


def _run(
    worklist: Worklist, overwrite: bool, threads: int | None, traceback: bool, json_output: bool
) -> tuple[list[ThinpointError], list[SalvageReport]]:
    from thinpoint.errors import AlreadyExistsError, ThinpointError

    errors: list[ThinpointError] = []
    reports: list[SalvageReport] = []
    for job in worklist.jobs:
        try:
            report = _salvage_one(job, overwrite, threads, makes_folders=worklist.makes_folders)
        except ThinpointError as error:
            error.where = error.where or job.source
            if isinstance(error, AlreadyExistsError):
                error.hint = "Choose another name with -o, or allow it with --overwrite"
            print_error(error, label="failed", traceback=traceback)
            errors.append(error)
            continue
        reports.append(report)
        if not json_output:
            _print_report(report, traceback)
    return errors, reports


def _salvage_one(job: Job, overwrite: bool, threads: int | None, *, makes_folders: bool) -> SalvageReport:
    from thinpoint.cli.run import refuse_same_file
    from thinpoint.cli.salvage_file import salvage_file

    refuse_same_file(job.source, job.target)
    return salvage_file(
        job.source, job.target, makes_folder=makes_folders, overwrite=overwrite, threads=threads
    )


def _print_report(report: SalvageReport, traceback: bool) -> None:
    if report.is_intact:
        typer.echo(printable(f"intact {report.path}: nothing to salvage"))
        return
    for problem in report.problems:
        # The advice not to load the file does not help those who salvage it.
        problem.hint = None
        print_error(problem, label="problem", traceback=traceback, to_stdout=True)
    _print_lost(report)
    num_saved = len(report.rows) - len(report.lost)
    num_bytes = sum(row.num_bytes for row in report.rows if row.reason is None)
    saved = f"{num_saved:,} of {count_text(len(report.rows), 'value')} saved, {size_text(num_bytes)}"
    if report.target is None:
        typer.echo(printable(f"lost {report.path}: nothing in it is intact; no file was written"))
        return
    typer.echo(printable(f"{report.path} -> {report.target}  {saved}"))
    if not report.has_index:
        typer.echo(
            "  The index is lost. Names, dtypes and shapes are those of the parts' labels; a tensor whose label has no "
            "strides is taken as contiguous. What is no tensor is lost, and so is, unseen, what lay where no label is left."
        )
    if report.num_undecoded:
        parts = count_text(report.num_undecoded, "part")
        typer.echo(f"  {parts} cannot be decoded on this machine; their stored bytes are intact.")


def _print_lost(report: SalvageReport) -> None:
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="lost", is_number=False, min_width=16),
        Column(title="kind", is_number=False),
        Column(title="shape", is_number=False, min_width=11),
        Column(title="size"),
        Column(title="why", is_number=False, min_width=20),
    ]
    cells = [
        [
            row.name,
            row.kind,
            "-" if row.shape is None else "x".join(map(str, row.shape)) or "scalar",
            size_text(row.num_bytes),
            row.reason or "",
        ]
        for row in report.lost
    ]
    if cells:
        print_table(columns, cells)
        typer.echo()


def _totals(reports: list[SalvageReport], num_failed: int) -> str:
    num_intact = sum(report.is_intact for report in reports)
    counts = {
        "intact": num_intact,
        "salvaged": sum(report.target is not None for report in reports),
        "lost": sum(report.target is None for report in reports) - num_intact,
        "failed": num_failed,
    }
    total = count_text(len(reports) + num_failed, "file")
    return f"{total}: " + ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def _as_json(report: SalvageReport) -> dict[str, Any]:
    """One file as a JSON object, described in docs/cli.md."""
    state = "intact" if report.is_intact else "lost" if report.target is None else "salvaged"
    return {
        "path": str(report.path),
        "output": None if report.target is None else str(report.target),
        "state": state,
        "index": "intact" if report.has_index else "lost",
        "problems": [str(problem) for problem in report.problems],
        "in_bytes": report.in_bytes,
        "out_bytes": report.out_bytes,
        "num_parts": report.num_parts,
        "num_bad_parts": report.num_bad_parts,
        "num_undecoded": report.num_undecoded,
        "values": [
            {
                "name": row.name,
                "kind": row.kind,
                "shape": None if row.shape is None else list(row.shape),
                "bytes": row.num_bytes,
                "saved": row.reason is None,
                "reason": row.reason,
            }
            for row in report.rows
        ],
    }
