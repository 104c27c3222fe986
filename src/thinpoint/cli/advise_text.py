"""Prints the advice: what was asked, tables, the sentence."""

from __future__ import annotations

import textwrap

import typer

from thinpoint.advisor import Advice, Costs
from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.measure import Measured
from thinpoint.advisor.sample import Sample
from thinpoint.advisor.words import count, hours, minutes, percent, rate, seconds, size, usd
from thinpoint.cli.reporting import printable
from thinpoint.cli.tables import Column, print_table

_WIDTH = 100


def print_advice(advice: Advice, *, sample: Sample | None, measured: Measured | None) -> None:
    """Write everything to stdout, the recommendation first."""
    _paragraph(advice.recommendation)
    typer.echo()
    _print_inputs(advice, sample, measured)
    _print_components(advice)
    _print_codecs(advice)
    _print_modes(advice)
    _print_alternatives(advice)
    typer.echo("What decides here")
    for note in advice.notes:
        _paragraph(note, first="- ")


def _paragraph(text: str, first: str = "") -> None:
    for line in textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
    ):
        typer.echo(line)


def _print_inputs(advice: Advice, sample: Sample | None, measured: Measured | None) -> None:
    cluster, storage, saves = advice.case.cluster, advice.case.storage, advice.case.saves
    scope = "in all" if storage.scope == "aggregate" else "a node"
    lines = {
        "cluster": f"{cluster.gpus:,} GPUs at {usd(cluster.usd_per_gpu_hour)} an hour, a failure every "
        f"{hours(cluster.hours_between_failures)}, restart {seconds(cluster.restart_s)}",
        "storage": f"{rate(storage.gb_per_s)} {scope}, ${storage.usd_per_gb_month:g} a {storage.unit}-month, "
        f"{storage.kept:,} checkpoints kept",
        "saves": f"every {minutes(saves.interval_min)}, {saves.mode}",
    }
    if sample is not None:
        lines["sample"] = f"{size(sample.read_bytes)} of {sample.name}"
    if measured is not None:
        found = [
            f"{name} codes {rate(r.encode_gb_per_s)}, decodes {rate(r.decode_gb_per_s)}"
            for name, r in measured.codecs.items()
        ]
        found += [f"link {rate(measured.link_gb_per_s)}"] if measured.link_gb_per_s is not None else []
        if measured.write_gb_per_s is not None and measured.read_gb_per_s is not None:
            found.append(
                f"storage writes {rate(measured.write_gb_per_s)}, reads {rate(measured.read_gb_per_s)}"
            )
        lines["measured"] = f"on {measured.device}, one process: {'; '.join(found)}"
        if measured.skipped:
            lines["not measured"] = "; ".join(f"{name}: {why}" for name, why in measured.skipped.items())
    for label, text in lines.items():
        typer.echo(printable(f"{label:<12} {text}"))
    typer.echo()


def _print_components(advice: Advice) -> None:
    parts, codecs = advice.case.model.parts(), advice.case.codecs
    total = sum(part.raw_bytes for part in parts)
    columns = [Column(title="component", is_number=False), Column(title="size"), Column(title="share")]
    columns += [Column(title=codec.name) for codec in codecs if codec.name != NONE.name]
    rows = [
        [
            part.label,
            size(part.raw_bytes),
            percent(part.raw_bytes / total),
            *(f"{codec.ratio_of(part):.3f}x" for codec in codecs if codec.name != NONE.name),
        ]
        for part in parts
    ]
    whole = [f"{total / codec.stored_bytes(parts):.3f}x" for codec in codecs if codec.name != NONE.name]
    print_table(columns, [*rows, ["checkpoint", size(total), "", *whole]], num_totals=1)
    typer.echo()


_COST_TITLES = ("stored", "wait", "restore", "idle h", "idle", "storage", "lost work", "total", "network")


def _cost_cells(costs: Costs) -> list[str]:
    return [
        size(costs.stored_bytes),
        seconds(costs.times.wait_s),
        seconds(costs.restore_s),
        count(costs.idle_gpu_hours),
        usd(costs.idle_usd),
        usd(costs.storage_usd),
        usd(costs.lost_usd),
        usd(costs.total_usd),
        size(costs.network_bytes),
    ]


def _print_codecs(advice: Advice) -> None:
    typer.echo(f"Codecs, {advice.case.saves.mode} (a save; a month: GPU hours, dollars, bytes)")
    columns = [Column(title="codec", is_number=False), *(Column(title=title) for title in _COST_TITLES)]
    columns += [
        Column(title="slowest", is_number=False),
        Column(title="break-even"),
        Column(title="best interval"),
    ]
    rows = []
    for costs in advice.rows:
        edge = advice.break_even.get(costs.codec)
        slowest = costs.times.slowest
        cells = [slowest, "-" if edge is None else rate(edge), minutes(costs.best_interval_min)]
        rows.append([costs.codec, *_cost_cells(costs), *cells])
    print_table(columns, rows)
    typer.echo("break-even: above this rate of storage a save waits longer with the codec; -: nowhere\n")


def _print_modes(advice: Advice) -> None:
    typer.echo("Modes, with no codec and with the cheapest")
    columns = [Column(title="mode", is_number=False), Column(title="codec", is_number=False)]
    columns += [Column(title=title) for title in _COST_TITLES]
    rows = []
    for mode in dict.fromkeys(costs.mode for costs in advice.modes):
        of_mode = [costs for costs in advice.modes if costs.mode == mode]
        cheapest = min(of_mode, key=lambda costs: costs.total_usd)
        for costs in dict.fromkeys(id(c) for c in (advice.row(NONE.name, mode), cheapest)):
            row = next(c for c in of_mode if id(c) == costs)
            rows.append([mode, row.codec, *_cost_cells(row)])
    print_table(columns, rows)
    typer.echo()


def _print_alternatives(advice: Advice) -> None:
    lines = []
    for name, other in advice.alternatives.items():
        ways = []
        if other.interval_min is not None and other.interval_lost_usd is not None:
            ways.append(
                f"a save every {minutes(other.interval_min)} idles as little, and loses "
                f"{usd(other.interval_lost_usd)} more work a month"
            )
        if other.storage_gb_per_s is not None:
            price = "" if other.storage_cost_usd is None else f", {usd(other.storage_cost_usd)} a month"
            ways.append(
                f"storage of {rate(other.storage_gb_per_s)} waits as little{price}; it is the better buy below "
                f"{usd(other.storage_worth_usd)} a month"
            )
        if ways:
            lines.append(f"{name}: {'; '.join(ways)}")
    if lines:
        typer.echo("What would do the same without a codec")
        for line in lines:
            _paragraph(line, first="- ")
        typer.echo()
