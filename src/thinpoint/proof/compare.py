"""Two records of one piece, of two machines or versions, side by side. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from thinpoint.errors import UsageError
from thinpoint.proof.tables import NONE, TITLES, Table, three_digits

Row = dict[str, Any]
Figures = Iterator[tuple[str, float]]


def compare(a: Row, b: Row) -> list[Table]:
    """What differs in the set-up, and every figure of both with B over A.

    Raises:
        UsageError: they are of different pieces.
    """
    if a["piece"] != b["piece"]:
        raise UsageError(
            "the two files hold results of different pieces", expected=a["piece"], actual=b["piece"]
        )
    figures_a, figures_b = (dict(_FIGURES[a["piece"]](record["result"])) for record in (a, b))
    rows = []
    for name in [*figures_a, *(name for name in figures_b if name not in figures_a)]:
        in_a, in_b = figures_a.get(name), figures_b.get(name)
        ratio = f"{in_b / in_a:.3f}" if in_a and in_b is not None else NONE
        rows.append(
            [name, *(NONE if value is None else three_digits(value) for value in (in_a, in_b)), ratio]
        )
    notes = [] if rows else ["Neither has figures."]
    if a["piece"] == "resume":
        notes.append(f"Verdicts: {a['result'].get('verdict', NONE)}, {b['result'].get('verdict', NONE)}.")
    set_up = _set_up(a), _set_up(b)
    different = [
        [name, set_up[0].get(name, NONE), set_up[1].get(name, NONE)]
        for name in [*set_up[0], *(name for name in set_up[1] if name not in set_up[0])]
        if set_up[0].get(name) != set_up[1].get(name)
    ]
    return [
        Table(
            title="What differs in the set-up",
            headings=["", "A", "B"],
            rows=different,
            notes=[] if different else ["Nothing but the moment."],
        ),
        Table(title=TITLES[a["piece"]], headings=["", "A", "B", "B / A"], rows=rows, notes=notes),
    ]


def _set_up(record: Row) -> dict[str, str]:
    """Everything that was not measured, by its name; the date and what else changes by itself is left out."""
    found: dict[str, str] = {"commit": record["commit"]}
    for group in ("machine", "versions", "options"):
        found |= _flat(record[group], group)
    result = record["result"]
    for loop in result.get("loops", ()):
        found |= _flat(loop["model"], f"model, {loop['name']}")
    for key in ("model", "config", "num_parameters", "filesystem", "cold", "num_saves", "num_rounds"):
        if key in result:
            found |= _flat(result[key], key)
    found.pop("machine.load_average", None)
    return found


def _flat(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        return {name: str(value)}
    return {
        key: text for inner, child in value.items() for key, text in _flat(child, f"{name}.{inner}").items()
    }


def _rates(result: Row) -> Figures:
    for name, values in result.get("gb_per_s", {}).items():
        yield f"{name.replace('_', ' ')}, GB/s", values["median"]


def _step(result: Row) -> Figures:
    for loop in result.get("loops", ()):
        yield f"{loop['name']}: step without saving, ms", 1e3 * loop["step"]["median"]
        for row in loop["rows"]:
            if "cost" in row:
                for key in ("cost", "stall", "held", "slowdown", "durable"):
                    yield f"{loop['name']}, {row['name']}: {key}, ms", 1e3 * row[key]["median"]


def _restore(result: Row) -> Figures:
    for row in result.get("rows", ()):
        for way in row["ways"]:
            if "seconds" in way:
                yield f"{row['storage']}, {way['name']}: ms", 1e3 * way["seconds"]["median"]
                if "over_raw" in way and not way["name"].endswith("codec raw"):
                    yield f"{row['storage']}, {way['name']}: over raw", way["over_raw"]["median"]


def _resume(result: Row) -> Figures:
    for key in ("num_steps", "num_kills", "num_kills_in_save", "num_restores", "num_steps_again", "seconds"):
        if key in result:
            yield key.replace("num_", "").replace("_", " "), float(result[key])


_FIGURES: dict[str, Callable[[Row], Figures]] = {
    "rates": _rates,
    "step": _step,
    "restore": _restore,
    "resume": _resume,
}
