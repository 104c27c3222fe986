"""The report as headless Chromium shows it. Skipped where there is no playwright or no browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import CASES

from thinpoint.advisor import advise
from thinpoint.advisor.html import report_html

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
)

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)

CHECK_PLOTS = """() => [...document.querySelectorAll('svg')].map(svg => {
    const frame = svg.getBoundingClientRect();
    const outside = [...svg.querySelectorAll('text,rect,line,polyline,circle')].filter(element => {
        const box = element.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1
            || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    }).map(element => element.outerHTML);
    const texts = [...svg.querySelectorAll('text')];
    const overlapping = texts.filter((one, i) => texts.slice(i + 1).some(two => {
        const a = one.getBoundingClientRect(), b = two.getBoundingClientRect();
        return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4;
    })).map(element => element.textContent);
    const drawn = [...svg.querySelectorAll('[data-series]')].filter(element => {
        const style = getComputedStyle(element);
        return (style.stroke !== 'none' || style.fill !== 'none') && style.visibility === 'visible';
    }).length;
    return {width: frame.width, height: frame.height, outside, overlapping, drawn,
        font: Math.min(...texts.map(element => element.getBoundingClientRect().height))};
})"""

CHECK_PAGE = """() => [...document.querySelectorAll('body *:not(svg *)')].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.left < -1 || box.right > innerWidth + 1 || element.scrollWidth > element.clientWidth + 1
        && getComputedStyle(element).display !== 'inline');
}).map(element => element.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    with sync_api.sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(
                f"there is no Chromium here: none of {', '.join(BROWSERS)}, and none of playwright's own"
            )
        opened = playwright.chromium.launch(executable_path=path)
        yield opened
        opened.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("width", "scheme"), [(400, "light"), (400, "dark"), (1280, "light"), (1280, "dark")]
)
def test_every_plot_is_drawn_and_nothing_is_cut_off(
    browser: Any, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    (tmp_path / "report.html").write_text(report_html(advise(CASES[name])))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    plots, cut = page.evaluate(CHECK_PLOTS), page.evaluate(CHECK_PAGE)
    colors = page.evaluate("() => ['background-color', 'color'].map(n => getComputedStyle(document.body)[n])")
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    page.close()
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in requests) and len(requests) <= 2
    assert len(plots) == 4 and wide <= width and cut == []
    for plot in plots:
        assert plot["outside"] == [] and plot["overlapping"] == []
        assert plot["width"] > 300 and plot["height"] > 60 and plot["drawn"] >= 1
        assert plot["font"] >= 9
    assert colors == (
        ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
        if scheme == "light"
        else ["rgb(20, 24, 29)", "rgb(230, 234, 239)"]
    )
