"""Bits per value of tensors as sharded training cuts them: whole, and 8, 64 and 512 ways along their rows.

    python bench/shards.py FILE.safetensors...

Every shard is a part of its own, with all that the codec stores for it charged; the last columns are the sizes of
a whole .thin file of all shards, index included, and of the same state by torch.save. Below stands the table of
design.md section 4, which is for whole tensors of full models.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from inputs import ROLES, Item, items_of, read_state, state_of
from results import describe, write
from rich.console import Console
from rich.table import Table

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import PartSpec

WAYS = (1, 8, 64, 512)
DESIGN = {
    "no prediction": ("26.47", "26.41-26.92", "25.35-25.61"),
    "group means + column profile": ("26.47", "25.63-26.26", "23.97-24.27"),
}
"""design.md section 4: bits per value of w, m, v, whole tensors of a 211M and a 134M model."""

_COMPONENTS = ("w", "m", "v")


def cut(item: Item, num_ways: int) -> list[Item]:
    """The item's rows in at most `num_ways` shards, cut as `torch.chunk` (so FSDP and DTensor) does."""
    shards = item.tensor.chunk(num_ways)
    return [
        Item(name=f"{item.name}.shard{i}", component=item.component, tensor=shard.contiguous())
        for i, shard in enumerate(shards)
    ]


def bits_per_value(items: list[Item]) -> float:
    """What the codec stores for the items, a part each, in bits over their number of values."""
    backend = get_backend("auto")
    num_bytes = 0
    for item in items:
        spec = PartSpec(dtype=item.dtype, role=ROLES[item.component], row_elems=item.row_elems)
        num_bytes += backend.encode(item.words, spec).stored_bytes
    return 8 * num_bytes / sum(item.tensor.numel() for item in items)


def file_bits_per_value(items: list[Item], save: Callable[[Any, io.BytesIO], Any]) -> float:
    """The size of a file of the items, in bits over their number of values."""
    buffer = io.BytesIO()
    # Clones: each shard in a storage of its own, as the ranks of a sharded job have it.
    save(state_of([replace(item, tensor=item.tensor.clone()) for item in items]), buffer)
    return 8 * len(buffer.getvalue()) / sum(item.tensor.numel() for item in items)


def measure(state: Any) -> list[dict[str, Any]]:
    """A row for each number of ways: bits per value of w, m and v, and of the file of all three."""
    items = [
        item
        for item in items_of(state)
        if item.component in _COMPONENTS and item.tensor.dtype == torch.float32
    ]
    rows = []
    for num_ways in WAYS:
        shards = [shard for item in items for shard in cut(item, num_ways)]
        row: dict[str, Any] = {"num_ways": num_ways, "num_parts": len(shards)}
        for component in _COMPONENTS:
            row[component] = bits_per_value([shard for shard in shards if shard.component == component])
        row["file"] = file_bits_per_value(shards, thinpoint.save)
        row["torch_save_file"] = file_bits_per_value(shards, torch.save)
        rows.append(row)
    return rows


def main() -> None:
    """Print one table a file and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(describe())
    measured = {}
    for path in options.files:
        rows = measured[path.name] = measure(read_state(path))
        table = Table(title=f"{path.name}: FP32, bits per value of 32", title_justify="left")
        table.add_column("cut")
        for heading in ("parts", "w", "m", "v", "file", "torch.save"):
            table.add_column(heading, justify="right")
        for row in rows:
            ways = "whole" if row["num_ways"] == 1 else f"{row['num_ways']} ways"
            cells = (f"{row[key]:.2f}" for key in ("w", "m", "v", "file", "torch_save_file"))
            table.add_row(ways, f"{row['num_parts']:,}", *cells)
        table.add_section()
        for name, cells_of_design in DESIGN.items():
            table.add_row(f"design.md: {name}", "", *cells_of_design, "", "")
        console.print(table)
    console.print(f"Written: {write('shards', {'data': measured})}")


if __name__ == "__main__":
    main()
