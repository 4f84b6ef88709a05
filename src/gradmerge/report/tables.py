"""Tables of a report, as text and as CSV, and numbers as text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from ..text import one_line, plus_minus

Value = str | float | int | None
MISSING = "–"


def finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    """Four significant digits, thousands with commas; whole numbers in full."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if isinstance(value, bool):
        return "yes" if value else "no"
    shown = f"{value:,}" if isinstance(value, int) else f"{float(value) + 0.0:,.{digits}g}"
    return shown.replace("-", "−")


def plain_words(metric: str) -> str:
    """The name of a metric for people: loss per token."""
    return metric.replace("_", " ")


@dataclass(frozen=True)
class Table:
    """Columns that a reader can sort."""

    title: str
    slug: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row has {len(row)} values for {len(self.columns)} columns")

    def csv(self) -> str:
        """Numbers in full, errors in columns of their own; a missing number is empty."""
        out = io.StringIO()
        columns: list[Sequence[object]] = []
        for title, *values in zip(self.columns, *self.rows, strict=True):
            errors = [getattr(value, "error", None) for value in values]
            columns += [[title, *values]]
            columns += [[f"{title}, standard error", *errors]] if any(error is not None for error in errors) else []
        csv.writer(out, lineterminator="\n").writerows(map(_csv_cell, line) for line in zip(*columns, strict=True))
        return out.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        return _not_a_formula(one_line(value))
    # repr of a NumPy float would include its type.
    return repr(float(value)) if isinstance(value, float) else value


def _not_a_formula(text: str) -> str:
    """Text that a spreadsheet does not run as a formula; a number stays a number."""
    if not text.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


class Cell(NamedTuple):
    """A value as text."""

    text: str
    kind: str
    """CSS classes."""
    full: str = ""
    """The value to sort by, if that is not the text."""


class Column(NamedTuple):
    """The cells of a column."""

    title: str
    numeric: bool
    cells: Sequence[Cell]


def columns_of(table: Table) -> list[Column]:
    return [_column(title, [row[j] for row in table.rows]) for j, title in enumerate(table.columns)]


def _column(title: str, values: Sequence[Value]) -> Column:
    known = [value for value in values if value is not None]
    numeric = bool(known) and not any(isinstance(value, str) for value in known)

    def cell(value: Value) -> Cell:
        if value is None:
            return Cell(MISSING, "none num" if numeric else "none")
        if isinstance(value, str):
            return Cell(value, "" if " " in value else "name")
        return Cell(plus_minus(number(value), value), "num", repr(float(value)))

    return Column(title, numeric, list(map(cell, values)))
