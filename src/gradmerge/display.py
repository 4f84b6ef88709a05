"""How results are displayed: as one line at a prompt, and as a table in a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from .text import one_line

#: Characters of a line and of each of its parts, and rows of a table.
MAX_LINE, MAX_PART, MAX_ROWS = 100, 44, 40

View = tuple[Sequence[str], Sequence[Sequence[Any]], Sequence[str]]
"""Columns and rows of a table, and sentences above it."""


class OneLine:
    """A class whose repr is one short line."""

    def _line(self) -> list[str]:
        """Return the parts of the line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = ", ".join(_cut(one_line(part), MAX_PART) for part in self._line())
        return f"{type(self).__name__}({_cut(parts, MAX_LINE)})"


class Displayed(OneLine):
    """A result that notebooks show as a table, by default of its fields."""

    def _view(self) -> View:
        facts = {name: v if isinstance(v, float) else str(v) for name, v in vars(self).items() if name != "notes"}
        return [*facts], [[*facts.values()]], getattr(self, "notes", ())

    def _repr_html_(self) -> str:
        columns, rows, notes = self._view()
        words = "".join(f"<p>{_escaped(re.sub(r'[*`]', '', note))}</p>" for note in notes)
        table = _row(columns, "th") + "".join(_row(row, "td") for row in rows[:MAX_ROWS])
        more = f"<p>… of {len(rows)} rows</p>" if len(rows) > MAX_ROWS else ""
        return f"<div><strong>{_escaped(repr(self))}</strong>{words}<table>{table}</table>{more}</div>"


def _row(values: Sequence[Any], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_escaped(value)}</{tag}>" for value in values) + "</tr>"


def _escaped(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else html.escape(one_line(str(value)))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
