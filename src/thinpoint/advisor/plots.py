"""The plots of the report: wait against storage, dollars by part, where the bytes are."""

from __future__ import annotations

import math

from thinpoint.advisor.advice import Advice
from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.costs import Costs, at_storage_rate, times_of
from thinpoint.advisor.svg import (
    HEIGHT,
    WIDTH,
    LogScale,
    Scale,
    circle,
    legend,
    line,
    polyline,
    rect,
    svg,
    text,
    text_width,
)
from thinpoint.advisor.words import rate, size, usd

NUM_POINTS = 81
NUM_LOOKS = 6
"""Colours and dashes of series: c0 to c5."""

_LEFT, _RIGHT, _BOTTOM = 52.0, 16.0, 42.0
_BAR_PX, _ROW_PX = 18.0, 44.0
_LEAST_WAIT_S = 1e-3
_PARTS = (("idle", "idle_usd"), ("storage", "storage_usd"), ("lost work", "lost_usd"))


def look(i: int) -> str:
    """The class of a series."""
    return f"c{i % NUM_LOOKS}"


def short(name: str, width: float) -> str:
    """A name that fits; its end is cut off."""
    most = max(int(width / text_width("x")), 2)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def wait_plot(advice: Advice) -> str:
    """Seconds that a save waits, against the rate of storage, a line for each codec, and where each begins to cost time."""
    case, curves = advice.case, _curves(advice)
    waits = [max(wait, _LEAST_WAIT_S) for points in curves.values() for _, wait in points]
    low, high = (
        10.0 ** round_(math.log10(edge))
        for round_, edge in ((math.floor, min(waits)), (math.ceil, max(waits) * 1.0001))
    )
    elements, top = _legend(advice)
    x, y = _storage_scale(curves), LogScale(low=low, high=high, start=HEIGHT - _BOTTOM, end=top)
    elements += _storage_axis(advice, x, y)
    for tick in y.ticks():
        elements += [
            line(x.start, y(tick), x.end, y(tick), "grid"),
            text(x.start - 6, y(tick) + 4, _tick(tick), anchor="end"),
        ]
    for i, (name, points) in enumerate(curves.items()):
        elements.append(polyline(((x(at), y(wait)) for at, wait in points), f"{look(i)} series", series=name))
    for i, codec in enumerate(case.codecs):
        edge = advice.break_even.get(codec.name)
        if edge is not None:
            wait = times_of(at_storage_rate(case, edge), codec).wait_s
            elements.append(_ring(x(edge), y(wait), i, codec.name, edge))
    return svg(elements, label="Seconds that a save waits against the rate of storage, by codec")


def relative_plot(advice: Advice) -> str:
    """The same waits as parts of that without a codec: below 100 % a codec saves time."""
    curves = _curves(advice)
    raw = dict(curves[NONE.name])
    parts = {
        name: [(at, wait / raw[at] if raw[at] else 1.0) for at, wait in points if raw[at] or not wait]
        for name, points in curves.items()
    }
    highest = max((part for points in parts.values() for _, part in points), default=1.0)
    high = next((top for top in (1.25, 1.5, 2.0) if highest <= top), 2.5)
    elements, top = _legend(advice)
    x, y = _storage_scale(curves), Scale(low=0.0, high=high, start=HEIGHT - _BOTTOM, end=top)
    elements += _storage_axis(advice, x, y)
    for percents in range(0, int(high * 100) + 1, 25 if high <= 1.5 else 50):
        at = y(percents / 100)
        elements += [
            line(x.start, at, x.end, at, "grid"),
            text(x.start - 6, at + 4, f"{percents} %", anchor="end"),
        ]
    for i, (name, points) in enumerate(parts.items()):
        shown = [(x(at), y(part)) for at, part in points if part <= high]
        if shown:
            elements.append(polyline(shown, f"{look(i)} series", series=name))
        edge = advice.break_even.get(name)
        if edge is not None:
            elements.append(_ring(x(edge), y(1.0), i, name, edge))
    return svg(
        elements, label="Wait of a save as a part of that without a codec, against the rate of storage"
    )


def _curves(advice: Advice) -> dict[str, list[tuple[float, float]]]:
    """For each codec (storage in GB/s, seconds of wait), over all rates that matter."""
    case = advice.case
    here = case.storage.gb_per_s
    edges = [edge for edge in advice.break_even.values() if edge is not None]
    low = 10.0 ** math.floor(math.log10(min(1.0, here / 2, *edges)))
    high = 10.0 ** math.ceil(math.log10(max(100.0, here * 2, *(edge * 2 for edge in edges))))
    rates = [low * (high / low) ** (i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    return {
        codec.name: [(at, times_of(at_storage_rate(case, at), codec).wait_s) for at in rates]
        for codec in case.codecs
    }


def _legend(advice: Advice) -> tuple[list[str], float]:
    names = [codec.name for codec in advice.case.codecs]
    return legend([(f"{look(i)} series", short(name, 180)) for i, name in enumerate(names)], y=14)


def _storage_scale(curves: dict[str, list[tuple[float, float]]]) -> LogScale:
    points = curves[NONE.name]
    return LogScale(low=points[0][0], high=points[-1][0], start=_LEFT, end=WIDTH - _RIGHT)


def _storage_axis(advice: Advice, x: LogScale, y: Scale | LogScale) -> list[str]:
    """Ticks of the rate of storage, and where the case is."""
    case = advice.case
    here = case.storage.gb_per_s
    elements = []
    for tick in x.ticks():
        elements += [
            line(x(tick), y.end, x(tick), y.start, "grid"),
            text(x(tick), y.start + 16, _tick(tick), anchor="middle"),
        ]
    scope = "" if case.storage.scope == "aggregate" else " a node"
    elements.append(
        text((x.start + x.end) / 2, HEIGHT - 6, f"storage, GB/s{scope}", anchor="middle", cls="dim")
    )
    elements.append(line(x(here), y.end, x(here), y.start, "here"))
    beside, anchor = (x(here) + 4, "start") if x(here) < WIDTH / 2 else (x(here) - 4, "end")
    elements.append(text(beside, y.start - 6, f"here: {rate(here)}", anchor=anchor, cls="dim"))
    return elements


def _ring(x: float, y: float, i: int, name: str, edge: float) -> str:
    return circle(x, y, 5, f"{look(i)} edge", title=f"{name}: above {rate(edge)} a save waits longer with it")


def _tick(value: float) -> str:
    for least, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= least:
            return f"{value / least:g}{unit}"
    return f"{value:g}"


def cost_plot(advice: Advice) -> str:
    """Dollars a month by part, a bar for each codec and, where saves wait, for none in the background."""
    rows: list[tuple[str, Costs]] = [(f"{costs.codec}, {costs.mode}", costs) for costs in advice.rows]
    if advice.case.saves.mode == "sync":
        rows += [
            (f"{name}, async", advice.row(name, "async")) for name in dict.fromkeys((NONE.name, advice.best))
        ]
    elements, top = legend([(f"p{i}", name) for i, (name, _) in enumerate(_PARTS)], y=14, swatch="box")
    most = max(costs.total_usd for _, costs in rows) or 1.0
    room = WIDTH - _RIGHT - 4 - max(text_width(usd(costs.total_usd)) for _, costs in rows) - 6
    y = top
    for name, costs in rows:
        cls = "strong" if costs.codec == advice.best and costs.mode == advice.case.saves.mode else ""
        elements.append(text(4, y + 10, short(name, WIDTH - 8), cls=cls))
        x = 4.0
        for i, (part, field) in enumerate(_PARTS):
            dollars = getattr(costs, field)
            width = room * dollars / most
            elements.append(
                rect(
                    x,
                    y + 15,
                    width,
                    _BAR_PX,
                    f"p{i}",
                    series=f"{name}: {part}",
                    title=f"{name}: {part} {usd(dollars)}",
                )
            )
            x += width
        elements.append(text(x + 6, y + 29, usd(costs.total_usd), cls=cls))
        y += _ROW_PX
    return svg(elements, label="Dollars a month by part, for each codec", height=y + 4)


def bytes_plot(advice: Advice) -> str:
    """Bytes of each component, raw behind and as the recommended codec stores it in front."""
    case = advice.case
    name = (
        advice.best
        if advice.best != NONE.name
        else min(advice.rows, key=lambda costs: costs.stored_bytes).codec
    )
    codec = case.codec(name)
    parts = case.model.parts()
    elements, top = legend(
        [("raw", "raw"), ("stored", f"stored with {short(name, 150)}")], y=14, swatch="box"
    )
    most = max(part.raw_bytes for part in parts)
    y = top
    for part in parts:
        ratio = codec.ratio_of(part)
        stored = part.raw_bytes / ratio
        label = f"{part.label}: {size(part.raw_bytes)} → {size(stored)} ({ratio:.2f}x)"
        elements.append(text(4, y + 10, short(label, WIDTH - 8)))
        room = WIDTH - 8
        elements.append(
            rect(
                4,
                y + 15,
                room * part.raw_bytes / most,
                _BAR_PX,
                "raw",
                series=f"{part.label}: raw",
                title=label,
            )
        )
        elements.append(
            rect(
                4,
                y + 15,
                room * stored / most,
                _BAR_PX,
                "stored",
                series=f"{part.label}: stored",
                title=label,
            )
        )
        y += _ROW_PX
    return svg(elements, label="Bytes of each component, raw and stored", height=y + 4)
