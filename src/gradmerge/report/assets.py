"""Figures inside a page: the chart as JSON, its numbers as a table, and the library that draws it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..text import to_json
from .palette import LIGHT, resource
from .tables import Table, Value

if TYPE_CHECKING:
    import altair as alt

#: Rows of a figure's numbers that a page shows; its CSV has all.
SHOWN_ROWS = 500


@dataclass(frozen=True)
class Figure:
    """A chart with its title and the name of its files."""

    title: str
    slug: str
    chart: alt.LayerChart

    def table(self) -> Table:
        """The numbers of the chart."""
        chart: Any = self.chart
        named: Mapping[str, str] = chart.usermeta["columns"]
        rows: Sequence[dict[str, Value]] = [*chart.data.values, *chart.usermeta["more"]]
        return Table(self.title, self.slug, [*named.values()], [[row.get(field) for field in named] for row in rows])

    def csv(self) -> str:
        return self.table().csv()

    def shown(self) -> Table:
        """The same for readers without JavaScript, or with a screen reader."""
        table = self.table()
        cut = f"The first {SHOWN_ROWS} of {len(table.rows)} rows." if len(table.rows) > SHOWN_ROWS else ""
        return Table(self.title, self.slug, table.columns, table.rows[:SHOWN_ROWS], cut)

    def json(self) -> str:
        """The chart for a script element that nothing runs: no text in it can end the element."""
        spec: dict[str, Any] = self.chart.to_dict(validate=False)
        for name in ("$schema", "width", "config"):
            spec.pop(name, None)
        spec["datasets"] = {name: _by_column(rows) for name, rows in spec.get("datasets", {}).items()}
        return in_script(spec)


def _by_column(rows: Sequence[Mapping[str, Value]]) -> dict[str, Any]:
    """Rows without the names of their fields in each."""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    return {"fields": fields, "rows": [[row.get(field) for field in fields] for row in rows]}


def in_script(value: Any) -> str:
    return to_json(value, indent=None).replace("<", "\\u003c")


@cache
def library() -> str:
    """Vega, Vega-Lite and the interpreter that lets them run where a policy forbids eval, below their licences."""
    licences = resource("vendor/LICENSES.txt").replace("*/", "* /")
    interpreter = resource("vendor/vega-interpreter.js")
    interpreter = re.sub(r"^import (\{.*?\}) from 'vega-util';", r"const \1 = vega;", interpreter)
    interpreter = re.sub(r"export \{ expression as expressionInterpreter \};", "return expression;", interpreter)
    parts = [resource("vendor/vega.min.js"), resource("vendor/vega-lite.min.js")]
    parts += [f"const vegaInterpreter = (() => {{{interpreter}\n}})();"]
    return re.sub(r"\n//# sourceMappingURL=\S+", "", f"/*\n{licences}*/\n" + "\n".join(parts))


@cache
def drawing() -> str:
    """What draws with the library, in every page alike."""
    return resource("charts.js")


@cache
def page_script() -> str:
    """What a report does in a browser."""
    return f"{drawing()}\n{resource('page.js')}"


@cache
def colours() -> str:
    """Colour on paper → its variable in the style of a page."""
    return in_script({colour: f"var(--{name})" for name, colour in LIGHT.items()})


def digest(script: str) -> str:
    """What a content policy calls a script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
