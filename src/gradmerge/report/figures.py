"""Figures as Altair charts.

Every chart has its numbers in one list of rows, and the names of its columns in `usermeta`. From these a page makes the
table and the CSV of the figure. A page also replaces the light colors by dark ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..text import printable
from . import theme
from .tables import finite, number

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
    """Points of one name; a missing value is None and leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    labels: Sequence[str] = ()
    """A note for the tooltip of each point."""
    errors: Sequence[float | None] = ()
    """The standard error of each y; not needed if the values are `Measured`."""
    x_errors: Sequence[float | None] = ()

    def rows(self) -> list[Row]:
        found = []
        for i, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            row: Row = {"series": printable(self.name), "x": _known(x), "y": _known(y)}
            row |= _spread("x", x, self.x_errors[i] if self.x_errors else None)
            row |= _spread("y", y, self.errors[i] if self.errors else None)
            if self.labels:
                row["note"] = printable(self.labels[i])
            found.append(row)
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
    rows = [row for one in series for row in one.rows()]
    xs = [row["x"] for row in rows if row["x"] is not None]
    whole = bool(xs) and all(float(value).is_integer() for value in xs)
    count = int(max(xs) - min(xs)) if whole else 0
    axis = alt.Axis(format="d", tickCount=min(count, 10)) if whole and count else _axis("width", 90)
    # Values such as 1e-6, 1e-4, 1e-2 need a logarithmic scale.
    wide = bool(xs) and min(xs) > 0 and max(xs) / min(xs) >= 1000
    size = alt.Scale(type="log", nice=False, padding=12) if wide else alt.Scale(zero=False, nice=False, padding=12)
    across = alt.X("x:Q", title=x, scale=size, axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=10), axis=_axis("height", 50))
    names = [one.name for one in series]
    base = alt.Chart().encode(across, up, color=_color(names))
    known = [(name, value) for name, value in marks if finite(value)]
    # A curve joins points in their order, not from left to right.
    line = base.mark_line(strokeWidth=2).encode(strokeDash=_dash(names), order=alt.OrderValue(0))
    layers = [*(_guides(known, rows) if known else []), line]
    layers += _whiskers(rows, names)
    crowded = max((len(one.x) for one in series), default=0) > 40
    points = base.mark_point(filled=True, opacity=1, size=14 if crowded else 50)
    layers.append(points.encode(shape=_shape(names), tooltip=_tooltips(rows, x, y)))
    chosen = [_named(n, a, b, "★ best") for n, a, b in stars if finite(a) and finite(b)]
    if chosen:
        best = alt.Chart(_data(chosen)).mark_point(shape=_STAR, filled=True, size=560, opacity=1, strokeWidth=1.2)
        best = best.encode(across, up, color=_color(names), stroke=alt.StrokeValue(theme.LIGHT["paper"]))
        layers.append(best.encode(tooltip=_tooltips(chosen, x, y)))
    drawn = alt.layer(*layers, data=_data(rows)).resolve_legend(strokeDash="independent")
    more = [*(_named(name, None, value, "reference") for name, value in known), *chosen]
    return _finished(drawn, rows, {"series": "series", "x": x, "y": y}, more, height=300)


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
    names = [one.name for one in series]
    across = alt.X("x:Q", title=x, scale=alt.Scale(zero=False, padding=12), axis=_axis("width", 90))
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=10), axis=_axis("height", 50))
    layers: list[Any] = []
    line = [_named("Pareto front", a, b, "") for a, b in sorted(front) if finite(a) and finite(b)]
    if len(line) > 1:
        path = alt.Chart(_data(line)).mark_line(strokeWidth=1.5, opacity=0.7, color=theme.LIGHT["ink"])
        layers.append(path.encode(across, up))
    whiskers = _whiskers(rows, names, 0.3)
    if len(rows) > _CROWD:
        unbeaten = set(front)
        for layer in whiskers:
            layer.data = _data([row for row in rows if (row["x"], row["y"]) in unbeaten])
    layers += whiskers
    points = alt.Chart().mark_point(filled=True, opacity=0.9, size=50 if len(rows) < 400 else 18)
    layers.append(points.encode(across, up, color=_color(names), shape=_shape(names), tooltip=_tooltips(rows, x, y)))
    if present is not None and all(map(finite, present)):
        ring = alt.Chart(_data([_named("now", *present, "")]))
        ring = ring.mark_point(size=320, strokeWidth=2.5, color=theme.LIGHT["ink"], filled=False, opacity=1)
        layers.append(ring.encode(across, up, tooltip=[alt.Tooltip("series:N", title=" ")]))
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"series": "series", "x": x, "y": y}, line, height=320)


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    label: str,
    *,
    errors: Mapping[str, Sequence[float | None]] | None = None,
) -> LayerChart:
    """A horizontal bar for each group (a task) in each series (a method), with its number beside it."""
    alt = _altair()
    rows: list[Row] = []
    for name, values in series.items():
        for i, (group, value) in enumerate(zip(groups, values, strict=True)):
            error = errors[name][i] if errors and name in errors else None
            row: Row = {"series": printable(name), "group": printable(group), "x": _known(value)}
            row |= _spread("x", value, error)
            end = row["x"] if row.get("x error") is None else row["x low" if row["x"] < 0 else "x high"]
            rows.append(row | {"text": number(value), "end": end})
    names = list(series)
    across = alt.X("x:Q", title=label, axis=_axis("width", 90, domain=False))
    lane = alt.Scale(paddingInner=0.08)
    down = alt.Y("group:N", title=None, sort=None, scale=alt.Scale(domain=_printable(groups), paddingInner=0.3))
    base = alt.Chart().encode(down, yOffset=alt.YOffset("series:N", sort=_printable(names), scale=lane))
    layers = [base.mark_bar(cornerRadiusEnd=2).encode(across, color=_color(names), tooltip=_tooltips(rows, label, ""))]
    if any("x error" in row for row in rows):
        rule = base.mark_rule(color=theme.LIGHT["ink"], strokeWidth=1.5)
        layers.append(rule.encode(alt.X("x low:Q"), x2=alt.X2("x high")))
    for side, sign, way in (("left", 5, ">="), ("right", -5, "<")):
        if side == "left" or any((row["x"] or 0) < 0 for row in rows):
            text = base.mark_text(align=side, dx=sign, fontSize=10, color=theme.LIGHT["soft"])
            layers.append(text.encode(alt.X("end:Q"), text=alt.Text("text:N")).transform_filter(f"datum.x {way} 0"))
    step = max(13, min(19, round(52 / max(1, len(names)))))
    size = {"height": alt.Step(step, **{"for": "offset"}), "padding": {"right": _BESIDE}}
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"group": "", "series": "", "x": label}, **size)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    label: str,
    *,
    center: float | None = None,
    reach: float = 0.0,
) -> LayerChart:
    """One cell for each row (a layer) and column (a task); blue below a ``center`` and orange above it.

    Colours are full at ``reach`` from the center, or at the value that lies furthest away.
    """
    alt = _altair()
    cells: list[Row] = [
        {"row": printable(name), "column": printable(column), "value": _known(value), "text": number(value, 3)}
        for name, line in zip(rows, values, strict=True)
        for column, value in zip(columns, line, strict=True)
    ]
    known = [cell["value"] for cell in cells if cell["value"] is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    legend = alt.Legend(orient="top", title=label, titleLimit=700)
    if center is None:
        scale = alt.Scale(domain=[low, high if high > low else low + 1], range=list(theme.RISING), interpolate="rgb")
        dark = f"datum.value > {low + 0.5 * (high - low)!r} ? '#10161c' : '#fff'"
    else:
        reach = max(reach, abs(low - center), abs(high - center)) or 1.0
        ends = [center + reach * k / 3 for k in range(-3, 4)]
        scale = alt.Scale(domain=ends, range=list(theme.CENTERED), interpolate="rgb")
        legend.values = [ends[0], center, ends[-1]]
        dark = f"abs(datum.value - {center!r}) < {0.6 * reach!r} ? '#10161c' : '#fff'"
    turned = sum(map(len, columns)) * _LETTER + 20 * len(columns) > 420
    side = {"labelAngle": -40, "labelAlign": "left"} if turned else {"labelAngle": 0}
    top = alt.Axis(orient="top", domain=False, ticks=False, labelLimit=100, **side)
    across = alt.X("column:N", title=None, scale=alt.Scale(domain=_printable(columns)), axis=top)
    tall = max(5.0, min(26.0, 1000 / max(1, len(rows))))
    order = alt.Scale(domain=_printable(rows))
    down = alt.Y("row:N", title=None, scale=order, axis=alt.Axis(labelOverlap=True))
    base = alt.Chart().encode(across, down)
    tips = [alt.Tooltip("row:N", title=" "), alt.Tooltip("column:N", title="  ")]
    tips.append(alt.Tooltip("value:Q", title=label, format=_FORMAT))
    edge = {"stroke": theme.LIGHT["paper"], "strokeWidth": 1} if tall > 9 else {}
    layers = [base.mark_rect(**edge).encode(color=alt.Color("value:Q", scale=scale, legend=legend), tooltip=tips)]
    if tall >= 16:
        ink = alt.ExprRef(f"isValid(datum.value) ? {dark} : '{theme.LIGHT['soft']}'")
        fits = alt.ExprRef(f"bandwidth('x') < {max(len(c['text']) for c in cells) * 6.2!r} ? 0 : 1") if cells else 1
        layers.append(
            base.mark_text(fontSize=10, color=ink, opacity=fits).encode(text=alt.Text("text:N"), tooltip=tips)
        )
    # The last slanted name reaches over the edge.
    room = {"padding": {"right": 60}} if turned else {}
    size = {"height": alt.Step(tall), "view": {"fill": theme.LIGHT["hole"]}, **room}
    return _finished(alt.layer(*layers, data=_data(cells)), cells, {"row": "", "column": "", "value": label}, **size)


def _altair() -> Any:
    """Altair, imported when a figure is made. Its annotations are narrower than what its methods accept."""
    import altair

    return altair


def _known(value: float | None) -> float | None:
    """A number that JSON can represent."""
    return float(value) if finite(value) else None


def _spread(axis: str, value: float | None, error: float | None) -> Row:
    """One standard error on each side of a value, if it is known."""
    error = getattr(value, "error", None) if error is None else error
    if not finite(value) or not finite(error):
        return {}
    return {f"{axis} low": value - error, f"{axis} high": value + error, f"{axis} error": float(error)}


def _data(rows: list[Row]) -> Any:
    alt = _altair()
    return alt.InlineData(values=rows)


def _printable(names: Sequence[str]) -> list[str]:
    return [printable(name) for name in names]


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


def _dash(names: Sequence[str]) -> Any:
    alt = _altair()
    scale = alt.Scale(domain=_printable(names), range=[theme.dash_of(p) or [1, 0] for p in theme.numbers_of(names)])
    return alt.StrokeDash("series:N", scale=scale, legend=None)


def _shape(names: Sequence[str]) -> Any:
    alt = _altair()
    scale = alt.Scale(domain=_printable(names), range=[theme.marker_of(p) for p in theme.numbers_of(names)])
    return alt.Shape("series:N", scale=scale, legend=_legend(names))


def _whiskers(rows: Sequence[Row], names: Sequence[str], opacity: float = 0.55) -> list[Any]:
    """Error bars of points."""
    alt = _altair()
    found = []
    for axis, other in (("y", "x"), ("x", "y")):
        if any(f"{axis} error" in row for row in rows):
            rule = alt.Chart().mark_rule(strokeWidth=1.2, opacity=opacity).encode(color=_color(names))
            kinds = {"x": (alt.X, alt.X2), "y": (alt.Y, alt.Y2)}
            from_, to = kinds[axis]
            ends = {axis: from_(f"{axis} low:Q"), f"{axis}2": to(f"{axis} high"), other: kinds[other][0](f"{other}:Q")}
            found.append(rule.encode(**ends))
    return found


def _guides(marks: Sequence[tuple[str, float]], rows: Sequence[Row]) -> list[Any]:
    """Reference lines, with their names where these are furthest from the curves."""
    alt = _altair()
    places = label_places([value for _, value in marks], [(row["x"], row["y"]) for row in rows])
    lines = [
        {"name": printable(name), "y": value, "place": f"{side} {way}"}
        for (name, value), (side, way) in zip(marks, places, strict=True)
    ]
    shades = [theme.color_of(name) if theme.is_known(name) else theme.LIGHT["soft"] for name, _ in marks]
    color = alt.Stroke("name:N", legend=None, scale=alt.Scale(domain=_printable([n for n, _ in marks]), range=shades))
    base = alt.Chart(_data(lines)).encode(alt.Y("y:Q"))
    tips = [alt.Tooltip("name:N", title=" "), alt.Tooltip("y:Q", format=_FORMAT)]
    found = [base.mark_rule(strokeDash=[5, 4], strokeWidth=1.5).encode(stroke=color, tooltip=tips)]
    for side, way in dict.fromkeys(places):
        edge = alt.XValue("width" if side == "right" else 0)
        words = base.transform_filter(f"datum.place == '{side} {way}'").encode(x=edge, text=alt.Text("name:N"))
        look = {"align": side, "dx": -4 if side == "right" else 4, "dy": -7 if way == "above" else 8, "fontSize": 11}
        # An outline separates the words from the grid.
        outline = words.mark_text(**look, stroke=theme.LIGHT["paper"], strokeWidth=3)
        found += [outline, words.mark_text(**look, color=theme.LIGHT["soft"])]
    return found


def _axis(extent: str, pixels: int, **more: Any) -> Any:
    """An axis with a tick about every ``pixels`` pixels."""
    alt = _altair()
    return alt.Axis(tickCount=alt.ExprRef(f"ceil({extent} / {pixels})"), **more)


def _tooltips(rows: Sequence[Row], x: str, y: str) -> list[Any]:
    alt = _altair()
    fields = set().union(*rows) if rows else set()
    found = [
        alt.Tooltip(f"{name}:N", title=blank) for name, blank in (("series", " "), ("group", "  ")) if name in fields
    ]
    for axis, title in (("x", x), ("y", y)):
        if axis in fields:
            found.append(alt.Tooltip(f"{axis}:Q", title=title or axis, format=_FORMAT))
        if f"{axis} error" in fields:
            found.append(alt.Tooltip(f"{axis} error:Q", title=ERRORS, format=",.2~r"))
    return [*found, *([alt.Tooltip("note:N", title="   ")] if "note" in fields else [])]


def _named(series: str, x: float | None, y: float, note: str) -> Row:
    return {"series": printable(series), "x": _known(x), "y": _known(y), "note": note}


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


def label_places(values: Sequence[float], points: Sequence[tuple[float | None, float | None]]) -> list[tuple[str, str]]:
    """Where the name of each reference line is furthest from points, lines and other names.

    `right` or `left` at its end, `above` or `below` it.
    """
    known = [(x, y) for x, y in points if x is not None and y is not None]
    heights = [*values, *(y for _, y in known)]
    letter = 0.03 * (max(heights, default=0.0) - min(heights, default=0.0))
    first, last = (min(x for x, _ in known), max(x for x, _ in known)) if known else (0.0, 0.0)
    reach = 0.2 * (last - first)
    taken = {
        "right": [y for x, y in known if x >= last - reach],
        "left": [y for x, y in known if x <= first + reach],
    }
    found = []
    for i, value in enumerate(values):
        others = [*values[:i], *values[i + 1 :]]

        def room(place: tuple[str, str], value: float = value, others: Sequence[float] = others) -> float:
            middle = value + (letter if place[1] == "above" else -letter)
            return min((abs(middle - other) for other in (*taken[place[0]], *others)), default=math.inf)

        best = max((("right", "above"), ("left", "above"), ("right", "below"), ("left", "below")), key=room)
        taken[best[0]].append(value + (letter if best[1] == "above" else -letter))
        found.append(best)
    return found
