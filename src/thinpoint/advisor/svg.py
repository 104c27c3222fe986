"""A few SVG elements as text, and axes. Colours are CSS classes, so that a page can be light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 300
"""The view box of a plot: as wide as a small screen, so that text keeps its size there."""

FONT_PX = 12
_CHAR_PX = 7.2
"""The mean width of a character of 12 px in common sans-serif fonts, on the wide side."""


def text_width(text: str) -> float:
    """About how wide a text is, in units of the view box."""
    return len(text) * _CHAR_PX


def text(x: float, y: float, content: str, *, anchor: str = "start", cls: str = "") -> str:
    """A text; y is its baseline."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{_cls(cls)}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{_cls(cls)}/>'


def polyline(points: Iterable[tuple[float, float]], cls: str, *, series: str) -> str:
    """A line through points; `series` names it for readers of the document."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}"{_cls(cls)} data-series="{escape(series)}"><title>{escape(series)}</title></polyline>'


def rect(x: float, y: float, width: float, height: float, cls: str, *, series: str, title: str) -> str:
    """A filled box with a tooltip."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"{_cls(cls)} '
        f'data-series="{escape(series)}"><title>{escape(title)}</title></rect>'
    )


def circle(x: float, y: float, radius: float, cls: str, *, title: str) -> str:
    """A dot with a tooltip."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"{_cls(cls)}><title>{escape(title)}</title></circle>'


def svg(elements: Iterable[str], *, label: str, height: float = HEIGHT) -> str:
    """A whole plot; `label` says what it shows to those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(elements)}</svg>'
    )


def _cls(name: str) -> str:
    return f' class="{name}"' if name else ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to places. Attributes: as for `LogScale`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value; those beyond an end are put there."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class LogScale:
    """Maps values to places, by their logarithms.

    Attributes:
        low, high: values at the ends, above 0.
        start, end: places of the ends.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value; those beyond an end are put there."""
        share = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten within, seven at most."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / 7))
        return [10.0**i for i in range(first, last + 1, step)]


def legend(items: Sequence[tuple[str, str]], *, y: float, swatch: str = "line") -> tuple[list[str], float]:
    """Names with samples of their looks, in as many rows as they need.

    Args:
        items: class and name of each.
        y: of the first row's baseline.
        swatch: "line" or "box".

    Returns:
        The elements and the y of the row below the last.
    """
    elements: list[str] = []
    x = 4.0
    for cls, name in items:
        width = 24 + text_width(name) + 12
        if x + width > WIDTH and x > 4:
            x, y = 4.0, y + 18
        if swatch == "line":
            elements.append(line(x, y - 4, x + 18, y - 4, cls))
        else:
            elements.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" class="{cls}"/>')
        elements.append(text(x + 24, y, name))
        x += width
    return elements, y + 18
