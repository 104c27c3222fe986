"""`thinpoint inspect` of a folder with a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from thinpoint.cli.reporting import count_text, printable, ratio_text, size_text

if TYPE_CHECKING:
    from thinpoint.cli.folder_contents import FolderContents, GlobalTensor
    from thinpoint.store.contract import Store


def inspect_folder(store: Store, *, tensors: bool, roles: bool, json_output: bool) -> str | None:
    """Show what a checkpoint of many ranks holds; of a single file only return its name in the folder.

    Raises:
        DamagedFileError, UnsupportedError, StorageError: it cannot be read.
    """
    from thinpoint.cli.folder_contents import as_json, folder_contents
    from thinpoint.dcp.folder import read_manifest
    from thinpoint.folder.layout_file import MAX_LAYOUT_BYTES, parse_layout

    manifest = read_manifest(store)
    if manifest.layout is None:
        return manifest.files[0].name
    name = manifest.layout.name
    layout = parse_layout(store.get(name, MAX_LAYOUT_BYTES), manifest.layout, where=f"{store.url}/{name}")
    found = folder_contents(store, manifest, layout)
    if json_output:
        import json

        typer.echo(json.dumps(as_json(store, found), indent=1))
        return None
    if tensors and found.tensors:
        _print_tensors(found)
    if roles:
        _print_files(found)
    _print_summary(store, found)
    return None


def _print_tensors(found: FolderContents) -> None:
    from thinpoint.cli.folder_contents import ranks_text
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="tensor", is_number=False, min_width=16),
        Column(title="dtype", is_number=False),
        Column(title="shape", is_number=False, min_width=11),
        Column(title="cut", is_number=False),
        Column(title="ranks", is_number=False, min_width=9),
        Column(title="stored"),
        Column(title="ratio"),
    ]
    cells = [
        [
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            _cut_text(tensor),
            ranks_text(tensor.ranks),
            size_text(tensor.stored_bytes),
            ratio_text(tensor.coded_raw_bytes, tensor.stored_bytes),
        ]
        for tensor in found.tensors
    ]
    print_table(columns, cells)
    typer.echo()


def _cut_text(tensor: GlobalTensor) -> str:
    if tensor.num_chunks <= 1:
        return "whole"
    return f"{tensor.num_chunks} chunks" if tensor.cut is None else "x".join(map(str, tensor.cut))


def _print_files(found: FolderContents) -> None:
    from thinpoint.cli.tables import Column, print_table

    columns = [
        Column(title="rank"),
        *(Column(title=title) for title in ("chunks", "raw", "stored", "ratio")),
        Column(title="file", is_number=False, min_width=16),
    ]
    cells = [
        [
            f"{row.rank:,}",
            f"{row.num_chunks:,}",
            size_text(row.raw_bytes),
            size_text(row.file_bytes),
            ratio_text(row.raw_bytes, row.file_bytes),
            row.file,
        ]
        for row in found.files
    ]
    raw, stored = sum(row.raw_bytes for row in found.files), sum(row.file_bytes for row in found.files)
    num_chunks = sum(row.num_chunks for row in found.files)
    cells.append(["all", f"{num_chunks:,}", size_text(raw), size_text(stored), ratio_text(raw, stored), ""])
    print_table(columns, cells, num_totals=1)
    typer.echo()


def _print_summary(store: Store, found: FolderContents) -> None:
    manifest = found.manifest
    raw, stored = manifest.raw_bytes, manifest.num_bytes
    roles = ", ".join(f"{role} {ratio_text(*sizes)}" for role, sizes in manifest.roles.items()) or "none"
    counts = (
        f"{count_text(len(found.tensors), 'tensor')} in {count_text(found.layout.num_chunks, 'chunk')}, "
        f"{count_text(len(found.layout.objects), 'other value')}"
    )
    lines = {
        "folder": store.url,
        "step": "-" if manifest.step is None else f"{manifest.step:,}",
        "ranks": f"{found.layout.world_size:,}",
        "size": f"{size_text(raw)} raw -> {size_text(stored)}, {ratio_text(raw, stored)}",
        "holds": counts,
        "roles": roles,
        "written by": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
        "save id": manifest.save_id,
    }
    for label, text in lines.items():
        typer.echo(printable(f"{label:<11} {text}"))
