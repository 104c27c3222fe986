"""`thinpoint ls`: the checkpoints in a directory of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpoint.cli.options import Traceback
from thinpoint.cli.reporting import (
    count_text,
    print_error,
    printable,
    ratio_text,
    reporting_errors,
    size_text,
)

if TYPE_CHECKING:
    from thinpoint.checkpoint.catalog import StepEntry
    from thinpoint.store import Store

JSON_FORMAT = "thinpoint-ls"
JSON_VERSION = 1

_AGE_UNITS = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))


def ls(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A directory of checkpoints, or its URL.")],
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    traceback: Traceback = False,
) -> None:
    """List the checkpoints in a directory. Reads only their manifests; works without torch."""
    with reporting_errors(traceback):
        from thinpoint.checkpoint.catalog import entries
        from thinpoint.cli.sources import is_checkpoint
        from thinpoint.errors import UsageError

        store = open_folder(folder)
        if is_checkpoint(store):
            raise UsageError(
                "the folder is one checkpoint, not a directory of them",
                where=folder,
                hint="`thinpoint inspect` shows what it holds",
            )
        found = entries(store)
        if json_output:
            import json

            steps = [_as_json(entry) for entry in found]
            report = {"format": JSON_FORMAT, "version": JSON_VERSION, "url": store.url, "entries": steps}
            typer.echo(json.dumps(report, indent=1))
            return
        if not found:
            typer.echo(printable(f"no checkpoints in {folder}"))
            return
        _print_entries(found)
        for error in (entry.error for entry in found if entry.error is not None):
            print_error(error, label="problem", traceback=traceback, to_stdout=True)


def open_folder(folder: str) -> Store:
    """The store at a path or URL.

    Raises:
        NotFoundError: a path at which nothing is.
        UsageError: a path of something that is no folder.
    """
    import errno
    import os

    from thinpoint.errors import NotFoundError, UsageError
    from thinpoint.store import LocalStore, open_store

    store = open_store(folder)
    if isinstance(store, LocalStore) and not os.path.isdir(store.url):
        if not os.path.lexists(store.url):
            raise NotFoundError("there is no such folder", errno=errno.ENOENT, where=folder)
        raise UsageError(
            "it is no folder, and so no directory of checkpoints",
            where=folder,
            hint="`thinpoint inspect` shows a single file",
        )
    return store


def age_text(seconds: float) -> str:
    """A time for people: "42 s", "3.5 h", "12.0 days"."""
    for unit, word in _AGE_UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.1f} {word}"
    return f"{seconds:.0f} s"


def _print_entries(found: list[StepEntry]) -> None:
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="step"),
        Column(title="state", is_number=False),
        *(Column(title=title) for title in ("ranks", "files", "size", "ratio", "age")),
        Column(title="save id", is_number=False),
    ]
    cells = [
        [
            "-" if entry.step is None else f"{entry.step:,}",
            entry.state,
            f"{_num_ranks(entry):,}",
            f"{len(entry.files):,}",
            size_text(entry.num_bytes),
            "-" if entry.raw_bytes is None else ratio_text(entry.raw_bytes, entry.num_bytes),
            age_text(entry.age_s),
            entry.save_id or "-",
        ]
        for entry in found
    ]
    print_table(columns, cells)
    committed = [entry for entry in found if entry.state == "committed"]
    others = [entry for entry in found if entry.state != "committed"]
    line = f"{count_text(len(committed), 'checkpoint')}, {size_text(sum(e.num_bytes for e in committed))}"
    if others:
        line += f"; beside them {size_text(sum(entry.num_bytes for entry in others))}"
    typer.echo(f"\n{line}")


def _num_ranks(entry: StepEntry) -> int:
    """How many ranks' files there are."""
    from thinpoint.folder.names import rank_of

    return sum(rank_of(name.rpartition("/")[2]) is not None for name in entry.files)


def _as_json(entry: StepEntry) -> dict[str, Any]:
    """One save as a JSON object, described in docs/cli.md."""
    ratio = entry.raw_bytes / entry.num_bytes if entry.raw_bytes and entry.num_bytes else None
    return {
        "step": entry.step,
        "state": entry.state,
        "save_id": entry.save_id,
        "num_ranks": _num_ranks(entry),
        "files": list(entry.files),
        "num_bytes": entry.num_bytes,
        "raw_bytes": entry.raw_bytes,
        "ratio": None if ratio is None else round(ratio, 4),
        "age_s": round(entry.age_s, 3),
        "problem": None if entry.error is None else str(entry.error),
    }
