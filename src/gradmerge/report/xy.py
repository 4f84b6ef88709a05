"""Drawing line charts and scatter charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from . import palette
from .numbers import column, finite, fit, number, spread, text_width, tick_labels, ticks
from .svg import TEXT, Drawing, Scale, described, lines_of, px, text

if TYPE_CHECKING:
    from .charts import LineChart, ScatterChart, Series

#: More points than this in one series get small markers.
_CROWDED = 40
Point = tuple[float, float]


def draw_lines(chart: LineChart, standalone: bool = False, narrow: bool = False) -> str:
    drawing = Drawing(chart.title, chart.slug, chart.x_label, chart.y_label, standalone, narrow)
    drawing.legend([(s.name, _line(i, "M0 0h24") + _dot_sample(i)) for i, s in enumerate(chart.series)])
    known = [p for s in chart.series for p in _known(s)]
    stars = [(name, x, y) for name, x, y in chart.best if finite(x) and finite(y)]
    marks = [(name, y) for name, y in chart.marks if finite(y)]
    xs = [x for x, _ in known] + [x for _, x, _ in stars]
    ys = [y for _, y in known] + [y for _, _, y in stars] + [y for _, y in marks]
    room = 0.0 if narrow else min(150.0, max((text_width(name, 11) + 12 for name, _ in marks), default=0.0))
    whole = bool(xs) and all(float(x).is_integer() for x in xs)
    across, up = _axes(drawing, spread(xs, 0.03), spread(ys), room, whole)
    drawing.add(lines_of(((across.start, up(y), across.end, up(y)) for _, y in marks), "guide"))
    for index, series in enumerate(chart.series):
        line = _line(index, _curve(series, across, up))
        drawing.series(index, series.name, line, _points(drawing, series, index, across, up))
    _stars(drawing, chart, stars, across, up)
    _mark_names(drawing, marks, across, up)
    if not xs:
        drawing.say_empty(across, up.start, up.end)
    return drawing.document(_description("Line chart", chart), "near")


def draw_scatter(chart: ScatterChart, standalone: bool = False, narrow: bool = False) -> str:
    drawing = Drawing(chart.title, chart.slug, chart.x_label, chart.y_label, standalone, narrow)
    front = sorted((x, y) for x, y in chart.front if finite(x) and finite(y))
    entries = [(s.name, _dot_sample(i)) for i, s in enumerate(chart.series)]
    if front:
        entries.append(("Pareto front", '<path class="front" d="M0 0h22"/>'))
    if chart.diagonal:
        entries.append(("y = x", '<path class="guide" d="M0 0h22"/>'))
    drawing.legend(entries)
    known = [p for s in chart.series for p in _known(s)] + front
    across_range, up_range = spread(x for x, _ in known), spread(y for _, y in known)
    if chart.diagonal:
        across_range = up_range = min(across_range[0], up_range[0]), max(across_range[1], up_range[1])
    across, up = _axes(drawing, across_range, up_range, 0)
    if chart.diagonal:
        drawing.add(lines_of([(across.start, up.start, across.end, up.end)], "guide"))
    drawing.add(lines_of(((across(a), up(b), across(c), up(d)) for (a, b), (c, d) in pairwise(front)), "front"))
    for index, series in enumerate(chart.series):
        drawing.series(index, series.name, "", _points(drawing, series, index, across, up))
    if not known:
        drawing.say_empty(across, up.start, up.end)
    return drawing.document(_description("Scatter chart", chart), "near")


def _known(series: Series) -> list[Point]:
    return [(x, y) for x, y, _ in series.points() if finite(x) and finite(y)]


def _axes(drawing: Drawing, across: Point, up: Point, right: float, whole: bool = False) -> tuple[Scale, Scale]:
    """Grid, ticks and names, at ``whole`` numbers alone where x has no others; the scales of the area between them."""
    drawing.caption(drawing.y_name)
    x_ticks, y_ticks = ticks(*across, 5 if drawing.narrow else 9), ticks(*up, 6 if drawing.narrow else 7)
    x_ticks = [tick for tick in x_ticks if not whole or float(tick).is_integer()]
    y_texts = tick_labels(y_ticks)
    left = 10 + max((text_width(t, TEXT) for t in y_texts), default=0)
    top, height = drawing.bottom, 220 if drawing.narrow else 300
    x = Scale(*across, left, drawing.width - max(right, 14))
    y = Scale(*up, top + height, top)
    drawing.add(lines_of(((x.start, y(t), x.end, y(t)) for t in y_ticks), "grid"))
    notches = ((x(t), y.start, x(t), y.start + 4) for t in x_ticks)
    drawing.add(lines_of([(x.start, y.start, x.end, y.start), *notches], "axis"))
    drawing.add(*(text(left - 7, y(t) + 4, words, "soft end") for t, words in zip(y_ticks, y_texts, strict=True)))
    drawing.add(*(text(x(t), y.start + 18, words, "soft mid") for t, words in _spaced(x, x_ticks)))
    drawing.bottom = y.start + 22
    if drawing.x_name:
        drawing.bottom += 18
        short = fit(drawing.x_name, x.end - x.start, TEXT)
        drawing.add(text((x.start + x.end) / 2, drawing.bottom, short, "soft mid", drawing.x_name))
    return x, y


def _spaced(scale: Scale, values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks with their labels, every k-th where all would touch."""
    texts = tick_labels(values)
    widest = max((text_width(t, TEXT) for t in texts), default=0) + 10
    gap = abs(scale(values[1]) - scale(values[0])) if len(values) > 1 else widest
    every = max(1, -int(-widest // gap))
    return list(zip(values, texts, strict=True))[::every]


def _curve(series: Series, across: Scale, up: Scale) -> str:
    """A path that breaks where a value is missing."""
    path: list[str] = []
    broken = True
    for x, y, _ in series.points():
        if finite(x) and finite(y):
            path.append(f"{'M' if broken else 'L'}{px(across(x))} {px(up(y))}")
        broken = not (finite(x) and finite(y))
    return "".join(path)


def _points(drawing: Drawing, series: Series, index: int, across: Scale, up: Scale) -> Iterable[str]:
    small = len(series.x) > _CROWDED
    for x, y, label in series.points():
        if finite(x) and finite(y):
            shape = _shape(index, across(x), up(y), small)
            yield drawing.point(shape, series.name, number(x), number(y), label)


def _shape(index: int, x: float, y: float, small: bool) -> str:
    if small or index % len(palette.MARKER_PATHS) == 0:
        return f'<circle cx="{px(x)}" cy="{px(y)}" r="{2.4 if small else 4}"'
    return f'<path d="M{px(x)} {px(y)}{palette.marker(index)}"'


def _mark_names(drawing: Drawing, marks: Sequence[tuple[str, float]], across: Scale, up: Scale) -> None:
    """The names of reference lines at the right, apart from one another."""
    x, below, room, classes = across.end + 6, 4, drawing.width - across.end - 6, "soft small"
    if drawing.narrow:
        x, below, room, classes = across.end, -5, 200, "soft small halo end"
    floor = float("inf")
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        floor = min(up(value) + below, floor - 13)
        drawing.add(text(x, floor, fit(name, room, 11), classes, f"{name}: {number(value)}"))


def _stars(
    drawing: Drawing, chart: LineChart, stars: Sequence[tuple[str, float, float]], across: Scale, up: Scale
) -> None:
    places = {series.name: i for i, series in enumerate(chart.series)}
    for name, x, y in stars:
        star = f'<path d="M{px(across(x))} {px(up(y))}{palette.STAR}"'
        shape = drawing.point(star, name, number(x), number(y), "★ best")
        place = places.get(name)
        of = ' class="s"' if place is None else f' class="s {palette.series_class(place)}" data-s="{place}"'
        drawing.add(f'<g{of}{drawing.head(name)}><g class="pts star">{shape}</g></g>')


def _line(index: int, path: str) -> str:
    dash = f' stroke-dasharray="{palette.dash(index)}"' if palette.dash(index) else ""
    return f'<path class="curve"{dash} d="{path}"/>' if path else ""


def _dot_sample(index: int) -> str:
    return f'<path class="pts" d="M12 0{palette.marker(index)}"/>'


def _description(kind: str, chart: LineChart | ScatterChart) -> str:
    about = []
    for series in chart.series:
        values = [y for _, y in _known(series)]
        extent = " to ".join(column([min(values), max(values)])) if values else "no values"
        about.append(f"{series.name} ({len(values)} points, {extent})")
    return f"{kind} of {chart.y_label} against {chart.x_label}: {described(about) or 'no series'}."
