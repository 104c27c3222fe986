"""The report: one HTML file with everything in it, for light and dark, narrow and wide."""

from __future__ import annotations

import re
from html import escape

from thinpoint.advisor.advice import Advice
from thinpoint.advisor.plots import bytes_plot, cost_plot, relative_plot, wait_plot
from thinpoint.advisor.words import count, hours, minutes, rate, seconds, size, usd
from thinpoint.version import __version__

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5b6570;--rule:#d5dae0;--card:#f6f8fa;
--c0:#6b7280;--c1:#c2410c;--c2:#0f766e;--c3:#1d4ed8;--c4:#a21caf;--c5:#a16207;--raw:#c5ccd4}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6eaef;--dim:#9aa5b1;--rule:#333b45;--card:#1b2128;
--c0:#9aa5b1;--c1:#fb923c;--c2:#2dd4bf;--c3:#7aa7ff;--c4:#e879f9;--c5:#eab308;--raw:#46505c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:20px 16px 48px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 10px}
h2{font-size:16px;margin:0 0 8px}
.say{font-size:17px;border-left:4px solid var(--c3);padding:2px 0 2px 14px;margin:0 0 20px;max-width:80ch}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;align-items:start}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;min-width:0;margin:0}
.card p{color:var(--dim);font-size:13px;margin:6px 0 0}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:var(--fg)}
svg .dim{fill:var(--dim)}svg .strong{font-weight:700}
.grid line.grid,svg .grid{stroke:var(--rule);stroke-width:1}
svg .here{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 3}
.series{fill:none;stroke-width:2.2}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1);stroke-dasharray:7 3}.c2{stroke:var(--c2);stroke-dasharray:2 3}
.c3{stroke:var(--c3)}.c4{stroke:var(--c4);stroke-dasharray:9 3 2 3}.c5{stroke:var(--c5);stroke-dasharray:4 4}
.edge{fill:var(--bg);stroke-width:2.5;stroke-dasharray:none}
.p0{fill:var(--c1)}.p1{fill:var(--c3)}.p2{fill:var(--c0)}.raw{fill:var(--raw)}.stored{fill:var(--c3)}
.wide{margin:20px 0}
code{font:0.95em ui-monospace,monospace;white-space:nowrap}
table{border-collapse:collapse;font-size:14px;width:100%}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}td:first-child{white-space:normal;overflow-wrap:anywhere}
th{color:var(--dim);font-weight:600}tr.best td{font-weight:700}
@media (max-width:900px){thead{display:none}table,tbody,tr,td{display:block}tr{padding:8px 0;border-bottom:1px solid var(--rule)}
td,td:first-child{display:flex;justify-content:space-between;gap:16px;border:0;padding:2px 4px;text-align:right}
td::before{content:attr(data-title);color:var(--dim);font-weight:400}}
ul{padding-left:20px;max-width:90ch}li{margin:4px 0}
footer{color:var(--dim);font-size:13px;margin-top:24px}
"""


def report_html(advice: Advice) -> str:
    """The whole document. It asks the network for nothing and runs no script."""
    case = advice.case
    every = minutes(case.saves.interval_min)
    title = f"Checkpoints of {size(advice.rows[0].raw_bytes)} on {case.cluster.gpus:,} GPUs, {case.saves.mode}, every {every}"
    cards = (
        ("What a save waits, in seconds", wait_plot(advice), _edges_text(advice)),
        (
            "The same, against no codec",
            relative_plot(advice),
            "Below 100 % a save waits less than without a codec.",
        ),
        (
            "What a month costs",
            cost_plot(advice),
            "Idle GPUs while a save is waited for, stored checkpoints, and work lost to failures.",
        ),
        ("Where the bytes are", bytes_plot(advice), "Size of each component of one checkpoint."),
    )
    plots = "".join(
        f'<section class="card"><h2>{escape(heading)}</h2>{plot}<p>{escape(below)}</p></section>'
        for heading, plot, below in cards
    )
    notes = "".join(f"<li>{_flagged(note)}</li>" for note in advice.notes)
    sources = "".join(
        f"<li>{escape(codec.name)}: {escape(codec.source)}</li>" for codec in case.codecs if codec.source
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="say">{escape(advice.recommendation)}</p>'
        f'<div class="grid">{plots}</div>'
        f'<div class="wide">{_table(advice)}</div>'
        f"<h2>What decides here</h2><ul>{notes}</ul>"
        f"<h2>Where the numbers come from</h2><ul>{sources}</ul>"
        f"<footer>{escape(_inputs_text(advice))} thinpoint {escape(__version__)}.</footer></body></html>\n"
    )


def _flagged(note: str) -> str:
    """A note with its command-line options in a face of their own."""
    return re.sub(r"(--[a-z-]+(?: [A-Za-z]+)?)", r"<code>\1</code>", escape(note))


def _edges_text(advice: Advice) -> str:
    edges = [f"{name} {rate(edge)}" for name, edge in advice.break_even.items() if edge is not None]
    never = [name for name, edge in advice.break_even.items() if edge is None]
    text = "Rings: above this rate of storage a save waits longer with the codec" if edges else ""
    text += f": {', '.join(edges)}." if edges else ""
    return f"{text} {'No such rate: ' + ', '.join(never) + '.' if never else ''}".strip()


def _table(advice: Advice) -> str:
    titles = (
        "codec",
        "ratio",
        "stored",
        "wait",
        "restore",
        "idle GPU h",
        "idle",
        "storage",
        "lost work",
        "total a month",
        "best interval",
    )
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    rows = ""
    for costs in advice.rows:
        cells = (
            costs.codec,
            f"{costs.ratio:.3f}x",
            size(costs.stored_bytes),
            seconds(costs.times.wait_s),
            seconds(costs.restore_s),
            count(costs.idle_gpu_hours),
            usd(costs.idle_usd),
            usd(costs.storage_usd),
            usd(costs.lost_usd),
            usd(costs.total_usd),
            minutes(costs.best_interval_min),
        )
        best = ' class="best"' if costs.codec == advice.best else ""
        made = (
            f'<td data-title="{escape(title)}">{escape(cell)}</td>'
            for title, cell in zip(titles, cells, strict=True)
        )
        rows += f"<tr{best}>{''.join(made)}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _inputs_text(advice: Advice) -> str:
    cluster, storage = advice.case.cluster, advice.case.storage
    scope = "in all" if storage.scope == "aggregate" else "a node"
    return (
        f"{usd(cluster.usd_per_gpu_hour)} a GPU hour, a failure every {hours(cluster.hours_between_failures)}, "
        f"storage {rate(storage.gb_per_s)} {scope} at ${storage.usd_per_gb_month:g} a {storage.unit}-month, "
        f"{storage.kept:,} checkpoints kept."
    )
