"""Tables of a report, as a reader sees them and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..text import one_line, plus_minus
from .formatting import NONE, column, shorten

Value = str | float | int | None
#: Names and paths longer than this lose their middle; sentences do not.
_LONG_NAME = 44


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
        """Numbers in full, so that reading gives them back; a missing one is empty. Errors have their own columns."""
        out = io.StringIO()
        columns: list[Sequence[object]] = []
        for title, *values in zip(self.columns, *self.rows, strict=True):
            errors = [getattr(value, "error", None) for value in values]
            columns += [[title, *values]]
            columns += [[f"{title}, standard error", *errors]] if any(error is not None for error in errors) else []
        csv.writer(out, lineterminator="\n").writerows(map(_written, line) for line in zip(*columns, strict=True))
        return out.getvalue()


def _written(value: object) -> object:
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


class Cell(NamedTuple):
    """A value as it is shown."""

    text: str
    kind: str
    full: str = ""
    """The value to sort by, if not the text."""


class Column(NamedTuple):
    """Values one below the other, as they are shown."""

    title: str
    numeric: bool
    cells: Sequence[Cell]

    @property
    def width(self) -> int:
        """Letters that do not break: of the longest number, name or word."""
        texts = [cell.text for cell in self.cells if cell.kind]
        words = [word for text in (self.title, *(cell.text for cell in self.cells)) for word in text.split()]
        return max(map(len, [*texts, *words]), default=0)


def columns_of(table: Table) -> list[Column]:
    return [_column(title, [row[j] for row in table.rows]) for j, title in enumerate(table.columns)]


def _column(title: str, values: Sequence[Value]) -> Column:
    known = [value for value in values if value is not None]
    numbers = [value for value in known if not isinstance(value, str)]
    numeric = bool(known) and len(numbers) == len(known)
    texts = map(plus_minus, column([value if isinstance(value, int) else float(value) for value in numbers]), numbers)
    cells = []
    for value in values:
        if value is None:
            cells.append(Cell(NONE, "none num" if numeric else "none"))
        elif not isinstance(value, str):
            cells.append(Cell(next(texts), "num", repr(float(value))))
        elif " " in value or len(value) <= _LONG_NAME:
            cells.append(Cell(value, "" if " " in value else "name"))
        else:
            cells.append(Cell(shorten(value, _LONG_NAME), "name", value))
    return Column(title, numeric, cells)
