"""Figures as Altair charts.

Every chart has its numbers in one list of rows, and the names of its columns in `usermeta`. From these a page makes the
table and the CSV of the figure. A page also replaces the light colors by dark ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..text import printable
from . import theme
from .page import finite, number

if TYPE_CHECKING:
    from altair import LayerChart

#: In a trade-off with more points, only the Pareto front has error bars.
_CROWD = 60
#: About the width of a letter, in pixels.
_LETTER = 6.6
_STAR = "M0-.9L.22-.28L.86-.28L.35.11L.53.73L0 .36L-.53.73L-.35.11L-.86-.28L-.22-.28Z"
_FORMAT = ",.4~r"
#: Room for the numbers at the end of bars, in pixels.
_BESIDE = 48
ERRORS = "± standard error"

Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Points of one name; a missing value is None and leaves a gap. Values that are `Measured` have error bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    labels: Sequence[str] = ()
    """A note for the tooltip of each point."""

    def rows(self) -> list[Row]:
        found = []
        for i, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            row = {"series": printable(self.name), **_value("x", x), **_value("y", y)}
            found.append(row | ({"note": printable(self.labels[i])} if self.labels else {}))
        return found


def curves(
    series: Sequence[Series],
    x: str,
    y: str,
    *,
    marks: Sequence[tuple[str, float]] = (),
    stars: Sequence[tuple[str, float, float]] = (),
) -> LayerChart:
    """Curves over x, with reference lines (name, y) and starred points (name of a series, x, y)."""
    alt = _altair()
    rows, names = [row for one in series for row in one.rows()], [one.name for one in series]
    xs = [row["x"] for row in rows if row["x"] is not None]
    # Values such as 1e-6, 1e-4, 1e-2 need a logarithmic scale.
    wide = bool(xs) and min(xs) > 0 and max(xs) / min(xs) >= 1000
    scale = alt.Scale(type="log", nice=False, padding=12) if wide else None
    whole = bool(xs) and all(float(value).is_integer() for value in xs)
    axis = alt.Axis(format="d", tickMinStep=1) if whole and not wide else alt.Undefined
    base = _placed(alt.Chart(), x, y, names, scale, axis)
    known = [_row(name, None, value, "reference") for name, value in marks if finite(value)]
    # A curve joins points in their order, not from left to right.
    line = base.mark_line(strokeWidth=2).encode(order=alt.OrderValue(0))
    points = base.mark_point(filled=True, opacity=1, size=14 if len(rows) > 40 * len(series) else 50)
    points = points.encode(shape=_shape(names), tooltip=_tooltips(rows, x, y))
    layers = [*_guides(known), line, *_whiskers(rows, names), points]
    chosen = [_row(name, a, b, "★ best") for name, a, b in stars if finite(a) and finite(b)]
    if chosen:
        best = alt.Chart(_data(chosen)).mark_point(shape=_STAR, filled=True, size=560, opacity=1, strokeWidth=1.2)
        best = _placed(best, x, y, names, scale, axis).encode(stroke=alt.StrokeValue(theme.LIGHT["paper"]))
        layers.append(best.encode(tooltip=_tooltips(chosen, x, y)))
    titles = {"series": "series", "x": x, "y": y}
    return _finished(alt.layer(*layers, data=_data(rows)), rows, titles, [*known, *chosen], height=300)


def trade_off(
    series: Sequence[Series],
    x: str,
    y: str,
    *,
    front: Sequence[tuple[float, float]] = (),
    present: tuple[float, float] | None = None,
) -> LayerChart:
    """Points with their Pareto front, and a ring around the present one."""
    alt = _altair()
    rows = [row for one in series for row in one.rows() if row["x"] is not None and row["y"] is not None]
    names, layers = [one.name for one in series], []
    line = [_row("Pareto front", a, b, "") for a, b in sorted(front) if finite(a) and finite(b)]
    if len(line) > 1:
        path = alt.Chart(_data(line)).mark_line(strokeWidth=1.5, opacity=0.7, color=theme.LIGHT["ink"])
        layers.append(path.encode(alt.X("x:Q"), alt.Y("y:Q")))
    best = {(row["x"], row["y"]) for row in line}
    layers += _whiskers([row for row in rows if len(rows) <= _CROWD or (row["x"], row["y"]) in best], names)
    points = alt.Chart().mark_point(filled=True, opacity=0.9, size=50 if len(rows) < 400 else 18)
    points = _placed(points, x, y, names)
    layers.append(points.encode(shape=_shape(names), tooltip=_tooltips(rows, x, y)))
    if present is not None and all(map(finite, present)):
        ring = alt.Chart(_data([_row("now", *present, "")]))
        ring = ring.mark_point(size=320, strokeWidth=2.5, color=theme.LIGHT["ink"], filled=False, opacity=1)
        layers.append(ring.encode(alt.X("x:Q"), alt.Y("y:Q"), tooltip=[alt.Tooltip("series:N", title=" ")]))
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"series": "series", "x": x, "y": y}, line, height=320)


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float | None]], label: str) -> LayerChart:
    """Return a bar chart: for each group (a task), one bar for each series (a method), with its number."""
    alt = _altair()
    rows: list[Row] = []
    for name, values in series.items():
        for group, value in zip(groups, values, strict=True):
            row: Row = {"series": printable(name), "group": printable(group), **_value("x", value)}
            end = row["x"] if row.get("x error") is None else row["x low" if row["x"] < 0 else "x high"]
            rows.append(row | {"text": number(value), "end": end})
    names = list(series)
    across = alt.X("x:Q", title=label, axis=alt.Axis(domain=False))
    down = alt.Y("group:N", title=None, sort=None, scale=alt.Scale(domain=_printable(groups), paddingInner=0.3))
    lane = alt.YOffset("series:N", sort=_printable(names), scale=alt.Scale(paddingInner=0.08))
    base = alt.Chart().encode(down, yOffset=lane)
    layers = [base.mark_bar(cornerRadiusEnd=2).encode(across, color=_color(names), tooltip=_tooltips(rows, label, ""))]
    if any("x error" in row for row in rows):
        rule = base.mark_rule(color=theme.LIGHT["ink"], strokeWidth=1.5)
        layers.append(rule.encode(alt.X("x low:Q"), x2=alt.X2("x high")))
    for side, sign, way in (("left", 5, ">="), ("right", -5, "<")):
        text = base.mark_text(align=side, dx=sign, fontSize=10, color=theme.LIGHT["soft"])
        layers.append(text.encode(alt.X("end:Q"), text=alt.Text("text:N")).transform_filter(f"datum.x {way} 0"))
    step = max(13, min(19, round(52 / max(1, len(names)))))
    size = {"height": alt.Step(step, **{"for": "offset"}), "padding": {"right": _BESIDE}}
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"group": "", "series": "", "x": label}, **size)


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], label: str
) -> LayerChart:
    """Return a heat map with a cell for each row (a layer) and column (a task)."""
    alt = _altair()
    cells: list[Row] = [
        {"row": printable(name), "column": printable(column), **_value("value", value), "text": number(value, 3)}
        for name, line in zip(rows, values, strict=True)
        for column, value in zip(columns, line, strict=True)
    ]
    known = [cell["value"] for cell in cells if cell["value"] is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    scale = alt.Scale(domain=[low, high if high > low else low + 1], range=list(theme.RISING), interpolate="rgb")
    turned = sum(map(len, columns)) * _LETTER + 20 * len(columns) > 420
    side = {"labelAngle": -40, "labelAlign": "left"} if turned else {"labelAngle": 0}
    top = alt.Axis(orient="top", domain=False, ticks=False, labelLimit=100, **side)
    across = alt.X("column:N", title=None, scale=alt.Scale(domain=_printable(columns)), axis=top)
    tall = max(5.0, min(26.0, 1000 / max(1, len(rows))))
    down = alt.Y("row:N", title=None, scale=alt.Scale(domain=_printable(rows)), axis=alt.Axis(labelOverlap=True))
    tips = [alt.Tooltip("row:N", title=" "), alt.Tooltip("column:N", title="  ")]
    tips.append(alt.Tooltip("value:Q", title=label, format=_FORMAT))
    base = alt.Chart().encode(across, down, tooltip=tips)
    edge = {"stroke": theme.LIGHT["paper"], "strokeWidth": 1} if tall > 9 else {}
    legend = alt.Legend(orient="top", title=label, titleLimit=700)
    layers = [base.mark_rect(**edge).encode(color=alt.Color("value:Q", scale=scale, legend=legend))]
    if tall >= 16 and cells:
        dark = f"datum.value > {low + 0.5 * (high - low)!r} ? '#10161c' : '#fff'"
        ink = alt.ExprRef(f"isValid(datum.value) ? {dark} : '{theme.LIGHT['soft']}'")
        fits = alt.ExprRef(f"bandwidth('x') < {max(len(cell['text']) for cell in cells) * 6.2!r} ? 0 : 1")
        layers.append(base.mark_text(fontSize=10, color=ink, opacity=fits).encode(text=alt.Text("text:N")))
    # The last slanted name reaches over the edge.
    room = {"padding": {"right": 60}} if turned else {}
    size = {"height": alt.Step(tall), "view": {"fill": theme.LIGHT["hole"]}, **room}
    return _finished(alt.layer(*layers, data=_data(cells)), cells, {"row": "", "column": "", "value": label}, **size)


def _altair() -> Any:
    """Altair, imported when a figure is made. Its annotations are narrower than what its methods accept."""
    import altair

    return altair


def _value(field: str, value: float | None) -> Row:
    """A number that JSON can represent, and one standard error on each side of it if that is known."""
    if not finite(value):
        return {field: None}
    error = getattr(value, "error", None)
    row: Row = {field: float(value)}
    if finite(error):
        row |= {f"{field} low": value - error, f"{field} high": value + error, f"{field} error": float(error)}
    return row


def _row(series: str, x: float | None, y: float, note: str) -> Row:
    return {"series": printable(series), "x": None if x is None else float(x), "y": float(y), "note": note}


def _data(rows: list[Row]) -> Any:
    return _altair().InlineData(values=rows)


def _printable(names: Sequence[str]) -> list[str]:
    return [printable(name) for name in names]


def _placed(chart: Any, x: str, y: str, names: Sequence[str], scale: Any = None, axis: Any = None) -> Any:
    """A chart of points with their axes and colors."""
    alt = _altair()
    across = alt.X("x:Q", title=x, scale=scale or alt.Scale(zero=False, nice=False, padding=12))
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=10))
    return chart.encode(across if axis is None else across.axis(axis), up, color=_color(names))


def _legend(names: Sequence[str]) -> Any:
    """Above the figure."""
    alt = _altair()
    if len(names) < 2:
        return None
    return alt.Legend(orient="top", title=None, symbolStrokeWidth=2, symbolSize=80, symbolOpacity=1, labelLimit=240)


def _color(names: Sequence[str]) -> Any:
    alt = _altair()
    scale = alt.Scale(domain=_printable(names), range=theme.colors_of(names))
    return alt.Color("series:N", scale=scale, legend=_legend(names))


def _shape(names: Sequence[str]) -> Any:
    alt = _altair()
    scale = alt.Scale(domain=_printable(names), range=theme.markers_of(names))
    return alt.Shape("series:N", scale=scale, legend=_legend(names))


def _whiskers(rows: Sequence[Row], names: Sequence[str]) -> list[Any]:
    """Error bars of points."""
    alt = _altair()
    base, found = alt.Chart(_data(list(rows))).mark_rule(strokeWidth=1.2, opacity=0.45).encode(color=_color(names)), []
    if any("y error" in row for row in rows):
        found.append(base.encode(alt.X("x:Q"), alt.Y("y low:Q"), alt.Y2("y high")))
    if any("x error" in row for row in rows):
        found.append(base.encode(alt.Y("y:Q"), alt.X("x low:Q"), alt.X2("x high")))
    return found


def _guides(rows: list[Row]) -> list[Any]:
    """Reference lines, with their names at the right and the left end by turns, so that near ones do not overlap."""
    alt = _altair()
    if not rows:
        return []
    names = list(dict.fromkeys(row["series"] for row in rows))
    shades = [theme.LIGHT[theme.MODELS.get(name, "soft")] for name in names]
    color = alt.Stroke("series:N", legend=None, scale=alt.Scale(domain=names, range=shades))
    tips = [alt.Tooltip("series:N", title=" "), alt.Tooltip("y:Q", format=_FORMAT)]
    line = alt.Chart(_data(rows)).mark_rule(strokeDash=[5, 4], strokeWidth=1.5)
    found = [line.encode(alt.Y("y:Q"), stroke=color, tooltip=tips)]
    by_height = sorted(rows, key=lambda row: row["y"])
    for align, dx, x, some in (("right", -4, "width", by_height[::2]), ("left", 4, 0, by_height[1::2])):
        words = alt.Chart(_data(some)).encode(alt.Y("y:Q"), x=alt.XValue(x), text=alt.Text("series:N"))
        look = {"align": align, "dx": dx, "dy": -7, "fontSize": 11}
        # An outline separates the words from the grid.
        found.append(words.mark_text(**look, stroke=theme.LIGHT["paper"], strokeWidth=3))
        found.append(words.mark_text(**look, color=theme.LIGHT["soft"]))
    return found


def _tooltips(rows: Sequence[Row], x: str, y: str) -> list[Any]:
    alt = _altair()
    fields = set().union(*rows) if rows else set()
    titles = {"series": " ", "group": "  "}
    found = [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items() if name in fields]
    for axis, title in (("x", x), ("y", y)):
        if axis in fields:
            found.append(alt.Tooltip(f"{axis}:Q", title=title or axis, format=_FORMAT))
        if f"{axis} error" in fields:
            found.append(alt.Tooltip(f"{axis} error:Q", title=ERRORS, format=",.2~r"))
    return [*found, *([alt.Tooltip("note:N", title="   ")] if "note" in fields else [])]


def _finished(
    chart: LayerChart, rows: Sequence[Row], columns: Mapping[str, str], more: Sequence[Row] = (), **size: Any
) -> LayerChart:
    """The chart with the theme and the names of its columns, as wide as its container.

    ``more`` are rows of the table beside the points.
    """
    fields = set().union(*rows) if rows else set()
    named = {field: title or field for field, title in columns.items()}
    for axis in ("x", "y"):
        if f"{axis} error" in fields:
            named[f"{axis} error"] = f"{ERRORS} of {named[axis]}"
    if "note" in fields or more:
        named["note"] = "note"
    # A page sets the columns of the legend from its width.
    entry = round(min(260.0, max((len(row["series"]) for row in rows if "series" in row), default=0) * _LETTER + 44))
    look = theme.chart_config()
    look["legend"]["columns"] = max(1, 700 // entry)
    facts = {"columns": named, "entry": entry, "more": list(more)}
    return chart.properties(width="container", usermeta=facts, config=look, **size)
