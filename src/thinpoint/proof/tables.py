"""The numbers of a record as tables, for a terminal, a page or a plot's side. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
NONE = "-"
ASYNC, OVERLAP = "thinpoint.async_save", "thinpoint.async_save, overlap"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: its first column is text, the others are numbers.

    Attributes:
        title: what it shows.
        headings: of the columns.
        rows: as many cells each.
        notes: sentences below it.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def tables_of(record: Row) -> list[Table]:
    """All tables of a record, with what was left out."""
    tables = _TABLES[record["piece"]](record["result"]) if record["result"] else []
    if record["skipped"]:
        note = f"Left out for lack of time: {', '.join(record['skipped'])}."
        if tables:
            tables[-1].notes.append(note)
        else:
            tables = [Table(title=TITLES[record["piece"]], headings=[""], rows=[], notes=[note])]
    return tables


TITLES = {
    "rates": "Rates of codec, link and storage",
    "step": "Step time while saving",
    "restore": "Restore beside an uncompressed restore",
    "resume": "Killed and resumed beside never stopped",
}
"""The pieces of a benchmark, in the order in which they run."""


def where(record: Row) -> str:
    """On what and with what a record was measured, in one line."""
    machine, versions = record["machine"], record["versions"]
    gpu = machine["gpu"]
    device = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; " if gpu else ""
    packages = ", ".join(f"{name} {found}" for name, found in versions.items() if found and name != "python")
    return (
        f"{device}{machine['cpu']}, {machine['num_cores']} cores; Python {versions['python']}, {packages}; "
        f"commit {record['commit']}; scale {record['options']['scale']}; {record['date'][:10]}"
    )


def number(value: float | None, digits: int) -> str:
    """The number, or a dash."""
    return NONE if value is None else f"{value:,.{digits}f}"


def three_digits(value: float) -> str:
    """A number with three digits that count."""
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def between(values: dict[str, float], factor: float = 1.0) -> str:
    """A spread as "median (least-greatest)"."""
    cells = [three_digits(values[key] * factor) for key in ("median", "least", "greatest")]
    return f"{cells[0]} ({cells[1]} to {cells[2]})"


def model_text(about: Row) -> str:
    """A model and its state, in words."""
    model = about["model"]
    return (
        f"{about['num_parameters'] / 1e6:,.1f} M parameters ({model['num_layers']} layers of width "
        f"{model['width']}), batches of {model['batch']} x {model['context']}, state {about['raw_bytes'] / 1e9:,.3f} GB"
    )


def _rates(result: Row) -> list[Table]:
    rows = [[name.replace("_", " "), between(values)] for name, values in result["gb_per_s"].items()]
    notes = [
        f"{model_text(result)}; ratio {result['ratio']:.3f}x.",
        f"Storage: {result['filesystem']}, read "
        f"{'past' if result['cold'] else 'through'} the page cache. Median of five (least to greatest).",
    ]
    return [Table(title=TITLES["rates"], headings=["", "GB/s"], rows=rows, notes=notes)]


def _step(result: Row) -> list[Table]:
    return [_loop(loop, result) for loop in result["loops"]]


def _loop(loop: Row, result: Row) -> Table:
    rows = []
    notes = [f"{model_text(loop)}; a step without saving takes {between(loop['step'], 1e3)} ms."]
    if loop["idle"] is not None:
        notes.append(f"The GPU is idle for {100 * loop['idle']:.1f} % of the time, by torch.profiler.")
    elif loop["idle_unknown"] != "no GPU":
        notes.append(f"How much of the time the GPU is idle is not known: {loop['idle_unknown']}.")
    for row in loop["rows"]:
        if "cost" not in row:
            reason = row.get("unavailable") or f"failed: {row['error']}"
            notes.append(f"{row['name']}: {reason}.")
            rows.append([row["name"], "not available" if "unavailable" in row else "failed", *[NONE] * 8])
            continue
        rows.append(
            [
                row["name"],
                between(row["cost"], 1e3),
                three_digits(1e3 * row["stall"]["median"]),
                three_digits(1e3 * row["held"]["median"]),
                three_digits(1e3 * row["slowdown"]["median"]),
                between(row["noise"], 1e3),
                f"{row['percent']:.4f}",
                three_digits(row["shortest_interval_s"]),
                three_digits(1e3 * row["durable"]["median"]),
                f"{row['ratio']:.3f}x",
            ]
        )
        if row["fallback"]:
            notes.append(f"{row['name']} fell back to {row['mode']}: {row['fallback']}.")
    waits = {row["name"]: row for row in loop["rows"] if "cost" in row}
    if {ASYNC, OVERLAP} <= waits.keys():
        wait = sum(waits[OVERLAP][key]["median"] for key in ("stall", "held"))
        share = 100 * wait / waits[ASYNC]["stall"]["median"]
        notes.append(f"With overlap training waits (stall and held) for {share:.0f} % of the stall without.")
    notes.append(
        f"Medians of {result['num_saves']} saves (least to greatest). Cost: of one checkpoint, all steps that it touches. "
        "Noise: the same sum without a save."
    )
    headings = [
        "",
        "cost, ms",
        "stall",
        "held",
        "slow-down",
        "noise, ms",
        f"% at one per {result['every_s'] / 60:g} min",
        f"{100 * result['share']:g} % every, s",
        "durable after, ms",
        "ratio",
    ]
    return Table(title=f"{TITLES['step']}, {loop['name']}", headings=headings, rows=rows, notes=notes)


def _restore(result: Row) -> list[Table]:
    names = list(dict.fromkeys(way["name"] for row in result["rows"] for way in row["ways"]))
    rows, notes = [], [f"{model_text(result)}; medians of {result['num_rounds']} rounds (least to greatest)."]
    for row in result["rows"]:
        ways = {way["name"]: way for way in row["ways"]}
        label = row["storage"]
        if row["gb_per_s"] is None:
            label = f"{row['filesystem']}, {'cold' if row['cold'] else 'not cold'}"
        cells = [label]
        for name in names:
            way = ways.get(name)
            if way is None or "error" in way:
                cells.append(NONE if way is None else "failed")
                if way is not None:
                    notes.append(f"{name}, {label}: {way['error']}.")
                continue
            cells.append(three_digits(1e3 * way["seconds"]["median"]))
        ours = ways.get(names[0], {})
        cells.append(between(ours["over_raw"]) if "over_raw" in ours else NONE)
        rows.append(cells)
    ratios = [
        way["over_raw"]["median"]
        for row in result["rows"]
        for way in row["ways"]
        if way["name"] == names[0] and "over_raw" in way
    ]
    if ratios:
        met = sum(ratio <= result["target"] for ratio in ratios)
        notes.append(
            f"At most {result['target']:.2f} x the uncompressed restore: at {met} of {len(ratios)} kinds of storage."
        )
    headings = ["storage", *(f"{name}, ms" for name in names), "compressed over raw"]
    return [Table(title=TITLES["restore"], headings=headings, rows=rows, notes=notes)]


def _resume(result: Row) -> list[Table]:
    rows = [
        ["verdict", result["verdict"]],
        ["training steps", f"{result['num_steps']:,}"],
        ["kills (SIGKILL)", f"{result['num_kills']:,}"],
        ["of these in the middle of a save", f"{result['num_kills_in_save']:,}"],
        ["restores from a checkpoint", f"{result['num_restores']:,}"],
        ["checkpoints in place", f"{result['num_checkpoints']:,}"],
        ["steps trained again after a kill", f"{result['num_steps_again']:,}"],
        ["losses compared, in bits", f"{result['num_losses_compared']:,}"],
        ["tensors compared, in bits", f"{result['num_tensors']:,}"],
        ["bytes of these", f"{result['num_bytes']:,}"],
        ["first and last loss", f"{result['first_loss']:.4f}, {result['last_loss']:.4f}"],
        ["parameters", f"{result['num_parameters']:,}"],
        ["seconds", f"{result['seconds']:.0f}"],
    ]
    meaning = {
        "identical": "Two runs that were never stopped agree in every bit, and so does the one that was killed.",
        "different": "The run that was killed DIFFERS from the one that was never stopped.",
        "inconclusive": "Two runs that were never stopped differ from each other: this machine does not repeat itself, so "
        "nothing is shown about the one that was killed.",
    }
    notes = [meaning[result["verdict"]], *(f"Differs: {each}." for each in result["differences"][:5])]
    return [Table(title=TITLES["resume"], headings=["", result["verdict"]], rows=rows[1:], notes=notes)]


_TABLES: dict[str, Callable[[Row], list[Table]]] = {
    "rates": _rates,
    "step": _step,
    "restore": _restore,
    "resume": _resume,
}
