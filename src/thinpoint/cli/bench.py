"""`thinpoint bench`: what compressed checkpoints do to step time, restores and reproducibility, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from thinpoint.cli.options import Traceback
from thinpoint.cli.reporting import UNEXPECTED, printable, reporting_errors
from thinpoint.errors import EncodeProofError

if TYPE_CHECKING:
    from thinpoint.proof.tables import Table

_PIECES = "rates, step, restore or resume"


def bench(
    scale: Annotated[
        str, typer.Option("--scale", help="tiny, small, 134m, 1b, or a number of parameters.")
    ] = "tiny",
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results go: JSON, HTML and PNG.")
    ] = Path("thinpoint-bench"),
    only: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer evaluates this at run time on Python 3.10)
        typer.Option("--only", metavar="PIECE", help=f"Only this: {_PIECES}. May be repeated."),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--device", help="cpu or cuda:0; by default a GPU if there is one."),
    ] = None,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--folder", metavar="DIR", help="Where checkpoints go meanwhile; by default into --out."
        ),
    ] = None,
    max_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--max-s", min=0, metavar="S", help="Begin nothing after so many seconds."),
    ] = None,
    saves: Annotated[int, typer.Option("--saves", min=3, help="Saves of each kind that are timed.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Restores of each kind.")] = 5,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--steps", min=10, help="Training steps of the run that is killed."),
    ] = None,
    kills: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--kills", min=1, help="How often it is killed."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides when it is killed.")] = 0,
    compare: Annotated[
        Optional[tuple[Path, Path]],  # noqa: UP045
        typer.Option(
            "--compare", metavar="A.json B.json", help="Measure nothing; put two results side by side."
        ),
    ] = None,
    draw: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--draw", metavar="DIR", help="Measure nothing; draw the results in a folder again."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Measure this machine: rates, step time while saving, restores, and a run that is killed and resumed.

    The exit code is 8 if the run that is killed ends with other bits than one that is never stopped.
    """
    with reporting_errors(traceback):
        if compare is not None:
            _compare(*compare)
            return
        from thinpoint.proof.bench import Options, draw_all, run_bench

        if draw is not None:
            for path in draw_all(draw, _say):
                typer.echo(printable(f"written: {path}"))
            return
        _make_folder(out)
        options = Options(
            scale=scale,
            out=out,
            folder=folder or out,
            device=device,
            only=tuple(only or ()),
            max_s=max_s,
            num_saves=saves,
            num_rounds=rounds,
            num_steps=steps,
            num_kills=kills,
            seed=seed,
        )
        records = run_bench(options, _say, lambda record, paths: _show(record, paths, traceback))
        if any(record["result"].get("verdict") == "different" for record in records):
            raise typer.Exit(EncodeProofError.exit_code)
        if any(record["error"] for record in records):
            raise typer.Exit(UNEXPECTED)


def _say(text: str) -> None:
    typer.echo(printable(text), err=True)


def _show(record: dict[str, Any], paths: list[Path], traceback: bool) -> None:
    from thinpoint.proof.tables import TITLES, tables_of, where

    typer.echo(printable(where(record)))
    for table in tables_of(record):
        _print(table)
    if record["error"]:
        typer.echo(printable(f"failed: {TITLES[record['piece']]}: {record['error']}"), err=True)
        if traceback:
            typer.echo(record["traceback"], err=True)
    typer.echo(printable(f"written: {', '.join(map(str, paths))}"))
    typer.echo()


def _print(table: Table) -> None:
    from thinpoint.cli.tables import Column, print_table

    typer.echo(f"\n{table.title}")
    if table.rows:
        columns = [
            Column(title=heading, is_number=i > 0, min_width=None if i else 16)
            for i, heading in enumerate(table.headings)
        ]
        print_table(columns, table.rows)
    for note in table.notes:
        typer.echo(printable(note))


def _compare(a: Path, b: Path) -> None:
    from thinpoint.proof.compare import compare
    from thinpoint.proof.record import read_record

    for table in compare(read_record(a), read_record(b)):
        _print(table)


def _make_folder(folder: Path) -> None:
    from thinpoint.errors import from_os_error

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, "cannot make the folder", where=folder) from error
