"""Figures as Altair charts: from plain numbers to a chart with our colours, on paper.

Every chart holds its numbers in one list of rows, and `usermeta` says what the columns are called: a page makes the
table and the CSV of a figure from that. A page also turns the colours of paper into those of the dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..text import printable
from . import palette
from .numbers import finite, number

if TYPE_CHECKING:
    import altair as alt

#: More points of one figure than this are thinned out where they would cover one another.
MOST_POINTS = 3000
#: About the width of a letter, in pixels.
_LETTER = 6.6
_STAR = "M0-.9L.22-.28L.86-.28L.35.11L.53.73L0 .36L-.53.73L-.35.11L-.86-.28L-.22-.28Z"
_FORMAT = ",.4~r"
#: Bars and lines around a value show one standard error on each side.
ERRORS = "± standard error"

Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Points of one name; a missing value is None and leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    labels: Sequence[str] = ()
    """What the tooltip of each point says besides its numbers."""
    errors: Sequence[float | None] = ()
    """The standard error of each y."""
    x_errors: Sequence[float | None] = ()

    def rows(self) -> list[Row]:
        found = []
        for i, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            row: Row = {"series": printable(self.name), "x": _known(x), "y": _known(y)}
            if self.errors:
                row |= _spread("y", y, self.errors[i])
            if self.x_errors:
                row |= _spread("x", x, self.x_errors[i])
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
) -> alt.LayerChart:
    """Curves over x, with reference lines (name, y) and starred points (name of a series, x, y)."""
    import altair as alt

    rows = [row for one in series for row in _thinned(one.rows(), MOST_POINTS // max(1, len(series)))]
    xs = [row["x"] for row in rows if row["x"] is not None]
    whole = bool(xs) and all(float(value).is_integer() for value in xs)
    count = int(max(xs) - min(xs)) if whole else 0
    axis = alt.Axis(format="d", tickCount=min(count, 10)) if whole and count else alt.Axis()
    across = alt.X("x:Q", title=x, scale=alt.Scale(zero=False, nice=False, padding=12), axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=10))
    names = [one.name for one in series]
    base = alt.Chart().encode(across, up, color=_colour(names))
    layers = [base.mark_line(strokeWidth=2).encode(strokeDash=_dash(names)), *_whiskers(rows, names)]
    crowded = max((len(one.x) for one in series), default=0) > 40
    points = base.mark_point(filled=True, opacity=1, size=14 if crowded else 50)
    layers.append(points.encode(shape=_shape(names), tooltip=_tooltips(rows, x, y)))
    known = [(name, value) for name, value in marks if finite(value)]
    if known:
        layers += _guides(known)
    if stars:
        chosen = [{"series": n, "x": a, "y": b, "note": "★ best"} for n, a, b in stars if finite(a) and finite(b)]
        best = alt.Chart(_data(chosen)).mark_point(shape=_STAR, filled=True, size=420, opacity=1, strokeWidth=1.2)
        best = best.encode(across, up, color=_colour(names), stroke=alt.value(palette.LIGHT["paper"]))
        layers.append(best.encode(tooltip=_tooltips(chosen, x, y)))
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"series": "series", "x": x, "y": y}, 300)


def trade_off(
    series: Sequence[Series],
    x: str,
    y: str,
    *,
    front: Sequence[tuple[float, float]] = (),
    present: tuple[float, float] | None = None,
    diagonal: bool = False,
) -> alt.LayerChart:
    """Points, with a line through those that no other beats, a ring around the present one, or a line where x is y."""
    import altair as alt

    rows = [row for one in series for row in _spaced(one.rows(), MOST_POINTS // max(1, len(series)))]
    names = [one.name for one in series]
    across = alt.X("x:Q", title=x, scale=alt.Scale(zero=False, padding=12))
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=10))
    layers: list[Any] = []
    line = [{"x": a, "y": b} for a, b in sorted(front) if finite(a) and finite(b)]
    if len(line) > 1:
        path = alt.Chart(_data(line)).mark_line(strokeWidth=1.5, opacity=0.7, color=palette.LIGHT["ink"])
        layers.append(path.encode(across, up))
    ends = [row[k] for row in rows for k in ("x", "y") if row["x"] is not None and row["y"] is not None]
    if diagonal and ends:
        same = alt.Chart(_data([{"x": v, "y": v} for v in (min(ends), max(ends))]))
        layers.append(same.mark_line(strokeDash=[5, 4], color=palette.LIGHT["soft"]).encode(across, up))
    layers += _whiskers(rows, names)
    points = alt.Chart().mark_point(filled=True, opacity=0.9, size=50 if len(rows) < 400 else 18)
    layers.append(points.encode(across, up, color=_colour(names), shape=_shape(names), tooltip=_tooltips(rows, x, y)))
    if present is not None and all(map(finite, present)):
        ring = alt.Chart(_data([{"x": present[0], "y": present[1], "note": "now"}]))
        ring = ring.mark_point(size=320, strokeWidth=2.5, color=palette.LIGHT["ink"], filled=False, opacity=1)
        layers.append(ring.encode(across, up, tooltip=["note:N"]))
    return _finished(alt.layer(*layers, data=_data(rows)), rows, {"series": "series", "x": x, "y": y}, 320)


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    label: str,
    *,
    errors: Mapping[str, Sequence[float | None]] | None = None,
) -> alt.LayerChart:
    """One lying bar for each group (a task) in each series (a method), with its number beside it."""
    import altair as alt

    rows: list[Row] = []
    for name, values in series.items():
        for i, (group, value) in enumerate(zip(groups, values, strict=True)):
            error = errors[name][i] if errors and name in errors else None
            row: Row = {"series": printable(name), "group": printable(group), "x": _known(value)}
            row |= _spread("x", value, error) if errors else {}
            rows.append(row | {"text": number(value), "end": row.get("x high", row["x"])})
    ends = [row["end"] for row in rows if row["end"] is not None] + [0.0]
    low, high = min(ends), max(ends)
    names = list(series)
    domain = [low - 0.14 * (high - low) if low < 0 else 0, high + 0.14 * (high - low) or 1]
    across = alt.X("x:Q", title=label, scale=alt.Scale(domain=domain, nice=False), axis=alt.Axis(domain=False))
    lane = alt.Scale(paddingInner=0.08)
    down = alt.Y("group:N", title=None, sort=None, scale=alt.Scale(paddingInner=0.3), axis=alt.Axis(domain=False))
    base = alt.Chart().encode(down, yOffset=alt.YOffset("series:N", sort=_printable(names), scale=lane))
    shown = base.mark_bar(cornerRadiusEnd=2).encode(across, color=_colour(names))
    whisk = base.mark_rule(color=palette.LIGHT["ink"], strokeWidth=1.5).encode(alt.X("x low:Q"), x2="x high:Q")
    beside = alt.condition("datum.x < 0", alt.value(palette.LIGHT["soft"]), alt.value(palette.LIGHT["soft"]))
    text = base.mark_text(align="left", dx=5, fontSize=10).encode(alt.X("end:Q"), text="text:N", color=beside)
    layers = [shown.encode(tooltip=_tooltips(rows, label, "")), *([whisk] if errors else []), text]
    step = max(11, min(19, round(52 / max(1, len(names)))))
    found = _finished(alt.layer(*layers, data=_data(rows)), rows, {"group": "", "series": "", "x": label}, 0)
    return found.properties(height=alt.Step(step, **{"for": "offset"}))


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    label: str,
    *,
    centre: float | None = None,
) -> alt.LayerChart:
    """One cell for each row (a layer) and column (a task); blue below a ``centre`` and orange above it."""
    import altair as alt

    cells = [
        {"row": printable(name), "column": printable(column), "value": _known(value), "text": number(value, 3)}
        for name, line in zip(rows, values, strict=True)
        for column, value in zip(columns, line, strict=True)
    ]
    known = [cell["value"] for cell in cells if cell["value"] is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    legend = alt.Legend(orient="top", title=label, gradientLength=240, gradientThickness=10, titleLimit=700)
    if centre is None:
        scale = alt.Scale(domain=[low, high if high > low else low + 1], range=list(palette.RISING))
        dark = f"datum.value > {low + 0.5 * (high - low)!r} ? '#10161c' : '#fff'"
    else:
        reach = max(abs(low - centre), abs(high - centre)) or 1.0
        ends = [centre + reach * k / 3 for k in range(-3, 4)]
        scale = alt.Scale(domain=ends, range=list(palette.CENTRED))
        legend.values = [ends[0], centre, ends[-1]]
        dark = f"abs(datum.value - {centre!r}) < {0.6 * reach!r} ? '#10161c' : '#fff'"
    turned = sum(map(len, columns)) * _LETTER + 20 * len(columns) > 420
    top = alt.Axis(orient="top", labelAngle=-40 if turned else 0, labelAlign="left" if turned else "center")
    across = alt.X("column:N", title=None, sort=None, axis=top)
    tall = max(5.0, min(26.0, 1000 / max(1, len(rows))))
    down = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelOverlap=True))
    base = alt.Chart().encode(across, down)
    colour = alt.condition("isValid(datum.value)", _quantity("value", scale, legend), alt.value(palette.LIGHT["hole"]))
    tips = [alt.Tooltip("row:N", title=" "), alt.Tooltip("column:N", title="  ")]
    tips.append(alt.Tooltip("value:Q", title=label, format=_FORMAT))
    inset = 0.5 if tall > 9 else 0
    layers = [base.mark_rect(yOffset=inset, xOffset=inset).encode(color=colour, tooltip=tips)]
    if tall >= 16:
        ink = alt.ExprRef(f"isValid(datum.value) ? {dark} : '{palette.LIGHT['soft']}'")
        fits = alt.ExprRef(f"bandwidth('x') < {max(len(c['text']) for c in cells) * 6.2!r} ? 0 : 1") if cells else 1
        layers.append(base.mark_text(fontSize=10, color=ink, opacity=fits, tooltip=None).encode(text="text:N"))
    found = _finished(alt.layer(*layers, data=_data(cells)), cells, {"row": "", "column": "", "value": label}, 0)
    return found.properties(height=alt.Step(tall))


def _known(value: float | None) -> float | None:
    """A number that JSON has a word for."""
    return float(value) if finite(value) else None


def _spread(axis: str, value: float | None, error: float | None) -> Row:
    if not finite(value) or not finite(error):
        return {f"{axis} low": None, f"{axis} high": None, f"{axis} error": None}
    return {f"{axis} low": value - error, f"{axis} high": value + error, f"{axis} error": float(error)}


def _thinned(rows: list[Row], most: int) -> list[Row]:
    """A curve's points, of a long one the lowest and the highest of every stretch: the same picture."""
    if len(rows) <= most:
        return rows
    per = math.ceil(2 * len(rows) / most)
    kept: list[Row] = []
    for start in range(0, len(rows), per):
        part = [row for row in rows[start : start + per] if row["y"] is not None]
        ends = {id(f(part, key=lambda row: row["y"])) for f in (min, max)} if part else set()
        kept += [row for row in part if id(row) in ends]
    return kept


def _spaced(rows: list[Row], most: int) -> list[Row]:
    """A cloud's points, of a dense one the first of every small square."""
    known = [row for row in rows if row["x"] is not None and row["y"] is not None]
    if len(known) <= most:
        return known
    (left, wide), (low, tall) = (
        (min(values), max(values) - min(values) or 1.0) for values in ([row[k] for row in known] for k in ("x", "y"))
    )
    side = math.sqrt(most)
    squares: dict[tuple[int, int], Row] = {}
    for row in known:
        squares.setdefault((int((row["x"] - left) / wide * side), int((row["y"] - low) / tall * side)), row)
    return list(squares.values())


def _data(rows: list[Row]) -> alt.InlineData:
    import altair as alt

    return alt.InlineData(values=rows)


def _printable(names: Sequence[str]) -> list[str]:
    return [printable(name) for name in names]


def _legend(names: Sequence[str]) -> Any:
    """Above the figure, in as many columns as there is room for."""
    import altair as alt

    if len(names) < 2:
        return None
    widest = min(260.0, max(map(len, names)) * _LETTER + 44)
    room = alt.ExprRef(f"max(1, floor(width / {widest:.0f}))")
    return alt.Legend(orient="top", title=None, columns=room, symbolStrokeWidth=2, symbolSize=80)


def _colour(names: Sequence[str]) -> alt.Color:
    import altair as alt

    scale = alt.Scale(domain=_printable(names), range=palette.colours_of(names))
    return alt.Color("series:N", scale=scale, legend=_legend(names))


def _dash(names: Sequence[str]) -> alt.StrokeDash:
    import altair as alt

    scale = alt.Scale(domain=_printable(names), range=[palette.dash_of(p) or [1, 0] for p in palette.places_of(names)])
    return alt.StrokeDash("series:N", scale=scale, legend=_legend(names))


def _shape(names: Sequence[str]) -> alt.Shape:
    import altair as alt

    scale = alt.Scale(domain=_printable(names), range=[palette.marker_of(p) for p in palette.places_of(names)])
    return alt.Shape("series:N", scale=scale, legend=_legend(names))


def _quantity(field: str, scale: alt.Scale, legend: alt.Legend) -> alt.Color:
    import altair as alt

    return alt.Color(f"{field}:Q", scale=scale, legend=legend)


def _whiskers(rows: Sequence[Row], names: Sequence[str]) -> list[alt.Chart]:
    """One standard error on each side of points, where errors are known."""
    import altair as alt

    found = []
    for axis, other in (("y", "x"), ("x", "y")):
        if any(row.get(f"{axis} error") is not None for row in rows):
            rule = alt.Chart().mark_rule(strokeWidth=1.2, opacity=0.55).encode(color=_colour(names))
            low, high = f"{axis} low:Q", f"{axis} high"
            ends = {axis: low, f"{axis}2": high, other: f"{other}:Q"}
            found.append(rule.encode(**ends))
    return found


def _guides(marks: Sequence[tuple[str, float]]) -> list[alt.Chart]:
    """Reference lines with their names, at either end in turn so that neighbours do not meet."""
    import altair as alt

    lines = [{"name": printable(name), "y": value} for name, value in sorted(marks, key=lambda mark: mark[1])]
    rule = alt.Chart(_data(lines)).mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color=palette.LIGHT["soft"])
    found = [rule.encode(y="y:Q", tooltip=[alt.Tooltip("name:N", title=" "), alt.Tooltip("y:Q", format=_FORMAT)])]
    for side, part in (("right", lines[::2]), ("left", lines[1::2])):
        if part:
            text = alt.Chart(_data(part)).mark_text(align=side, dy=-6, dx=-4 if side == "right" else 4, fontSize=11)
            place = alt.value("width") if side == "right" else alt.value(0)
            found.append(text.encode(y="y:Q", x=place, text="name:N", color=alt.value(palette.LIGHT["soft"])))
    return found


def _tooltips(rows: Sequence[Row], x: str, y: str) -> list[alt.Tooltip]:
    import altair as alt

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


def _finished(chart: alt.LayerChart, rows: Sequence[Row], columns: Mapping[str, str], height: int) -> alt.LayerChart:
    """With the theme, the names of its columns, and the width of whatever it stands in."""
    fields = set().union(*rows) if rows else set()
    named = {field: title or field for field, title in columns.items()}
    for axis in ("x", "y"):
        if f"{axis} error" in fields:
            named[f"{axis} error"] = f"{ERRORS} of {named[axis]}"
    if "note" in fields:
        named["note"] = "note"
    sized = chart.properties(width="container", usermeta={"columns": named}, config=theme())
    return sized.properties(height=height) if height else sized


def theme() -> dict[str, Any]:
    """How every figure looks."""
    ink, soft, line = (palette.LIGHT[name] for name in ("ink", "soft", "line"))
    axis = {
        "labelColor": soft,
        "titleColor": soft,
        "domainColor": soft,
        "tickColor": soft,
        "gridColor": line,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    }
    return {
        "background": palette.LIGHT["paper"],
        "font": 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif',
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"grid": False},
        "axisY": {
            "domain": False,
            "ticks": False,
            "labelLimit": 220,
            "labelPadding": 6,
            # The name of the axis lies above it, where a long one has room.
            "titleAngle": 0,
            "titleAlign": "left",
            "titleBaseline": "bottom",
            "titleX": 0,
            "titleY": -10,
        },
        "legend": {"labelColor": ink, "titleColor": soft, "labelFontSize": 12, "titleFontWeight": "normal"},
        "title": {"color": ink, "anchor": "start", "fontSize": 16},
        "text": {"color": ink},
    }
