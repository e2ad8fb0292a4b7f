"""Reports: one file that needs no other, whatever its text is."""

import re
import sys

import pytest

from bireme.sizing import chart
from bireme.sizing.pareto import OperatingPoint
from bireme.sizing.report import Page, Section, Table, render

PANEL = chart.FrontPanel(
    "64/16", {"aggregated": [OperatingPoint(10, 100, "a"), OperatingPoint(5, 50, "b")], "disaggregated": []}
)


def test_a_page_escapes_what_it_is_given():
    table = Table("<caption>", ["<b>"], [["1 < 2 & 3"]])
    html = render(Page("<title>", ["<script>alert(1)</script>"], [Section("<h>", ["a & b"], tables=[table])]))
    assert "<script>" not in html and "<b>" not in html
    assert "1 &lt; 2 &amp; 3" in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_a_page_with_a_picture_loads_nothing():
    picture = chart.svg(chart.draw_fronts([[PANEL]], "GPU"))
    html = render(Page("t", [], [Section("s", picture=picture, picture_says="fronts")]))
    assert picture.startswith("<svg") and picture in html
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*|url\((?!#)[^)]*""", html) == []
    assert 'aria-label="fronts"' in html


def test_a_table_without_rows_is_not_shown():
    assert "<table>" not in render(Page("t", [], [Section("s", tables=[Table("c", ["a"], [])])]))


def test_a_picture_of_several_lengths_and_loads_is_a_png(tmp_path):
    chart.write_png(chart.draw_fronts([[PANEL, PANEL], [PANEL]], "GPU"), tmp_path / "fronts.png")
    assert (tmp_path / "fronts.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_points_lie_within_the_axes_and_on_no_other():
    crowd = [OperatingPoint(10 + at / 10, 100 - at, f"what runs here, {at} under way") for at in range(8)]
    figure = chart.draw_fronts([[chart.FrontPanel("64/16", {"aggregated": crowd})]], "GPU")
    (axis,) = figure.axes
    boxes = [name.get_window_extent() for name in axis.texts]
    assert boxes and all(axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 for box in boxes)
    assert not any(box.overlaps(other) for at, box in enumerate(boxes) for other in boxes[:at])
    assert not any(axis.get_legend().get_window_extent().overlaps(box) for box in (axis.bbox, *boxes))


def test_without_matplotlib_there_is_a_reason_instead_of_a_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(chart.NoPictureError, match="pip install matplotlib"):
        chart.draw_fronts([[PANEL]], "GPU")
