"""Charts as data. Each can draw itself as SVG and give its numbers as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..text import one_line
from .bars import draw_bars
from .heat import draw_heat
from .xy import draw_lines, draw_scatter

#: A heat map with more rows is drawn once, for phones and screens alike.
TALL = 40


@dataclass(frozen=True)
class Series:
    """Points of one name; a missing value is None and leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    labels: Sequence[str] = ()
    """What the tooltip of each point says besides its numbers."""

    def points(self) -> Iterable[tuple[float, float | None, str]]:
        labels = [*self.labels, *[""] * (len(self.x) - len(self.labels))]
        return zip(self.x, self.y, labels, strict=True)


@dataclass(frozen=True)
class LineChart:
    """Curves, with reference lines (name, y) and starred points (name of a series, x, y)."""

    title: str
    slug: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[str, float]] = ()
    best: Sequence[tuple[str, float, float]] = ()

    svg = draw_lines

    def csv(self) -> str:
        marks = [("reference", name, None, y, "") for name, y in self.marks]
        return _points_csv(self, [*marks, *(("best", name, x, y, "") for name, x, y in self.best)])


@dataclass(frozen=True)
class BarChart:
    """One value for each group (a task) in each series (a method)."""

    title: str
    slug: str
    y_label: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    log: bool = False

    svg = draw_bars

    def csv(self) -> str:
        rows: list[Sequence[object]] = [("group", "series", self.y_label or "value")]
        for name, values in self.series.items():
            rows += [(group, name, value) for group, value in zip(self.groups, values, strict=True)]
        return as_csv(rows)


@dataclass(frozen=True)
class HeatMap:
    """One value for each row (a layer) and column (a task)."""

    title: str
    slug: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    label: str
    log: bool = False

    svg = draw_heat

    @property
    def one_size(self) -> bool:
        """Whether one drawing serves phones and screens; thousands of cells need not be in a page twice."""
        return len(self.rows) > TALL

    def csv(self) -> str:
        rows: list[Sequence[object]] = [("row", "column", self.label or "value")]
        for name, values in zip(self.rows, self.values, strict=True):
            rows += [(name, column, value) for column, value in zip(self.columns, values, strict=True)]
        return as_csv(rows)


@dataclass(frozen=True)
class ScatterChart:
    """Points, with a line through the Pareto front, and one where both axes are equal."""

    title: str
    slug: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    front: Sequence[tuple[float, float]] = ()
    diagonal: bool = False

    svg = draw_scatter

    def csv(self) -> str:
        return _points_csv(self, [("front", "", x, y, "") for x, y in self.front])


Chart = LineChart | BarChart | HeatMap | ScatterChart


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Numbers in full, so that reading gives them back; a missing one is empty."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return _not_a_formula(one_line(value))
    # Numbers of numpy are floats too, but name their type.
    return repr(float(value)) if isinstance(value, float) else value


def _not_a_formula(text: str) -> str:
    """A cell that a spreadsheet shows as it is, where it would compute what begins so; a number stays one."""
    if not text.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _points_csv(chart: LineChart | ScatterChart, others: Sequence[Sequence[object]]) -> str:
    columns = ("kind", "series", chart.x_label or "x", chart.y_label or "y", "label")
    points = [("point", series.name, *point) for series in chart.series for point in series.points()]
    return as_csv([columns, *points, *others])
