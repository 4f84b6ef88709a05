"""Drawing heat maps: rows of cells from dark to light, with numbers where they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from . import palette
from .numbers import finite, fit, number, text_width
from .svg import Drawing, described, px, text

if TYPE_CHECKING:
    from .charts import HeatMap

_LABEL = 11.0
_TALLEST = 1000.0
#: The longest name of a column that is written slanted.
_SLANTED = 80.0


def draw_heat(chart: HeatMap, standalone: bool = False, narrow: bool = False) -> str:
    return _Map(chart, standalone, narrow).draw()


class _Map:
    """One drawing, with its sizes."""

    def __init__(self, chart: HeatMap, standalone: bool, narrow: bool) -> None:
        self.chart = chart
        self.drawing = Drawing(chart.title, chart.slug, "", chart.label, standalone, narrow, chart.one_size)
        most = 150.0 if chart.one_size else 104.0 if narrow else 230.0
        self.left = min(most, max((text_width(r, _LABEL) for r in chart.rows), default=0)) + 10
        self.tall = max(5.0, min(26.0, _TALLEST / max(1, len(chart.rows))))
        count = max(1, len(chart.columns))
        room = (self.drawing.width - self.left - 4) / count
        names = max((text_width(c, _LABEL) for c in chart.columns), default=0)
        self.slanted = names > min(140.0, room) - 4
        self.over = 0.71 * min(names, _SLANTED) + 6
        if self.slanted:
            # Slanted names lean to the right, and the last one over the edge.
            room = (self.drawing.width - self.left - self.over) / (count - 0.5)
        self.wide = min(140.0, room)
        known = [v for row in chart.values for v in row if self.shown(v)]
        self.low, self.high = min(known, default=0.0), max(known, default=0.0)
        self.digits = next((digits for digits in (3, 2) if self.tall >= 16 and self.fits(digits)), 0)

    def shown(self, value: float | None) -> TypeGuard[float]:
        return finite(value) and (value > 0 or not self.chart.log)

    def fits(self, digits: int) -> bool:
        """Whether numbers of ``digits`` digits have room in a cell."""
        texts = (number(v, digits) for row in self.chart.values for v in row)
        return max((text_width(t, 10) for t in texts), default=0) + 4 <= self.wide

    def share(self, value: float) -> float:
        """Where a value stands between the lowest and the highest."""
        if self.high <= self.low:
            return 0.5
        if self.chart.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        # Halves, so that the difference of two huge numbers is finite.
        span = self.high / 2 - self.low / 2
        return (value / 2 - self.low / 2) / span if span else 0.5

    def draw(self) -> str:
        self.legend()
        self.column_names()
        top = self.drawing.bottom
        self.row_names(top)
        for i, (name, values) in enumerate(zip(self.chart.rows, self.chart.values, strict=True)):
            self.row(name, values, top + i * self.tall)
        self.drawing.bottom = top + len(self.chart.rows) * self.tall + 4
        if not self.chart.rows or not self.chart.columns:
            self.drawing.bottom += 20
            self.drawing.add(text(4, self.drawing.bottom - 8, "no values to show", "soft"))
        extent = f"from {number(self.low)} to {number(self.high)}"
        size = f"{len(self.chart.rows)} rows by {described(self.chart.columns)}"
        return self.drawing.document(f"Heat map of {self.chart.label}, {extent}: {size}.", "cells")

    def legend(self) -> None:
        """A bar of colours with the numbers they stand for."""
        drawing, chart = self.drawing, self.chart
        drawing.caption(chart.label + (", logarithmic colours" if chart.log else ""))
        if not any(self.shown(v) for row in chart.values for v in row):
            return
        stops = "".join(f'<stop offset="{i / 8}" stop-color="{palette.shade(i / 8)}"/>' for i in range(9))
        drawing.add(f'<linearGradient id="{drawing.id("g")}">{stops}</linearGradient>')
        y, width = drawing.bottom - 2, min(280.0, drawing.width - 40)
        drawing.add(f'<rect x="4" y="{px(y)}" width="{px(width)}" height="10" rx="2" fill="url(#{drawing.id("g")})"/>')
        ends = [("", 0.0, self.low), (" mid", 0.5, self.middle()), (" end", 1.0, self.high)]
        for place, share, value in ends if self.high > self.low else [(" mid", 0.5, self.low)]:
            drawing.add(text(4 + share * width, y + 24, number(value, 3), f"soft small{place}"))
        drawing.bottom = y + 40

    def middle(self) -> float:
        if self.chart.log:
            return math.exp((math.log(self.low) + math.log(self.high)) / 2)
        return self.low / 2 + self.high / 2

    def column_names(self) -> None:
        drawing, names = self.drawing, self.chart.columns
        shown = [fit(name, _SLANTED if self.slanted else self.wide, _LABEL) for name in names]
        drawing.bottom += self.over if self.slanted else 10
        for j, (name, short) in enumerate(zip(names, shown, strict=True)):
            x, y = self.left + (j + 0.5) * self.wide, drawing.bottom
            turned = f' transform="rotate(-45 {px(x)} {px(y)})"' if self.slanted else ""
            drawing.add(text(x, y, short, "small" if self.slanted else "small mid", name, turned))
        drawing.bottom += 7

    def row_names(self, top: float) -> None:
        every = math.ceil(13 / self.tall)
        for i, name in enumerate(self.chart.rows):
            if i % every == 0:
                y = top + (i + 0.5) * self.tall + 3.8
                self.drawing.add(text(self.left - 8, y, fit(name, self.left - 10, _LABEL), "small end", name))

    def row(self, name: str, values: Sequence[float | None], y: float) -> None:
        drawing, cells, labels = self.drawing, [], []
        gap = 1.0 if self.tall > 9 else 0.0
        for j, (column, value) in enumerate(zip(self.chart.columns, values, strict=True)):
            x = self.left + j * self.wide
            colour = palette.shade(self.share(value)) if self.shown(value) else ""
            fill = f' fill="{colour}"' if colour else ' class="hole"'
            shape = f'<path d="M{px(x)} {px(y)}h{px(self.wide - 1)}v{px(self.tall - gap)}h{px(1 - self.wide)}z"{fill}'
            cells.append(drawing.point(shape, name, column, number(value)))
            if self.digits:
                on = "soft" if not colour else "onlight" if palette.luminance(colour) > 0.2 else "ondark"
                short = number(value, self.digits)
                labels.append(text(x + self.wide / 2, y + self.tall / 2 + 3.4, short, f"tiny mid {on}"))
        drawing.add(f'<g class="pts cells"{drawing.head(name)}>{"".join(cells)}</g>', *labels)
