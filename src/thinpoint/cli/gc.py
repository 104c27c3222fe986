"""`thinpoint gc`: deletes what no checkpoint of a directory needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thinpoint.cli.ls import open_folder
from thinpoint.cli.options import Traceback
from thinpoint.cli.reporting import (
    count_text,
    print_error,
    printable,
    reporting_errors,
    size_text,
    worst_exit_code,
)

if TYPE_CHECKING:
    from thinpoint.checkpoint.leftovers import DeadFile
    from thinpoint.errors import ThinpointError
    from thinpoint.store import Store

_DAY_S = 86_400.0
_DEFAULT_DAYS = 7.0


def gc(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A directory of checkpoints, or its URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    days: Annotated[
        float,
        typer.Option(
            "--older-than", min=0.0, metavar="DAYS", help="Age from which on leftovers of anyone may go."
        ),
    ] = _DEFAULT_DAYS,
    traceback: Traceback = False,
) -> None:
    """Delete what no checkpoint needs: the trash, and what was left by saves that never ended.

    A leftover goes only if the process that wrote it has provably ended, or if it is older than stated.
    No checkpoint is deleted, and nothing beside a manifest that cannot be read. Works without torch.
    """
    with reporting_errors(traceback):
        from thinpoint.checkpoint.leftovers import dead

        store = open_folder(folder)
        found = dead(store, orphan_age_s=days * _DAY_S)
        if not found:
            typer.echo(printable(f"nothing to delete in {folder}"))
            return
        _print_files(found)
        if dry_run:
            typer.echo(f"{_total(found)} would be deleted")
            return
        errors = _delete(store, found, traceback)
        left = {str(error.where) for error in errors}
        typer.echo(f"{_total([file for file in found if file.name not in left])} deleted")
        if errors:
            raise typer.Exit(worst_exit_code(errors))


def _print_files(files: list[DeadFile]) -> None:
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="file", is_number=False, min_width=24),
        Column(title="size"),
        Column(title="why", is_number=False, min_width=20),
    ]
    print_table(columns, [[file.name, size_text(file.num_bytes), file.reason] for file in files])
    typer.echo()


def _delete(store: Store, files: list[DeadFile], traceback: bool) -> list[ThinpointError]:
    """Delete in order; what fails is reported, and the next follows."""
    from thinpoint.errors import StorageError

    errors: list[ThinpointError] = []
    for file in files:
        try:
            store.delete(file.name)
        except StorageError as error:
            error.where = file.name
            print_error(error, label="failed", traceback=traceback)
            errors.append(error)
    return errors


def _total(files: list[DeadFile]) -> str:
    return f"{count_text(len(files), 'file')}, {size_text(sum(file.num_bytes for file in files))},"
