"""Records as a self-contained HTML page, or as Markdown between a page's two marks. Needs no torch.

python -m thinpoint.proof.page FILE.json...                       # Markdown to the terminal
python -m thinpoint.proof.page FILE.json... --into docs/proof.md  # between the page's two marks
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from thinpoint.errors import UsageError
from thinpoint.proof.picture import svg
from thinpoint.proof.plots import plot_of
from thinpoint.proof.record import read_record
from thinpoint.proof.tables import TITLES, Table, tables_of, where

BEGIN = "<!-- thinpoint bench: begin -->"
END = "<!-- thinpoint bench: end -->"

Row = dict[str, Any]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0;font-size:13px}th,td{padding:.3em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}"
    "div{overflow-x:auto}p{margin:.3em 0}.where{color:#666;font-size:13px}svg{max-width:100%;height:auto}"
)


def html(record: Row) -> str:
    """A page that refers to nothing outside of it: tables, and the plot if there is one."""
    title = TITLES[record["piece"]]
    picture = plot_of(record)
    body = [f"<h1>{escape(title)}</h1>", f'<p class="where">{escape(where(record))}</p>']
    if picture is not None:
        body.append(f"<div>{svg(picture, title)}</div>")
    for table in tables_of(record):
        body += [f"<h2>{escape(table.title)}</h2>", _html_table(table)]
        body += [f"<p>{escape(note)}</p>" for note in table.notes]
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _html_table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = [line("th", table.headings), *(line("td", row) for row in table.rows)]
    return "<div><table>\n" + "\n".join(rows) + "\n</table></div>"


def markdown(records: Iterable[Row]) -> str:
    """All tables of some records, in order, each set of them below the machine it was measured on."""
    blocks: list[str] = []
    line = ""
    for record in records:
        if line != (line := where(record)):
            blocks.append(line + ".")
        for table in tables_of(record):
            blocks.append(f"### {table.title}")
            if table.rows:
                blocks.append(markdown_table(table.headings, table.rows))
            blocks.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "| --- |" + " ---: |" * (len(headings) - 1)
    return "\n".join([line(headings), rule, *map(line, rows)])


def put_into(page: str, text: str, *, begin: str = BEGIN, end: str = END) -> str:
    """The page with the text between its marks `begin` and `end`.

    Raises:
        UsageError: the page does not have both marks once, in order.
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end or begin in rest or end in after:
        raise UsageError(f"the page needs the lines {begin} and {end}, once each")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def main() -> None:
    """Print the tables of some files, or put them into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m thinpoint.proof.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a page with the two marks")
    options = parser.parse_args()
    text = markdown(map(read_record, options.files))
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), text))
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
