"""A picture as a list of shapes, and the two files it can become: SVG by itself, PNG with Pillow."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from thinpoint.errors import UnsupportedError

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
_SCALE = 2
"""Pixels of a PNG to a unit, after drawing at twice that and shrinking: Pillow's lines have steps."""
_FINER = 2


@dataclass(frozen=True)
class Line:
    """A line through points; colors are "#rrggbb"."""

    points: list[Point]
    color: str
    width: float = 1.5
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """A filled rectangle, or a filled disc."""

    left: float
    top: float
    width: float
    height: float
    color: str
    is_disc: bool = False


@dataclass(frozen=True)
class Text:
    """A line of text; y is its middle."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    size: float = 12
    color: str = "#333333"


Shape = Line | Box | Text


@dataclass
class Picture:
    """Shapes on white, the later ones on top. Units are CSS pixels, y downwards."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Puts them on top."""
        self.shapes += shapes


def svg(picture: Picture, title: str) -> str:
    """An <svg> element, without references to anything outside of it."""
    body = "\n".join(map(_svg_shape, picture.shapes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width:g} {picture.height:g}" '
        f'width="{picture.width:g}" height="{picture.height:g}" role="img" aria-label={quoteattr(title)} '
        f'font-family="system-ui, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>'
    )


def _svg_shape(shape: Shape) -> str:
    match shape:
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            dashes = ' stroke-dasharray="5 4"' if shape.dashed else ""
            return (
                f'<polyline points="{points}" fill="none" stroke="{shape.color}" stroke-width="{shape.width:g}"'
                f' stroke-linejoin="round"{dashes}/>'
            )
        case Box():
            if shape.is_disc:
                radius = shape.width / 2
                return (
                    f'<circle cx="{shape.left + radius:.1f}" cy="{shape.top + radius:.1f}" r="{radius:g}" '
                    f'fill="{shape.color}"/>'
                )
            return (
                f'<rect x="{shape.left:.1f}" y="{shape.top:.1f}" width="{max(shape.width, 0):.1f}" '
                f'height="{max(shape.height, 0):.1f}" fill="{shape.color}"/>'
            )
        case Text():
            return (
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.color}" '
                f'text-anchor="{shape.anchor}" dominant-baseline="central">{escape(shape.text)}</text>'
            )


def png(picture: Picture) -> bytes:
    """The same picture as a PNG file, two pixels to a unit.

    Raises:
        UnsupportedError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise UnsupportedError(
            "PNG files need Pillow, which is not installed",
            hint="pip install pillow; then `thinpoint bench --draw DIR` draws what was measured without measuring again. "
            "The HTML files need nothing",
        ) from error
    unit = _SCALE * _FINER
    image = Image.new("RGB", (round(picture.width * unit), round(picture.height * unit)), "#ffffff")
    draw = ImageDraw.Draw(image)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for shape in picture.shapes:
        match shape:
            case Line():
                points = [(x * unit, y * unit) for x, y in shape.points]
                width = max(1, round(shape.width * unit))
                for piece in _dashes(points, 5 * unit, 4 * unit) if shape.dashed else [points]:
                    draw.line(piece, fill=shape.color, width=width, joint="curve")
            case Box():
                left, top = shape.left * unit, shape.top * unit
                corners = (
                    left,
                    top,
                    left + max(shape.width, 0) * unit - 1,
                    top + max(shape.height, 0) * unit - 1,
                )
                if corners[2] >= left and corners[3] >= top:
                    (draw.ellipse if shape.is_disc else draw.rectangle)(corners, fill=shape.color)
            case Text():
                font = ImageFont.load_default(size=shape.size * unit)
                place = (shape.x * unit, shape.y * unit)
                draw.text(place, shape.text, fill=shape.color, font=font, anchor=anchors[shape.anchor])
    size = (round(picture.width * _SCALE), round(picture.height * _SCALE))
    out = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(out, "PNG", optimize=True)
    return out.getvalue()


def _dashes(points: list[Point], on: float, off: float) -> list[list[Point]]:
    """The pieces of a straight dashed line from the first point to the last."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)

    def at(place: float) -> Point:
        share = min(place / length, 1.0)
        return x0 + share * (x1 - x0), y0 + share * (y1 - y0)

    starts = [i * (on + off) for i in range(int(length / (on + off)) + 1)]
    return [[at(start), at(start + on)] for start in starts]
