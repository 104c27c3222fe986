"""Tables of text: fitted to a terminal by shortening one column in the middle, left whole in a pipe."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass

import typer

from thinpoint.cli.reporting import printable, shorten_middle

_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column.

    Attributes:
        title: its heading.
        is_number: whether it is set to the right.
        min_width: to how many characters it may be shortened, from the right; None keeps it whole.
    """

    title: str
    is_number: bool = True
    min_width: int | None = None


def print_table(columns: list[Column], rows: list[list[str]], *, num_totals: int = 0) -> None:
    """Write a table to stdout; the last `num_totals` rows are set off by a rule."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(columns, rows, width=width, num_totals=num_totals):
        typer.echo(line)


def table_lines(
    columns: list[Column], rows: list[list[str]], *, width: int | None, num_totals: int = 0
) -> list[str]:
    """The lines of a table, no wider than `width` where shortening can achieve it."""
    cells = [[column.title for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    if width is not None:
        for i, column in reversed(list(enumerate(columns))):
            excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
            if column.min_width is not None and excess > 0:
                widths[i] = max(widths[i] - excess, min(widths[i], column.min_width))
    lines = []
    for row in cells:
        line = ""
        for i, column in enumerate(columns):
            cell = shorten_middle(row[i], widths[i])
            line += (_GAP if i else "") + (
                cell.rjust(widths[i]) if column.is_number else cell.ljust(widths[i])
            )
        lines.append(line.rstrip())
    rule = _GAP.join("-" * size for size in widths)
    lines.insert(1, rule)
    if num_totals:
        lines.insert(len(lines) - num_totals, rule)
    return lines
