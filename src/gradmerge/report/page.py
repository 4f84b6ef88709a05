"""A report in one HTML file that needs nothing else, with the numbers of its figures and tables as files beside it."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import MachineError
from ..text import printable
from . import palette
from .assets import Figure, colours, digest, in_script, library, page_script
from .tables import Column, Table, Value, columns_of
from .whole_file import whole_file

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

__all__ = ["Figure", "Page", "Section", "Table", "Value", "html", "made", "rich", "write_report"]

#: Before anything is shown: a figure's numbers stay hidden until it is drawn, or cannot be.
_STARTED = 'document.documentElement.className = "js";'
#: Points across a printed page, and of a letter and the room around a column at the usual size of print.
_PAPER, _LETTER, _ROOM, _PRINT = 470, 5.0, 9, 8.5


@dataclass(frozen=True)
class Section:
    """Paragraphs, where **bold** and `code` are understood, then figures and tables."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
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


def made() -> dict[str, str]:
    """What made a report, and when: the beginning of its provenance."""
    now = datetime.datetime.now(datetime.UTC)
    return {"made by": f"gradmerge {__version__}", "made at": now.strftime("%Y-%m-%d %H:%M UTC")}


def write_report(folder: Path, page: Page) -> list[Path]:
    """Write report.html, and the numbers of each figure and table beside it; each file appears whole or not at all.

    The report comes last, and first in the list that is returned.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be made: {error.strerror or error}") from error
    items: list[Figure | Table] = []
    for section in _with_file_names(page.sections):
        items += [*section.figures, *section.tables]
    beside = {folder / f"{item.slug}.csv": item.csv() for item in items}
    report = folder / "report.html"
    for path, content in (*beside.items(), (report, html(page))):
        with whole_file(path) as partial:
            # A name that is not Unicode must not lose a report.
            partial.write_bytes(content.encode("utf-8", "replace"))
    return [report, *beside]


def html(page: Page) -> str:
    """The report as text. The same page gives the same text."""
    from markupsafe import Markup

    drawn = any(section.figures for section in page.sections)
    scripts = [*([library()] if drawn else []), page_script()]
    return template("page.html").render(
        page=page,
        sections=_with_file_names(page.sections),
        version=__version__,
        style=Markup(palette.variables() + palette.resource("page.css")),
        scripts=[Markup(script) for script in scripts],
        started=Markup(_STARTED),
        policy=Markup(" ".join(f"'{digest(script)}'" for script in (_STARTED, *scripts))),
        theme=Markup(in_script(palette.theme())),
        colours=Markup(colours()),
    )


@cache
def template(name: str) -> Template:
    """The layout. Jinja escapes everything but Markup, which only this room makes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    engine = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)
    engine.finalize, engine.trim_blocks, engine.keep_trailing_newline = finalize, True, True
    engine.filters |= {"rich": rich, "paragraphs": _paragraphs, "columns": columns_of, "print_size": _print_size}
    engine.filters["json"] = lambda figure: Markup(figure.json())
    return engine.get_template(name)


def visible(text: str) -> str:
    """Text in characters that HTML can hold and that do nothing but show."""
    return re.sub("[\ufffe\uffff]", "\ufffd", printable(text))


def rich(words: str) -> Markup:
    """One paragraph: **bold** and `code` are understood, all else is text."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`\n]+)`", str(escape(visible(words.replace(" ± ", "\u00a0±\u00a0")))))
    parts[::2] = [re.sub(r"\*\*(?=\S)(.+?)\*\*", r"<strong>\1</strong>", part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(parts))


def _paragraphs(words: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", words.strip()) if part]


def _print_size(columns: Sequence[Column]) -> str:
    """The size of letters, in points, at which no word of a table has to break on paper."""
    across = sum(column.width * _LETTER + _ROOM for column in columns)
    return f"{max(4.0, min(_PRINT, _PRINT * _PAPER / max(1.0, across))):.1f}pt"


def _with_file_names(sections: Sequence[Section]) -> list[Section]:
    """The same sections, where each slug is the name of a file, safe and not taken."""
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
