"""How results are displayed: as one line at a prompt, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from .text import one_line

if TYPE_CHECKING:
    from jinja2 import Template

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
        columns, rows, words = self._view()
        return _template().render(line=repr(self), columns=columns, rows=rows, words=words, most=MAX_ROWS)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@cache
def _template() -> Template:
    """Return the template of the table, which escapes all values."""
    from jinja2 import Environment

    def finalize(value: Any) -> Any:
        if isinstance(value, str) and not hasattr(value, "__html__"):
            return one_line(value)
        return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else value

    return Environment(autoescape=True, finalize=finalize).from_string(
        "<div><strong>{{ line }}</strong>"
        "{% for text in words %}<p>{{ text|replace('**', '')|replace('`', '') }}</p>{% endfor %}"
        "<table><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>"
        "{% for row in rows[:most] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}"
        "</table>{% if rows|length > most %}<p>… of {{ rows|length }} rows</p>{% endif %}</div>"
    )
