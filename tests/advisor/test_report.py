"""The report without a browser: what is in its plots, and that nothing reaches outside of them."""

import math
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from report_cases import CASES

from thinpoint.advisor import Advice, advise
from thinpoint.advisor.html import report_html
from thinpoint.advisor.plots import bytes_plot, cost_plot, relative_plot, wait_plot
from thinpoint.advisor.svg import WIDTH, LogScale, text_width

PLOTS = (wait_plot, relative_plot, cost_plot, bytes_plot)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=CASES)
def advice(request: pytest.FixtureRequest) -> Advice:
    return advise(CASES[request.param])


def parsed(plot: str) -> tuple[ElementTree.Element, float]:
    """The plot's root and the height of its view box."""
    root = ElementTree.fromstring(plot)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    assert (left, top, width) == (0, 0, WIDTH)
    return root, height


def extents(root: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Every place that an element reaches, widths of texts estimated."""
    for element in root.iter():
        at = {
            key: float(value)
            for key, value in element.attrib.items()
            if re.fullmatch(r"[xy][12]?|c[xy]|r|width|height", key)
        }
        tag = element.tag.removeprefix(SVG)
        if tag == "text":
            width = text_width(element.text or "")
            before = {"start": 0.0, "middle": width / 2, "end": width}[element.attrib["text-anchor"]]
            yield at["x"] - before, at["y"] - 9
            yield at["x"] - before + width, at["y"] + 3
        elif tag == "line":
            yield at["x1"], at["y1"]
            yield at["x2"], at["y2"]
        elif tag == "rect":
            yield at["x"], at["y"]
            yield at["x"] + at["width"], at["y"] + at["height"]
        elif tag == "circle":
            yield at["cx"] - at["r"], at["cy"] - at["r"]
            yield at["cx"] + at["r"], at["cy"] + at["r"]
        elif tag == "polyline":
            for point in element.attrib["points"].split():
                x, y = point.split(",")
                yield float(x), float(y)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_everything_is_within_the_view_box(advice: Advice, plot: object) -> None:
    root, height = parsed(plot(advice))  # type: ignore[operator]
    places = list(extents(root))
    assert len(places) > 10
    for x, y in places:
        assert math.isfinite(x) and math.isfinite(y)
        assert -1 <= x <= WIDTH + 1 and -1 <= y <= height + 1


def series(plot: str) -> set[str]:
    return {
        element.attrib["data-series"] for element in parsed(plot)[0].iter() if "data-series" in element.attrib
    }


def test_every_series_is_drawn(advice: Advice) -> None:
    codecs = {codec.name for codec in advice.case.codecs}
    assert series(wait_plot(advice)) == codecs
    assert "none" in series(relative_plot(advice)) <= codecs
    bars = series(cost_plot(advice))
    mode = advice.case.saves.mode
    assert {f"{name}, {mode}: {part}" for name in codecs for part in ("idle", "storage", "lost work")} <= bars
    parts = {f"{part.label}: {kind}" for part in advice.case.model.parts() for kind in ("raw", "stored")}
    assert series(bytes_plot(advice)) == parts


def test_lines_are_where_the_model_says() -> None:
    advice = advise(CASES["default"])
    root, _ = parsed(wait_plot(advice))
    lines = {
        e.attrib["data-series"]: e.attrib["points"].split() for e in root.iter() if e.tag == f"{SVG}polyline"
    }
    first = {name: float(points[0].split(",")[1]) for name, points in lines.items()}
    # At slow storage the order of the waits is that of the stored bytes; up is smaller.
    order = sorted(first, key=lambda name: first[name])
    assert order == [row.codec for row in sorted(advice.rows, key=lambda row: -row.stored_bytes)]
    assert all(len(points) == 81 for points in lines.values())


def test_a_break_even_point_has_a_ring() -> None:
    advice = advise(CASES["default"])
    rings = [e for e in parsed(wait_plot(advice))[0].iter() if e.tag == f"{SVG}circle"]
    assert len(rings) == sum(edge is not None for edge in advice.break_even.values()) == 2
    assert "nvcomp-zstd: above 595 GB/s a save waits longer with it" in [ring[0].text for ring in rings]


def test_bars_are_as_long_as_their_dollars() -> None:
    advice = advise(CASES["default"])
    widths = {
        e.attrib["data-series"]: float(e.attrib["width"])
        for e in parsed(cost_plot(advice))[0].iter()
        if "data-series" in e.attrib
    }
    none = advice.row("none")
    assert widths["none, sync: idle"] / widths["none, sync: storage"] == pytest.approx(
        none.idle_usd / none.storage_usd, rel=0.01
    )


def test_the_document_needs_nothing_from_outside(advice: Advice) -> None:
    page = report_html(advice)
    outside = re.findall(r'(?:src|href|url|@import)\s*[=(]?\s*["\']?([^"\'>\s)]+)', page)
    assert set(outside) <= {"data:,"}
    assert "<script" not in page and "nan" not in page.lower().replace("nanotron", "") and ">inf" not in page
    assert page.count("<svg ") == 4 and page.count("</svg>") == 4


def test_names_are_text_and_no_markup() -> None:
    page = report_html(advise(CASES["many codecs"]))
    assert "<b>" not in page and "&lt;b&gt;&amp;&quot;" in page


def test_ticks_of_scales() -> None:
    scale = LogScale(low=0.1, high=1000, start=0, end=400)
    assert scale.ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert scale(1) == pytest.approx(100) and scale(0.01) == 0 and scale(1e9) == 400
    assert len(LogScale(low=1e-3, high=1e12, start=0, end=400).ticks()) <= 8
