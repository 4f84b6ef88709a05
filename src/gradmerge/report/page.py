"""A report in one HTML file that needs nothing else, with its figures and tables as files beside it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._version import __version__
from ..errors import MachineError
from ..text import plus_minus
from . import palette
from .charts import Chart, HeatMap, as_csv
from .numbers import NONE, column, shorten
from .svg import safe_name, visible
from .whole_file import whole_file

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

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
        """The standard errors of a column have one of their own, after it."""
        parts: list[list[object]] = []
        for title, *values in zip(self.columns, *self.rows, strict=True):
            parts.append([title, *values])
            errors = [getattr(value, "error", None) for value in values]
            if any(error is not None for error in errors):
                parts.append([f"{title}, standard error", *errors])
        return as_csv(list(zip(*parts, strict=True)))


@dataclass(frozen=True)
class Section:
    """Paragraphs, where **bold** and `code` are understood, then figures and tables."""

    title: str
    text: str = ""
    figures: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """All that a report says. The verdict comes first; the recipe is YAML, the commands repeat the run."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    recipe: str
    provenance: Mapping[str, str]
    commands: Sequence[str] = ()


def write_report(folder: Path, page: Page) -> list[Path]:
    """Write report.html, and each figure and table beside it; each file appears whole or not at all.

    The report comes last, so that its links lead somewhere, and first in the list that is returned.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be made: {error.strerror or error}") from error
    beside = {}
    for section in _with_file_names(page.sections):
        for item in (*section.figures, *section.tables):
            if not isinstance(item, Table):
                beside[folder / f"{item.slug}.svg"] = item.svg(standalone=True)
            beside[folder / f"{item.slug}.csv"] = item.csv()
    report = folder / "report.html"
    for path, content in (*beside.items(), (report, html(page))):
        with whole_file(path) as partial:
            # A name that is not Unicode must not lose a report.
            partial.write_bytes(content.encode("utf-8", "replace"))
    return [report, *beside]


def html(page: Page) -> str:
    """The report as text. The same page gives the same text."""
    from markupsafe import Markup

    script = palette.resource("page.js")
    style = palette.variables() + palette.resource("page.css") + palette.resource("chart.css")
    return _template().render(
        page=page,
        sections=_with_file_names(page.sections),
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@cache
def _template() -> Template:
    """The layout. Jinja escapes everything but Markup, which only this file makes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    engine = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)
    engine.finalize, engine.trim_blocks, engine.keep_trailing_newline = finalize, True, True
    engine.filters |= {"rich": rich, "paragraphs": _paragraphs, "columns": _columns, "drawn": _drawn}
    return engine.get_template("page.html")


def rich(words: str) -> Markup:
    """One paragraph: **bold** and `code` are understood, all else is text."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`\n]+)`", str(escape(visible(words))))
    parts[::2] = [re.sub(r"\*\*(?=\S)(.+?)\*\*", r"<strong>\1</strong>", part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(parts))


def _paragraphs(words: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", words.strip()) if part]


def _drawn(chart: Chart) -> Markup:
    """The chart for screens, and for phones where those need another; charts escape the names in them."""
    from markupsafe import Markup

    one_size = isinstance(chart, HeatMap) and chart.one_size
    return Markup(chart.svg() + ("" if one_size else chart.svg(narrow=True)))


class _Cell(NamedTuple):
    text: str
    kind: str
    full: str = ""
    """The value to sort by, if not the text."""


class _Column(NamedTuple):
    title: str
    numeric: bool
    cells: Sequence[_Cell]


def _columns(table: Table) -> list[_Column]:
    return [_column(title, [row[j] for row in table.rows]) for j, title in enumerate(table.columns)]


def _column(title: str, values: Sequence[Value]) -> _Column:
    known = [value for value in values if value is not None]
    numbers = [value for value in known if not isinstance(value, str)]
    numeric = bool(known) and len(numbers) == len(known)
    texts = map(plus_minus, column([value if isinstance(value, int) else float(value) for value in numbers]), numbers)
    cells = []
    for value in values:
        if value is None:
            cells.append(_Cell(NONE, "none num" if numeric else "none"))
        elif not isinstance(value, str):
            cells.append(_Cell(next(texts), "num", repr(float(value))))
        elif " " in value or len(value) <= _LONG_NAME:
            cells.append(_Cell(value, "" if " " in value else "name"))
        else:
            cells.append(_Cell(shorten(value, _LONG_NAME), "name", value))
    return _Column(title, numeric, cells)


def _with_file_names(sections: Sequence[Section]) -> list[Section]:
    """The same sections, where each slug is the name of a file, safe and not taken."""
    taken = {"report"}

    def free(slug: str) -> str:
        stem = safe_name(slug)
        names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
        taken.add(name := next(name for name in names if name not in taken))
        return name

    found = []
    for section in sections:
        figures = [replace(figure, slug=free(figure.slug)) for figure in section.figures]
        found.append(replace(section, figures=figures, tables=[replace(t, slug=free(t.slug)) for t in section.tables]))
    return found
