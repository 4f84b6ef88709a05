"""Charts: where values land, what their files say, and that nothing breaks them."""

from __future__ import annotations

import csv
import io
import math
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradmerge.report import numbers, palette
from gradmerge.report.charts import BarChart, Chart, HeatMap, LineChart, ScatterChart, Series
from gradmerge.report.page import Table
from gradmerge.text import printable

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<script>alert("x")</script> & \x00 \ud800 '


def every_kind(name: str = "ours", values: tuple[float | None, ...] = (0.5, 0.25, 1.0)) -> list[Chart]:
    xs = list(range(len(values)))
    known = [v for v in values if v is not None][:1]
    series = [Series(name, xs, values, [name] * len(xs))]
    groups = [f"{name} {i}" for i in xs]
    return [
        LineChart(name, "line", name, name, series, [(name, v) for v in known], [(name, 0, v) for v in known]),
        BarChart(name, "bar", name, groups, {name: values, "other": values}),
        BarChart(name, "log-bar", name, groups, {name: values}, log=True),
        HeatMap(name, "heat", groups, [name], [[v] for v in values], name),
        HeatMap(name, "log-heat", groups, [name], [[v] for v in values], name, log=True),
        ScatterChart(name, "scatter", name, name, series, [(v, v) for v in known], diagonal=True),
    ]


def parsed(chart: Chart, narrow: bool = False) -> ET.Element:
    return ET.fromstring(chart.svg(standalone=True, narrow=narrow))


def points(root: ET.Element) -> list[ET.Element]:
    return [child for group in root.iter(f"{SVG}g") if "pts" in group.get("class", "").split() for child in group]


def is_well_formed(chart: Chart) -> None:
    for narrow in (False, True):
        box = parsed(chart, narrow).get("viewBox")
        assert box is not None and all(math.isfinite(float(part)) for part in box.split())
        inline = chart.svg(narrow=narrow)
        ET.fromstring(inline)
        assert not any(f'"{bad}' in inline or f" {bad}" in inline.split("<desc")[0] for bad in ("nan", "inf"))
        for shape in points(parsed(chart, narrow)):
            for key in ("x", "y", "width", "height", "cx", "cy"):
                assert math.isfinite(float(shape.get(key, 0)))


def test_a_value_lands_where_its_ticks_are() -> None:
    chart = LineChart("t", "t", "x", "y", [Series("a", [0, 1, 2], [0.0, 5.0, 10.0])])
    root = parsed(chart)
    labels = [t for t in root.iter(f"{SVG}text") if (t.text or "").replace(".", "").isdigit()]
    across = {float(t.text or 0): float(t.get("x", 0)) for t in labels if "mid" in t.get("class", "")}
    up = {float(t.text or 0): float(t.get("y", 0)) - 4 for t in labels if "end" in t.get("class", "")}
    places = [(float(p.get("cx", 0)), float(p.get("cy", 0))) for p in points(root)]
    for (x, y), value_x, value_y in zip(places, (0, 1, 2), (0, 5, 10), strict=True):
        assert x == pytest.approx(across[value_x], abs=0.11)
        between = up[0] + (up[10] - up[0]) * value_y / 10
        assert y == pytest.approx(between, abs=0.11)
    assert places[0][1] > places[2][1]


def test_bars_are_as_long_as_their_values() -> None:
    chart = BarChart("t", "t", "loss", ["a", "b"], {"m": [1.0, 4.0], "n": [-2.0, 0.0]})
    one, four, minus, zero = points(parsed(chart))
    width = float(one.get("width", 0))
    assert float(four.get("width", 0)) == pytest.approx(4 * width, abs=0.3)
    assert float(minus.get("width", 0)) == pytest.approx(2 * width, abs=0.3)
    assert float(minus.get("x", 0)) + float(minus.get("width", 0)) == pytest.approx(float(one.get("x", 0)), abs=0.2)
    assert float(zero.get("width", 0)) <= 1


def test_bars_of_a_logarithmic_chart_grow_by_the_same_for_each_power_of_ten() -> None:
    chart = BarChart("t", "t", "loss", ["a", "b", "c"], {"m": [1e-3, 1e-2, 1e-1]}, log=True)
    widths = [float(p.get("width", 0)) for p in points(parsed(chart))]
    assert widths[2] - widths[1] == pytest.approx(widths[1] - widths[0], abs=0.3)
    assert widths[0] > 0


def test_cells_go_from_dark_to_light() -> None:
    chart = HeatMap("t", "t", ["r"], ["a", "b", "c", "d"], [[1.0, 10.0, 100.0, None]], "mismatch", log=True)
    *cells, hole = points(parsed(chart))
    fills = [cell.get("fill", "") for cell in cells]
    assert fills == [palette.shade(0), palette.shade(0.5), palette.shade(1)]
    assert [palette.luminance(f) for f in fills] == sorted(palette.luminance(f) for f in fills)
    assert hole.get("fill") is None and hole.get("class") == "hole"


def test_a_missing_value_breaks_the_curve() -> None:
    chart = LineChart("t", "t", "x", "y", [Series("a", range(5), [1.0, 2.0, None, 4.0, math.nan])])
    root = parsed(chart)
    curve = next(p for p in root.iter(f"{SVG}path") if p.get("class") == "curve" and p.get("d") != "M0 0h24")
    assert curve.get("d", "").count("M") == 2
    assert len(points(root)) == 3


@pytest.mark.parametrize("chart", every_kind(), ids=lambda chart: chart.slug)
def test_a_chart_says_what_it_is(chart: Chart) -> None:
    root = parsed(chart)
    title, description = root[0], root[1]
    assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert title.text == "ours" and "ours" in (description.text or "")
    assert "var(" not in chart.svg(standalone=True)
    for shape in points(root):
        assert shape[0].text and "\n" in shape[0].text


@pytest.mark.parametrize("chart", every_kind(), ids=lambda chart: chart.slug)
def test_the_same_chart_gives_the_same_bytes(chart: Chart) -> None:
    again = next(other for other in every_kind() if other.slug == chart.slug)
    for standalone in (True, False):
        assert chart.svg(standalone) == again.svg(standalone)


@pytest.mark.parametrize("chart", every_kind(), ids=lambda chart: chart.slug)
def test_wide_and_narrow_drawings_have_the_same_points(chart: Chart) -> None:
    wide, narrow = points(parsed(chart)), points(parsed(chart, narrow=True))
    assert [p[0].text for p in wide] == [p[0].text for p in narrow] != []


@pytest.mark.parametrize("chart", every_kind(NASTY), ids=lambda chart: chart.slug)
def test_names_cannot_become_markup(chart: Chart) -> None:
    is_well_formed(chart)
    assert not list(parsed(chart).iter(f"{SVG}script"))


ODD = (None, math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.0, -3.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(ODD) | st.floats(), max_size=4))
def test_no_number_breaks_a_chart(values: list[float | None]) -> None:
    for chart in every_kind("a", tuple(values)):
        is_well_formed(chart)
        chart.csv()


@pytest.mark.parametrize("groups", [0, 1, 2, 12])
@pytest.mark.parametrize("series", [0, 1, 12])
def test_charts_of_any_size_are_drawn(groups: int, series: int) -> None:
    names = [f"task with a long name {i}" for i in range(groups)]
    values = {f"method {s}": [0.1 * (s + g) for g in range(groups)] for s in range(series)}
    curves = [Series(name, range(groups), ys) for name, ys in values.items()]
    is_well_formed(BarChart("t", "t", "y", names, values))
    is_well_formed(LineChart("t", "t", "x", "y", curves))
    is_well_formed(ScatterChart("t", "t", "x", "y", curves))
    is_well_formed(HeatMap("t", "t", names, list(values), [[1.0] * series] * groups, "v"))


def test_a_csv_gives_back_the_numbers() -> None:
    values = (1 / 3, None, 1e-300, math.inf, np.float64(0.1))
    for chart in every_kind('a, "b"\n', values):
        rows = list(csv.reader(io.StringIO(chart.csv())))
        if isinstance(chart, BarChart | HeatMap):
            texts = [row[-1] for row in rows[1 : len(values) + 1]]
        else:
            texts = [row[3] for row in rows[1:] if row[0] == "point"]
        assert [float(t) if t else None for t in texts] == list(values)
        assert all(len(row) == len(rows[0]) for row in rows)


def test_many_layers_get_few_labels_and_one_drawing() -> None:
    names = [f"model.layers.{i}" for i in range(200)]
    chart = HeatMap("t", "t", names, list("abcdefgh"), [[float(i + j) for j in range(8)] for i in range(200)], "v")
    labels = [t for t in parsed(chart).iter(f"{SVG}text") if "model" in "".join(t.itertext())]
    heights = [float(t.get("y", 0)) for t in labels]
    assert chart.one_size and 40 <= len(labels) <= 100
    assert min(b - a for a, b in pairwise(heights)) >= 12


def test_series_differ_without_colour() -> None:
    looks = [(palette.dash(i), palette.marker(i)) for i in range(12)]
    assert len(set(looks)) == 12
    bars = [(palette.series_class(i), palette.hatch(i)) for i in range(12)]
    assert len(set(bars)) == 12 and len({h for _, h in bars[:6]}) == 6


def contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG defines it, 1 to 21."""
    low, high = sorted((palette.luminance(one), palette.luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_colours_can_be_seen(colours: dict[str, str]) -> None:
    assert colours.keys() == palette.LIGHT.keys()
    for i in range(palette.COLOURS):
        assert contrast(colours[f"c{i}"], colours["paper"]) >= 3
    for ground in ("page", "paper", "wash", "hole"):
        assert contrast(colours["ink"], colours[ground]) >= 7
        assert contrast(colours["soft"], colours[ground]) >= 4.5
    assert contrast(colours["accent"], colours["page"]) >= 4.5


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_colours_differ_for_the_colour_blind(colours: dict[str, str]) -> None:
    # Machado et al. 2009, severity 1, on linear RGB.
    deutan = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
    protan = np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    )
    for seen in (np.eye(3), deutan, protan):
        labs = [lab(seen @ linear(colours[f"c{i}"])) for i in range(palette.COLOURS)]
        assert min(float(np.linalg.norm(a - b)) for a, b in combinations(labs, 2)) > 12


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (-0.0, "0"),
        (1 / 3, "0.3333"),
        (99.996, "100"),
        (1234.5678, "1,235"),
        (1234567, "1,234,567"),
        (-2.5, "−2.5"),
        (12345678.9, "1.235e7"),
        (1.5e-7, "1.5e−7"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (True, "yes"),
    ],
)
def test_numbers_have_four_digits(value: float | None, shown: str) -> None:
    assert numbers.number(value) == shown


def test_numbers_of_a_column_have_the_same_decimals() -> None:
    assert numbers.column([0.5, 1.0, 0.25, None]) == ["0.50", "1.00", "0.25", "–"]
    assert numbers.column([0.43121, 0.5, 12.3, 3]) == ["0.4312", "0.5000", "12.30", "3"]
    assert numbers.column([]) == []


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_round(low: float, length: float) -> None:
    found = numbers.ticks(low, low + length)
    assert len(found) <= 7
    for tick in found:
        assert low - 1e-6 * length <= tick <= low + length * (1 + 1e-6) or math.isclose(tick, low, rel_tol=1e-9)
    step = numbers.tick_step(low, low + length)
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


def test_long_names_lose_their_middle() -> None:
    assert numbers.shorten("model.layers.10.self_attn", 11) == "model…_attn"
    assert numbers.shorten("short", 11) == "short"
    chart = BarChart("t", "t", "y", ["a" * 40 + "b" * 40], {"m": [1.0]})
    label = next(t for t in parsed(chart).iter(f"{SVG}text") if t.find(f"{SVG}title") is not None)
    assert label[0].text == "a" * 40 + "b" * 40 and "…" in (label[0].tail or "")


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1", "\n=1"])
def test_no_name_becomes_a_formula_in_a_spreadsheet(name: str) -> None:
    for chart in every_kind(name):
        for row in csv.reader(io.StringIO(chart.csv())):
            assert not any(cell.startswith(tuple("=+@\t\r\n＝")) for cell in row), row
            assert not any(cell.startswith("-") for cell in row), row
    table = Table(name, "t", [name, "x"], [[name, -0.5], ["-0.5", 2.0]])
    assert list(csv.reader(io.StringIO(table.csv())))[1][1] == "-0.5"
    assert list(csv.reader(io.StringIO(table.csv())))[2] == ["-0.5", "2.0"]


def test_controls_in_names_are_shown_in_a_chart() -> None:
    for chart in every_kind("a\x1b[31m\u202e\x9b\u2028b\udce9"):
        for text in (chart.svg(), chart.svg(standalone=True), chart.csv()):
            assert printable(text) == text and "\\x1b" in text and "\\udce9" in text
        ET.fromstring(chart.svg(standalone=True))
