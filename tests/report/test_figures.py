"""Figures: what is in them, what their files say, and that nothing breaks them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradmerge.report import theme
from gradmerge.report.comparison import pareto_front
from gradmerge.report.figures import Series, bars, curves, heat_map, trade_off
from gradmerge.report.page import Figure, number
from gradmerge.rules import METHODS
from gradmerge.text import Measured, printable

NASTY = '</script><script>alert("x")</script> & \x00 \ud800 \x1b[31m\u202e\x9b\u2028b\udce9'


def every_kind(name: str = "ours", values: tuple[float | None, ...] = (0.5, 0.25, 1.0)) -> list[Figure]:
    xs = [float(i) for i in range(len(values))]
    known = [v for v in values if v is not None][:1]
    series = [Series(name, xs, values, [name] * len(xs))]
    groups = [f"{name} {i}" for i in range(len(values))]
    marks, stars, front = [(name, v) for v in known], [(name, 0, v) for v in known], [(v, v) for v in known]
    charts = {
        "line": curves(series, name, name, marks=marks, stars=stars),
        "bar": bars(groups, {name: values, "other": values}, name),
        "heat": heat_map(groups, [name], [[v] for v in values], name),
        "scatter": trade_off(series, name, name, front=front, present=front[0] if front else None),
    }
    return [Figure(name, slug, chart) for slug, chart in charts.items()]


def rows_of(figure: Figure) -> Any:
    return figure.chart.data.values


def test_a_figure_holds_the_numbers_it_is_given() -> None:
    line = Figure("t", "t", curves([Series("a", [0, 1], [2.0, None], ["p", "q"])], "λ", "loss, nats"))
    assert line.table().columns == ["series", "λ", "loss, nats", "note"]
    assert line.table().rows == [["a", 0.0, 2.0, "p"], ["a", 1.0, None, "q"]]
    marked = curves([Series("a", [0], [2.0])], "x", "y", marks=[("base", 0.5)], stars=[("a", 0, 2.0)])
    also = [["base", None, 0.5, "reference"], ["a", 0.0, 2.0, "★ best"]]
    assert Figure("t", "t", marked).table().rows == [["a", 0.0, 2.0, None], *also]
    bar = Figure("t", "t", bars(["x", "y"], {"m": [1.0, 4.0], "n": [-2.0, None]}, "loss"))
    assert bar.table().rows == [["x", "m", 1.0], ["y", "m", 4.0], ["x", "n", -2.0], ["y", "n", None]]
    heat = Figure("t", "t", heat_map(["r", "s"], ["a", "b"], [[1.0, 10.0], [None, 3.0]], "v"))
    assert heat.table().rows == [["r", "a", 1.0], ["r", "b", 10.0], ["s", "a", None], ["s", "b", 3.0]]


def test_errors_that_are_known_are_drawn_and_listed() -> None:
    figure = Figure("t", "t", curves([Series("a", [0, 1], [Measured(0.5, 0.1), Measured(0.75)])], "x", "y"))
    assert rows_of(figure)[0] == {"series": "a", "x": 0.0, "y": 0.5, "y low": 0.4, "y high": 0.6, "y error": 0.1}
    assert figure.table().columns == ["series", "x", "y", "± standard error of y"]
    assert [row[3] for row in figure.table().rows] == [0.1, None]
    given_apart = trade_off([Series("a", [Measured(1.0, 0.25)], [Measured(2.0, 0.5)])], "x", "y")
    assert given_apart.data.values[0] | {"x low": 0.75, "x high": 1.25, "y low": 1.5} == given_apart.data.values[0]
    for chart in (figure.chart, given_apart, bars(["g"], {"m": [Measured(-1.0, 0.1)]}, "y")):
        kinds = [layer["mark"]["type"] for layer in chart.to_dict()["layer"]]
        assert "rule" in kinds
    plain = curves([Series("a", [0, 1], [0.5, 0.75])], "x", "y").to_dict()
    assert "rule" not in [layer["mark"]["type"] for layer in plain["layer"]]


def test_series_of_one_figure_look_different_and_models_have_their_own_colors() -> None:
    models = ["base", "fine-tuned model", "target"]
    for names in (list(METHODS)[:10], [*models, "ties density 0.1", "ties density 0.2"]):
        looks = list(zip(theme.colors_of(names), theme.markers_of(names), strict=True))
        assert len(set(looks)) == len(names)
    assert theme.colors_of([*models, "a", "b"])[3:] == theme.colors_of(["a", "b"])


@pytest.mark.parametrize("place", range(len(every_kind())))
def test_the_same_figure_gives_the_same_bytes_and_names_cannot_end_their_script(place: int) -> None:
    figure = every_kind(NASTY)[place]
    text = figure.json()
    assert text == every_kind(NASTY)[place].json()
    assert "<" not in text
    for written in (text, figure.csv()):
        written.encode()
        assert printable(written) == written
    assert "</script>" in json.dumps(json.loads(text), ensure_ascii=False)


ODD = (None, math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.0, -3.0)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from(ODD) | st.floats(), max_size=4))
def test_no_number_breaks_a_figure(values: list[float | None]) -> None:
    for figure in every_kind("a", tuple(values)):
        figure.chart.to_dict()  # Altair knows every part of it
        for rows in json.loads(figure.json(), parse_constant=pytest.fail)["datasets"].values():
            assert rows.keys() == {"fields", "rows"}
        figure.csv()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (-0.0, "0"),
        (1 / 3, "0.3333"),
        (1234.5678, "1,235"),
        (1234567, "1,234,567"),
        (-1.5e-7, "−1.5e−07"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers_have_four_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(("more_x", "more_y"), [(True, True), (False, True), (False, False)])
def test_no_point_of_the_front_is_beaten(more_x: bool, more_y: bool) -> None:
    points = [(math.sin(7 * i), math.cos(3 * i)) for i in range(40)]
    gains = {point: (point[0] if more_x else -point[0], point[1] if more_y else -point[1]) for point in points}

    def is_beaten(point: tuple[float, float]) -> bool:
        (x, y), others = gains[point], [gain for other, gain in gains.items() if other != point]
        return any(a >= x and b >= y for a, b in others)

    assert set(pareto_front(points, more_x, more_y)) == {point for point in points if not is_beaten(point)}
