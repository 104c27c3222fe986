"""Records as tables, pages, pictures and comparisons."""

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proof_records import ALL, record, restore_record, resume_record, step_record

from thinpoint.errors import MalformedFileError, NotFoundError, UnsupportedError, UsageError
from thinpoint.proof.axes import Axis, tick_text
from thinpoint.proof.compare import compare
from thinpoint.proof.page import BEGIN, END, html, markdown, put_into
from thinpoint.proof.picture import png, svg
from thinpoint.proof.plots import plot_of
from thinpoint.proof.record import Deadline, read_record, write_record
from thinpoint.proof.tables import tables_of, three_digits


@pytest.mark.parametrize("make", ALL)
def test_every_row_of_a_table_has_a_cell_for_each_heading(make: Callable[[], dict[str, Any]]) -> None:
    tables = tables_of(make())
    assert tables
    for table in tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.headings)}


def test_a_step_table_tells_costs_and_reasons() -> None:
    (table,) = tables_of(step_record(cost_s=0.01))
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["thinpoint.async_save"][0] == "20.0 (10.0 to 30.0)"
    assert cells["thinpoint.async_save"][5:7] == ["0.0022", "2.00"]
    assert cells["dcp.async_save"][0] == "not available"
    assert cells["torch.save"][0] == "failed"
    text = "\n".join(table.notes)
    assert "idle for 3.0 % of the time" in text
    assert "torch.save: failed: OSError: full." in text
    assert "fell back" in text
    assert "waits (stall and held) for 20 % of the stall without" in text


def test_a_restore_table_counts_where_the_target_is_met() -> None:
    (table,) = tables_of(restore_record())
    assert table.rows[0][-1] == "0.800 (0.800 to 0.800)"
    assert table.rows[1][0] == "ext4, cold"
    assert "failed" in table.rows[1]
    assert "At most 1.00 x the uncompressed restore: at 2 of 2 kinds of storage." in table.notes


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("identical", "so does the one that was killed"),
        ("different", "DIFFERS"),
        ("inconclusive", "nothing is shown"),
    ],
)
def test_a_resume_table_says_what_the_verdict_means(verdict: str, words: str) -> None:
    (table,) = tables_of(resume_record(verdict))
    assert table.headings == ["", verdict]
    assert words in table.notes[0]


def test_what_was_left_out_is_named_even_if_nothing_was_measured() -> None:
    late = {**record("step", {}), "skipped": ["step time, full load"]}
    (table,) = tables_of(late)
    assert table.notes == ["Left out for lack of time: step time, full load."]
    assert "Left out" in html(late)


@pytest.mark.parametrize("make", ALL)
def test_a_page_refers_to_nothing_outside_of_it(make: Callable[[], dict[str, Any]]) -> None:
    page = html(make())
    assert not re.search(r"(src|href)=", page)
    assert re.findall(r"https?://[^\"]+", page) in ([], ["http://www.w3.org/2000/svg"])
    assert "<script" not in page


def test_text_of_a_record_cannot_become_markup() -> None:
    assert "a &lt;reason&gt;" in html(step_record())


def test_pictures_are_well_formed_and_keep_within_their_borders() -> None:
    for made in (step_record(), restore_record(), resume_record()):
        picture = plot_of(made)
        assert picture is not None
        root = ET.fromstring(svg(picture, 'a "title" & more'))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        places = [
            tuple(map(float, point.split(",")))
            for line in root.iter("{http://www.w3.org/2000/svg}polyline")
            for point in line.attrib["points"].split()
        ]
        places += [
            (float(text.attrib["x"]), float(text.attrib["y"]))
            for text in root.iter("{http://www.w3.org/2000/svg}text")
        ]
        assert len(places) > 20
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_a_record_without_figures_has_no_picture() -> None:
    for piece in ("rates", "step", "restore", "resume"):
        assert plot_of(record(piece, {})) is None


def test_a_png_has_two_pixels_to_a_unit() -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    picture = plot_of(resume_record())
    assert picture is not None
    data = png(picture)
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 2 * picture.width


def test_without_pillow_a_png_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    picture = plot_of(resume_record())
    assert picture is not None
    with pytest.raises(UnsupportedError, match="pip install pillow"):
        png(picture)


@pytest.mark.parametrize(
    ("low", "high", "is_log"),
    [(0.0, 1.0, False), (-3.0, 250.0, False), (0.001, 0.5, True), (8.0, 12.0, True), (1.0, 1e6, True)],
)
def test_ticks_are_few_and_lie_on_the_axis(low: float, high: float, is_log: bool) -> None:
    ticks = Axis(low=low, high=high, is_log=is_log).ticks()
    assert 1 <= len(ticks) <= 12
    assert all(low * 0.99 - 1e-9 <= tick <= high * 1.01 for tick in ticks)
    assert len({tick_text(tick) for tick in ticks}) == len(ticks)


def test_three_digits_count() -> None:
    values = [1234.5, 99.96, 12.345, 9.996, 1.2345, 0.12345, -45.67]
    assert [*map(three_digits, values)] == ["1,234", "100", "12.3", "10.0", "1.23", "0.123", "-45.7"]


def test_markdown_puts_figures_between_the_marks_and_can_do_it_again() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = put_into(page, markdown([step_record(), resume_record()]))
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert "| thinpoint.async_save | 20.0 (10.0 to 30.0) |" in once
    assert put_into(once, markdown([step_record(), resume_record()])) == once


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(UsageError, match="once each"):
        put_into(page, "text")


def test_a_comparison_shows_ratios_and_what_differs_in_the_set_up() -> None:
    a, b = step_record(0.01), step_record(0.03)
    b["options"] = {**b["options"], "scale": "134m"}
    set_up, figures = compare(a, b)
    assert ["options.scale", "tiny", "134m"] in set_up.rows
    costs = {row[0]: row[1:] for row in figures.rows}
    assert costs["full load, thinpoint.async_save: cost, ms"] == ["20.0", "60.0", "3.000"]


def test_a_figure_of_one_side_only_has_no_ratio() -> None:
    a, b = restore_record(), restore_record()
    del b["result"]["rows"][0]["ways"][0]["seconds"]
    figures = {row[0]: row[1:] for row in compare(a, b)[1].rows}
    assert figures["1 GB/s, thinpoint: ms"] == ["80.0", "-", "-"]


def test_equal_set_ups_are_said_to_be_equal() -> None:
    assert compare(resume_record(), resume_record())[0].notes == ["Nothing but the moment."]


def test_results_of_different_pieces_are_not_compared() -> None:
    with pytest.raises(UsageError, match="different pieces"):
        compare(step_record(), resume_record())


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = step_record()
    write_record(tmp_path / "new" / "step.json", made)
    assert read_record(tmp_path / "new" / "step.json") == made
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step.json"]


def test_other_files_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_record(tmp_path / "none.json")
    for text in (b"{", b"[]", b'{"format": "thinpoint-ls"}', b"\xff\xfe"):
        (tmp_path / "other.json").write_bytes(text)
        with pytest.raises(MalformedFileError, match="no result"):
            read_record(tmp_path / "other.json")
    (tmp_path / "other.json").write_text('{"format": "thinpoint-bench", "version": 99}')
    with pytest.raises(UsageError, match="another version"):
        read_record(tmp_path / "other.json")


def test_a_deadline_remembers_what_was_left_out() -> None:
    assert not Deadline(None).is_late("a")
    deadline = Deadline(0)
    assert deadline.is_late("a")
    assert deadline.is_late("b")
    assert deadline.take_skipped() == ["a", "b"]
    assert deadline.take_skipped() == []
