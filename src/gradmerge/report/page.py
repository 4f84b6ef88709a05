"""A report in one HTML file that needs nothing else, with its figures and tables as files beside it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._version import __version__
from ..errors import MachineError
from . import palette
from .charts import Chart, as_csv
from .numbers import NONE, column, shorten
from .svg import escape, safe_name

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
        return as_csv([self.columns, *self.rows])


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
    beside = []
    for section in _with_file_names(page.sections):
        for item in (*section.figures, *section.tables):
            if not isinstance(item, Table):
                beside.append(_write(folder / f"{item.slug}.svg", item.svg(standalone=True)))
            beside.append(_write(folder / f"{item.slug}.csv", item.csv()))
    return [_write(folder / "report.html", html(page)), *beside]


def html(page: Page) -> str:
    """The report as text. The same page gives the same text."""
    script = palette.resource("page.js")
    style = palette.variables() + palette.resource("page.css") + palette.resource("chart.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script but ours runs, whatever a name in the report may hold.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = [_section(section, f"s{i}") for i, section in enumerate(_with_file_names(page.sections))]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="gradmerge {__version__}">
<title>{escape(page.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="brand">gradmerge</p>
<h1>{escape(page.title)}</h1>
{f'<p class="subtitle">{rich(page.subtitle)}</p>' if page.subtitle else ""}
</header>
{_contents(page)}
<main>
{_verdict(page.verdict)}
{"".join(sections)}
{_repeat(page)}
</main>
<footer>
{_provenance(page.provenance)}
</footer>
<div id="tip" role="status" hidden></div>
<script>{script}</script>
</body>
</html>
"""


def rich(words: str) -> str:
    """One paragraph: **bold** and `code` are understood, all else is text."""
    parts = re.split(r"`([^`\n]+)`", words)
    parts[::2] = [re.sub(r"\*\*(?=\S)(.+?)\*\*", r"<strong>\1</strong>", escape(part)) for part in parts[::2]]
    parts[1::2] = [f"<code>{escape(part)}</code>" for part in parts[1::2]]
    return "".join(parts)


def _paragraphs(words: str) -> str:
    return "".join(f"<p>{rich(part)}</p>" for part in re.split(r"\n\s*\n", words.strip()) if part)


def _contents(page: Page) -> str:
    if len(page.sections) < 2:
        return ""
    links = [(f"s{i}", section.title) for i, section in enumerate(page.sections)]
    if page.recipe or page.commands:
        links.append(("repeat", "Repeat"))
    items = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _verdict(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    first, *others = (rich(sentence) for sentence in sentences)
    rest = "".join(f"<p>{other}</p>" for other in others)
    return f'<section class="verdict" aria-label="Verdict"><p class="lead">{first}</p>{rest}</section>'


def _section(section: Section, anchor: str) -> str:
    figures = "".join(_figure(figure) for figure in section.figures)
    tables = "".join(_table(table) for table in section.tables)
    return (
        f'<section id="{anchor}"><h2>{escape(section.title)}</h2>'
        f'<div class="text">{_paragraphs(section.text)}</div>{figures}{tables}</section>\n'
    )


def _figure(chart: Chart) -> str:
    drawings = chart.svg() + ("" if chart.one_size else chart.svg(narrow=True))
    return f'<figure><figcaption>{escape(chart.title)}{_files(chart.slug, "svg", "csv")}</figcaption><div class="drawn">{drawings}</div></figure>\n'


def _files(name: str, *endings: str) -> str:
    links = "".join(f'<a href="{escape(name)}.{e}" download>{e.upper()}</a>' for e in endings)
    return f'<span class="files">{links}</span>'


def _table(table: Table) -> str:
    columns = [[row[j] for row in table.rows] for j in range(len(table.columns))]
    shown = [_column(values) for values in columns]
    heads = "".join(_head(title, values) for title, values in zip(table.columns, columns, strict=True))
    rows = "".join(f"<tr>{''.join(cells)}</tr>\n" for cells in zip(*shown, strict=True))
    note = f'<p class="note">{rich(table.note)}</p>' if table.note else ""
    title = escape(table.title)
    return (
        f'<div class="table"><h3>{title}{_files(table.slug, "csv")}</h3><div class="scroll" role="region" tabindex="0" aria-label="{title}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}</div>\n"
    )


def _head(title: str, values: Sequence[Value]) -> str:
    kind = ' class="num"' if _is_numeric(values) else ""
    return f'<th scope="col"{kind} aria-sort="none"><button type="button">{escape(title)}</button></th>'


def _is_numeric(values: Sequence[Value]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and not any(isinstance(value, str) for value in known)


def _column(values: Sequence[Value]) -> list[str]:
    """The cells of one column; numbers carry their full value for sorting."""
    numbers = iter(column([value for value in values if not isinstance(value, str | None)]))
    empty = f'<td class="none{" num" if _is_numeric(values) else ""}">{NONE}</td>'
    cells = []
    for value in values:
        if value is None:
            cells.append(empty)
        elif isinstance(value, str):
            name = ' class="name"' if " " not in value else ""
            short = shorten(value, _LONG_NAME) if name else value
            full = f' title="{escape(value)}" data-v="{escape(value)}"' if short != value else ""
            cells.append(f"<td{name}{full}>{escape(short)}</td>")
        else:
            cells.append(f'<td class="num" data-v="{float(value)!r}">{next(numbers)}</td>')
    return cells


def _repeat(page: Page) -> str:
    parts = []
    if page.commands:
        lines = escape("\n".join(page.commands))
        parts.append(f'<div class="copy"><pre><code>{lines}</code></pre><button type="button">Copy</button></div>')
    if page.recipe:
        parts.append(
            '<details><summary>Recipe</summary><div class="copy">'
            f'<pre><code>{escape(page.recipe)}</code></pre><button type="button">Copy</button></div></details>'
        )
    return f'<section id="repeat"><h2>Repeat</h2>{"".join(parts)}</section>' if parts else ""


def _provenance(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items())
    return f"<h2>Provenance</h2><dl>{rows}</dl>" if rows else ""


def _with_file_names(sections: Sequence[Section]) -> list[Section]:
    """The same sections, where each slug is the name of a file, safe and not taken."""
    taken = {"report"}

    def free(slug: str) -> str:
        stem = name = safe_name(slug)
        count = 1
        while name in taken:
            count += 1
            name = f"{stem}-{count}"
        taken.add(name)
        return name

    found = []
    for section in sections:
        figures = [replace(figure, slug=free(figure.slug)) for figure in section.figures]
        found.append(replace(section, figures=figures, tables=[replace(t, slug=free(t.slug)) for t in section.tables]))
    return found


def _write(path: Path, content: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.gradmerge-partial")
    try:
        # A name that is not Unicode must not lose a report.
        partial.write_bytes(content.encode("utf-8", "replace"))
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path
