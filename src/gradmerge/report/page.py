"""Reports in one HTML file that needs nothing else: pages of text, figures and tables."""

from __future__ import annotations

import base64
import csv
import datetime
import hashlib
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from .. import __version__
from ..errors import MachineError
from ..io.atomic_dir import atomic_file
from ..text import one_line, plus_minus, printable, to_json
from ..urls import redact
from . import theme

if TYPE_CHECKING:
    import altair as alt
    from jinja2 import Template
    from markupsafe import Markup

Value = str | float | int | None
MISSING = "–"


def finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with four significant digits and commas for thousands. Whole numbers are shown in full."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    shown = f"{value:,}" if isinstance(value, int) else f"{float(value) + 0.0:,.{digits}g}"
    return shown.replace("-", "−")


def plain_words(metric: str) -> str:
    """Return a metric's name with spaces, such as `loss per token`."""
    return metric.replace("_", " ")


@dataclass(frozen=True)
class Table:
    """Columns that a reader can sort."""

    title: str
    slug: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""

    def csv(self) -> str:
        """Return the table as CSV with all digits. Errors have their own columns, and missing numbers are empty."""
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
        return one_line(value)
    # repr of a NumPy float would include its type.
    return repr(float(value)) if isinstance(value, float) else value


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


#: Rows of a figure's table in a page; its CSV has all.
SHOWN_ROWS = 500
#: Runs first: tables of figures stay hidden until the figure is drawn, or cannot be.
_STARTED = 'document.documentElement.className = "js";'


@dataclass(frozen=True)
class Figure:
    """A chart with its title and the stem of its file names."""

    title: str
    slug: str
    chart: alt.LayerChart

    def table(self) -> Table:
        """Return the numbers of the chart as a table."""
        chart: Any = self.chart
        named: Mapping[str, str] = chart.usermeta["columns"]
        rows: Sequence[dict[str, Value]] = [*chart.data.values, *chart.usermeta["more"]]
        return Table(self.title, self.slug, [*named.values()], [[row.get(field) for field in named] for row in rows])

    def csv(self) -> str:
        return self.table().csv()

    def json(self) -> str:
        """Return the chart as JSON that is safe in a script element."""
        spec: dict[str, Any] = self.chart.to_dict(validate=False)
        for name in ("$schema", "width", "config"):
            spec.pop(name, None)
        spec["datasets"] = {name: _by_column(rows) for name, rows in spec.get("datasets", {}).items()}
        return in_script(spec)


def _by_column(rows: Sequence[Mapping[str, Value]]) -> dict[str, Any]:
    """Return rows as field names and lists of values."""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    return {"fields": fields, "rows": [[row.get(field) for field in fields] for row in rows]}


def in_script(value: Any) -> str:
    return redact(to_json(value, indent=None)).replace("<", "\\u003c")


@cache
def library() -> str:
    """Vega, Vega-Lite and the interpreter that replaces eval, with their licenses."""
    licenses = theme.resource("vendor/LICENSES.txt").replace("*/", "* /")
    interpreter = theme.resource("vendor/vega-interpreter.js")
    interpreter = re.sub(r"^import (\{.*?\}) from 'vega-util';", r"const \1 = vega;", interpreter)
    interpreter = re.sub(r"export \{ expression as expressionInterpreter \};", "return expression;", interpreter)
    parts = [theme.resource("vendor/vega.min.js"), theme.resource("vendor/vega-lite.min.js")]
    parts += [f"const vegaInterpreter = (() => {{{interpreter}\n}})();"]
    return re.sub(r"\n//# sourceMappingURL=\S+", "", f"/*\n{licenses}*/\n" + "\n".join(parts))


@cache
def drawing() -> str:
    """Return the script that draws figures."""
    return theme.resource("charts.js")


@cache
def colors() -> str:
    """Light color → its CSS variable."""
    return in_script({color: f"var(--{name})" for name, color in theme.LIGHT.items()})


def digest(script: str) -> str:
    """Return the hash of a script for the content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@dataclass(frozen=True)
class Section:
    """Paragraphs with **bold** and `code`, then figures and tables."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """The content of a report. The verdict comes first."""

    title: str
    subtitle: str
    verdict: Sequence[str] = ()
    sections: Sequence[Section] = ()
    recipe: str = ""
    """YAML."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Names and paths for the end of the page."""
    commands: Sequence[str] = ()
    """What repeats the run."""
    notes: Sequence[str] = ()


def write_page(path: Path, page: Page) -> None:
    """Write a page, with the version and time in its provenance."""
    now = datetime.datetime.now(datetime.UTC)
    made = {"made by": f"gradmerge {__version__}", "made at": now.strftime("%Y-%m-%d %H:%M UTC")}
    text = html(replace(page, provenance=made | {**page.provenance}))
    with atomic_file(path) as partial:
        # Names that are not Unicode are replaced.
        partial.write_bytes(text.encode("utf-8", "replace"))


def write_report(folder: Path, page: Page) -> list[Path]:
    """Write report.html, and the numbers of each figure and table beside it. Returns the paths, the report first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be created: {error.strerror or error}") from error
    paths = [folder / "report.html"]
    for section in _with_file_names(page.sections):
        items: list[Figure | Table] = [*section.figures, *section.tables]
        for item in items:
            paths.append(folder / f"{item.slug}.csv")
            with atomic_file(paths[-1]) as partial:
                partial.write_bytes(redact(item.csv()).encode("utf-8", "replace"))
    write_page(paths[0], page)
    return paths


def html(page: Page) -> str:
    """Return the report as HTML. The same page gives the same text."""
    from markupsafe import Markup

    drawn = any(section.figures for section in page.sections)
    notes = [Section("Notes", "\n\n".join(page.notes))] if page.notes else []
    scripts = [*([library()] if drawn else []), f"{drawing()}\n{theme.resource('page.js')}"]
    return template("page.html").render(
        page=page,
        sections=_with_file_names([*page.sections, *notes]),
        version=__version__,
        style=Markup(theme.variables() + theme.resource("page.css")),
        scripts=[Markup(script) for script in scripts],
        started=Markup(_STARTED),
        policy=Markup(" ".join(f"'{digest(script)}'" for script in (_STARTED, *scripts))),
        theme=Markup(in_script(theme.chart_config())),
        colors=Markup(colors()),
    )


@cache
def template(name: str) -> Template:
    """Load a template. Jinja escapes everything except Markup, which only this module makes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    engine = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)
    engine.finalize, engine.trim_blocks, engine.keep_trailing_newline = finalize, True, True
    engine.filters |= {"rich": rich, "paragraphs": _paragraphs, "columns": columns_of, "shown": _first_rows}
    engine.filters["json"] = lambda figure: Markup(figure.json())
    return engine.get_template(name)


def visible(text: str) -> str:
    """Text without secrets of URLs, and without characters that HTML cannot contain or that have an effect."""
    return re.sub("[\ufffe\uffff]", "\ufffd", printable(redact(text)))


def rich(words: str) -> Markup:
    """Convert a paragraph with **bold** and `code` to HTML."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`\n]+)`", str(escape(visible(words.replace(" ± ", "\u00a0±\u00a0")))))
    parts[::2] = [re.sub(r"\*\*(?=\S)(.+?)\*\*", r"<strong>\1</strong>", part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(parts))


def _paragraphs(words: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", words.strip()) if part]


def _first_rows(table: Table) -> Table:
    """Return the first rows of a figure's table, for readers without JavaScript or with a screen reader."""
    cut = f"The first {SHOWN_ROWS} of {len(table.rows)} rows." if len(table.rows) > SHOWN_ROWS else ""
    return replace(table, rows=table.rows[:SHOWN_ROWS], note=cut)


def _with_file_names(sections: Sequence[Section]) -> list[Section]:
    """Return the sections with unique slugs that are safe file names."""
    taken = {"report"}

    def free(slug: str) -> str:
        stem = re.sub(r"[^a-z0-9._-]+", "-", slug.lower()).strip(".-")[:80] or "figure"
        names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
        taken.add(name := next(name for name in names if name not in taken))
        return name

    found = []
    for section in sections:
        figures = [replace(figure, slug=free(figure.slug)) for figure in section.figures]
        found.append(replace(section, figures=figures, tables=[replace(t, slug=free(t.slug)) for t in section.tables]))
    return found
