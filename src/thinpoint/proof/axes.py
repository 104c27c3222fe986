"""A rectangle with two axes, and what is drawn in it by its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinpoint.proof.picture import Box, Line, Picture, Point, Text

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by color-blind people too (Okabe and Ito 2008)."""
GREY, LIGHT = "#666666", "#e4e4e4"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values on so many units of a picture.

    Attributes:
        low, high: of the values; above 0 if `is_log`.
        is_log: equal ratios are equally long.
    """

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`; cut off at both."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = self.high / self.low > 300
            found = [factor * 10.0**power for power in powers for factor in ((1,) if wide else (1, 2, 5))]
            return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def linear(values: Sequence[float], *, from_zero: bool = True) -> Axis:
    """An axis that has room for the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(0.0, low) if from_zero else low - 0.05 * (high - low)
    room = 0.06 * ((high - low) or 1.0)
    return Axis(low=low - (room if low < 0 else 0), high=high + room)


def logarithmic(values: Sequence[float]) -> Axis:
    """An axis that has room for the values, which are above 0."""
    return Axis(low=min(values) / 1.3, high=max(values) * 1.3, is_log=True)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes in a picture.

    Attributes:
        left, top, width, height: of the rectangle between the axes.
        x, y: y upwards.
    """

    picture: Picture
    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def place(self, x: float, y: float) -> Point:
        """Where in the picture the values lie."""
        return self.left + self.width * self.x.share(x), self.top + self.height * (1 - self.y.share(y))

    def frame(self, title: str, x_label: str, y_label: str, *, x_ticks: bool = True) -> None:
        """Title, labels, ticks and lines behind what follows."""
        bottom, right = self.top + self.height, self.left + self.width
        self.picture.add(Text(self.left, self.top - 28, title, size=14, color="#111111"))
        self.picture.add(Text(self.left, self.top - 11, y_label, size=11, color=GREY))
        for value in self.y.ticks():
            y = self.place(self.x.low, value)[1]
            self.picture.add(Line([(self.left, y), (right, y)], LIGHT, 1))
            self.picture.add(Text(self.left - 6, y, tick_text(value), "end", 11, GREY))
        if x_ticks:
            for value in self.x.ticks():
                x = self.place(value, self.y.low)[0]
                self.picture.add(Line([(x, bottom), (x, bottom + 4)], GREY, 1))
                self.picture.add(Text(x, bottom + 14, tick_text(value), "middle", 11, GREY))
        self.picture.add(Line([(self.left, bottom), (right, bottom)], GREY, 1))
        self.picture.add(Text((self.left + right) / 2, bottom + 32, x_label, "middle", 11, GREY))

    def line(self, points: Sequence[Point], color: str, width: float = 1.5) -> None:
        """A line through values."""
        if points:
            self.picture.add(Line([self.place(*point) for point in points], color, width))

    def level(self, y: float, color: str = GREY) -> None:
        """A dashed line at one value."""
        self.picture.add(Line([self.place(self.x.low, y), self.place(self.x.high, y)], color, 1.2, True))

    def upright(self, x: float, color: str = GREY) -> None:
        """A thin line upwards at one value."""
        self.picture.add(Line([self.place(x, self.y.low), self.place(x, self.y.high)], color, 0.8))

    def dot(self, x: float, y: float, color: str, radius: float = 4) -> None:
        """A disc at a value."""
        across, down = self.place(x, y)
        self.picture.add(Box(across - radius, down - radius, 2 * radius, 2 * radius, color, True))


def tick_text(value: float) -> str:
    """A round number as short as it can be."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.4g}"


def legend(picture: Picture, left: float, top: float, entries: Sequence[tuple[str, str]]) -> None:
    """(color, text) one below the other."""
    for i, (color, text) in enumerate(entries):
        y = top + 18 * i
        picture.add(Box(left, y - 5, 10, 10, color), Text(left + 16, y, text, size=12))
