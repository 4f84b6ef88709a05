"""Drawing bar charts: lying bars, so that names and numbers have room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import palette
from .numbers import TINY, clipped, finite, fit, log_ticks, number, text_width, tick_labels, tick_step, ticks
from .svg import TEXT, Drawing, Scale, described, lines_of, px, text

if TYPE_CHECKING:
    from .charts import BarChart

_GAP = 16.0


def draw_bars(chart: BarChart, standalone: bool = False, narrow: bool = False) -> str:
    drawing = Drawing(chart.title, chart.slug, "", chart.y_label, standalone, narrow)
    drawing.add(*(_pattern(drawing, i) for i in range(len(chart.series)) if palette.hatch(i)))
    swatches = [
        (name, f'<rect x="2" y="-6" width="20" height="12" rx="2"{_fill(drawing, i)}/>')
        for i, name in enumerate(chart.series)
    ]
    drawing.legend(swatches)
    drawing.caption(chart.y_label)
    low, high = _extent(chart)
    marked = log_ticks(low, high, 4 if narrow else 7) if chart.log else ticks(low, high, 4 if narrow else 7)
    across = _scale(drawing, chart, low, high)
    thick = max(10.0, min(18.0, round(48 / max(1, len(chart.series)))))
    above = 18.0 if narrow else 0.0
    pitch = above + thick * len(chart.series) + _GAP
    top, bottom = drawing.bottom, drawing.bottom + max(1, len(chart.groups)) * pitch
    drawing.add(lines_of(((across(t), top, across(t), bottom) for t in marked), "grid"))
    for index, name in enumerate(chart.series):
        starts = [top + g * pitch + above + _GAP / 2 + index * thick for g in range(len(chart.groups))]
        _bars(drawing, chart, index, name, starts, thick, across)
    zero = low if chart.log else 0.0
    drawing.add(lines_of([(across(zero), top, across(zero), bottom)], "axis"))
    _group_names(drawing, chart.groups, across, top, pitch, above)
    labels = [number(t) for t in marked] if chart.log else tick_labels(marked)
    drawing.add(*(text(across(t), bottom + 16, words, "soft mid") for t, words in zip(marked, labels, strict=True)))
    if not any(finite(v) for values in chart.series.values() for v in values):
        drawing.say_empty(across, top, bottom)
    drawing.bottom = bottom + 20
    return drawing.document(
        f"Bar chart of {chart.y_label} for {described(chart.groups)}; by {described(list(chart.series))}.", "bars"
    )


def _extent(chart: BarChart) -> tuple[float, float]:
    """From zero, or from a power of ten, to a round number beyond the longest bar."""
    known = [v for values in chart.series.values() for v in values if finite(v) and (v > 0 or not chart.log)]
    if chart.log:
        low = 10.0 ** math.floor(math.log10(max(TINY, clipped(min(known, default=1)))) - 1e-9)
        return low, max(10.0 ** math.ceil(math.log10(max(TINY, clipped(max(known, default=1)))) - 1e-9), low * 10)
    low, high = clipped(min([0.0, *known])), clipped(max([0.0, *known]))
    if high - low < TINY:
        return 0.0, 1.0
    step = tick_step(low, high, 7)
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def _scale(drawing: Drawing, chart: BarChart, low: float, high: float) -> Scale:
    names = 0.0 if drawing.narrow else min(170.0, max((text_width(g, TEXT) for g in chart.groups), default=0) + 12)
    texts = [number(v) for values in chart.series.values() for v in values]
    beside = max((text_width(t, 10) for t in texts), default=0) + 10
    left = max(names, 6 + text_width(number(low), TEXT) / 2) + (beside if low < 0 else 0)
    return Scale(low, high, left, drawing.width - beside, math.log10 if chart.log else float)


def _group_names(
    drawing: Drawing, groups: Sequence[str], across: Scale, top: float, pitch: float, above: float
) -> None:
    for g, group in enumerate(groups):
        if above:
            y = top + g * pitch + above + _GAP / 2 - 5
            drawing.add(text(4, y, fit(group, drawing.width - 8, TEXT), "halo", group))
        else:
            y = top + (g + 0.5) * pitch + 4
            drawing.add(text(across.start - 10 if across.low >= 0 else 158, y, fit(group, 158, TEXT), "end", group))


def _bars(
    drawing: Drawing, chart: BarChart, index: int, name: str, starts: Sequence[float], thick: float, across: Scale
) -> None:
    shapes, labels = [], []
    zero = across(across.low if chart.log else 0.0)
    for group, value, y in zip(chart.groups, chart.series[name], starts, strict=True):
        drawn = finite(value) and (value > 0 or not chart.log)
        end = across(max(clipped(value or 0.0), across.low)) if drawn else zero
        width = max(abs(end - zero), 1.0) if drawn else 0.0
        shape = f'<rect x="{px(min(zero, end))}" y="{px(y + 0.5)}" width="{px(width)}" height="{px(thick - 1)}"'
        shapes.append(drawing.point(shape + _fill(drawing, index), name, group, number(value)))
        x, side = (end - 5, "tiny end") if end < zero else (end + 5, "tiny")
        labels.append(text(x, y + thick / 2 + 3.6, number(value), side))
    drawing.series(index, name, "".join(labels), shapes)


def _fill(drawing: Drawing, index: int) -> str:
    return f' fill="url(#{drawing.id(f"h{index}")})"' if palette.hatch(index) else ' fill="currentColor"'


def _pattern(drawing: Drawing, index: int) -> str:
    opening = f'<pattern id="{drawing.id(f"h{index}")}" class="{palette.series_class(index)}"'
    hatch = f'<path class="hatch" d="{palette.hatch(index)}"/>'
    square = 'width="6" height="6"'
    return f'{opening} {square} patternUnits="userSpaceOnUse"><rect {square} fill="currentColor"/>{hatch}</pattern>'
