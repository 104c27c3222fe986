"""`thinpoint inspect`: what a `.thin` file holds and what it costs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thinpoint.cli.options import Traceback
from thinpoint.cli.reporting import count_text, printable, ratio_text, reporting_errors, size_text

if TYPE_CHECKING:
    from thinpoint.file.reader import FileReader


def inspect_file(
    path: Annotated[
        str, typer.Argument(metavar="FILE|FOLDER", help="A .thin file, or a folder with a manifest.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="The table of tensors.")] = True,
    roles: Annotated[
        bool, typer.Option("--roles/--no-roles", help="The table of roles; of a folder, that of its files.")
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Everything as JSON, for scripts.")] = False,
    traceback: Traceback = False,
) -> None:
    """Show what a .thin file holds, by tensor and by role, or a checkpoint of many ranks, by tensor and by file.

    Of a directory of checkpoints it shows the newest whose files are all there. Reads only manifests and
    indexes; works without torch.
    """
    with reporting_errors(traceback):
        from thinpoint.cli.inspect_folder import inspect_folder
        from thinpoint.cli.sources import is_checkpoint, is_folder, newest_or_itself
        from thinpoint.errors import UsageError
        from thinpoint.file.reader import FileReader
        from thinpoint.store import open_source, open_store

        path = newest_or_itself(path)
        if is_folder(path):
            if not is_checkpoint(open_store(path)):
                raise UsageError("it is a folder without a manifest, and so no checkpoint", where=path)
            only = inspect_folder(open_store(path), tensors=tensors, roles=roles, json_output=json_output)
            if only is None:
                return
            path = f"{path.rstrip('/')}/{only}"
        with open_source(path) as source:
            reader = FileReader(source)
            if json_output:
                import json

                from thinpoint.cli.contents import as_json

                typer.echo(json.dumps(as_json(reader), indent=1))
                return
            if tensors:
                _print_tensors(reader)
            if roles:
                _print_roles(reader)
            _print_summary(reader)


def _print_tensors(reader: FileReader) -> None:
    from thinpoint.cli.contents import bits_per_value, tensor_rows
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="tensor", is_number=False, min_width=16),
        Column(title="dtype", is_number=False),
        Column(title="shape", is_number=False, min_width=11),
        Column(title="chain", is_number=False, min_width=9),
        Column(title="stored"),
        Column(title="ratio"),
        Column(title="bits"),
    ]
    cells = []
    for row in tensor_rows(reader.index):
        bits = bits_per_value(row)
        if row.shared_with is not None:
            chain = f"shared: {'.'.join(map(str, row.shared_with))}"
        else:
            chain = ", ".join(row.chains)
        cells.append(
            [
                row.name or "(the state)",
                row.dtype,
                "x".join(map(str, row.shape)) or "scalar",
                chain or "-",
                size_text(row.stored_bytes),
                ratio_text(row.coded_raw_bytes, row.stored_bytes),
                "-" if bits is None else f"{bits:.2f}",
            ]
        )
    if cells:
        print_table(columns, cells)
        typer.echo()


def _print_roles(reader: FileReader) -> None:
    from thinpoint.cli.contents import role_rows
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="role", is_number=False),
        *(Column(title=t) for t in ("parts", "raw", "stored", "ratio")),
    ]
    rows = role_rows(reader.index)
    cells = [
        [
            row.role,
            f"{row.num_parts:,}",
            size_text(row.raw_bytes),
            size_text(row.stored_bytes),
            ratio_text(row.raw_bytes, row.stored_bytes),
        ]
        for row in rows
    ]
    raw, stored = sum(row.raw_bytes for row in rows), sum(row.stored_bytes for row in rows)
    file_bytes = reader.trailer.file_bytes
    cells.append(["index", "", "", size_text(file_bytes - stored), ""])
    cells.append(
        [
            "file",
            f"{len(reader.index.parts):,}",
            size_text(raw),
            size_text(file_bytes),
            ratio_text(raw, file_bytes),
        ]
    )
    print_table(columns, cells, num_totals=1)
    typer.echo()


def _print_summary(reader: FileReader) -> None:
    from thinpoint.cli.contents import codec_counts, needs, origin
    from thinpoint.file.layout import READ_VERSION

    index = reader.index
    raw = sum(part.raw_bytes for part in index.parts)
    file_bytes = reader.trailer.file_bytes
    codecs = ", ".join(f"{name} {count:,}" for name, count in codec_counts(index).items()) or "none"
    lines = {
        "file": reader.name,
        "size": f"{size_text(raw)} raw -> {size_text(file_bytes)}, {ratio_text(raw, file_bytes)}",
        "holds": f"{count_text(len(index.tensors), 'tensor')}, {count_text(len(index.storages), 'storage')}",
        "made from": origin(reader),
        "codecs": f"{codecs} (parts)",
        "written by": ", ".join(f"{key} {value}" for key, value in index.writer.items()),
        "format": f"readable by version {READ_VERSION}",
        "features": ", ".join((*index.required, *index.optional)) or "none",
        "file id": f"{reader.file_id:016x}",
    }
    for label, text in lines.items():
        typer.echo(printable(f"{label:<11} {text}"))
    for need in needs(index):
        typer.echo(printable(f"{'needs':<11} {need}"))
