"""The figures of results in notebooks, by the same script as in reports.

JupyterLab, VS Code and Colab show Altair's charts by the network or by parts of their own that differ in version, and
one chart of a result. A frame that holds all it needs works in each of them, offline, and in the notebook's export to
HTML; its content cannot reach the notebook. The library is compressed there, as a notebook keeps every output.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..display import FIGURES
from . import palette
from .assets import Figure, colours, digest, in_script, library, page_script
from .page import template

#: Figures that a result shows; a report has all.
MOST = 4


def in_notebooks(kind: type, figures_of: Callable[[Any], Sequence[Figure]]) -> None:
    """Have results of a kind show figures in notebooks."""
    FIGURES[kind] = lambda result: frame(figures_of(result)[:MOST])


def frame(figures: Sequence[Figure]) -> str:
    """An inline frame with figures; nothing without any."""
    from markupsafe import Markup, escape

    if not figures:
        return ""
    packed, scripts = _packed()
    inside = template("frame.html").render(
        figures=figures,
        style=Markup(palette.variables() + palette.resource("page.css")),
        packed=packed,
        loader=Markup(palette.resource("frame.js")),
        policy=Markup(" ".join(f"'{digest(script)}'" for script in (palette.resource("frame.js"), scripts))),
        theme=Markup(in_script(palette.theme())),
        colours=Markup(colours()),
    )
    height = sum(_height(figure) for figure in figures)
    box = f"border:0;width:100%;max-width:60rem;height:{height}px"
    return f'<iframe sandbox="allow-scripts allow-downloads" style="{box}" srcdoc="{escape(inside)}"></iframe>'


@cache
def _packed() -> tuple[str, str]:
    """The scripts, compressed and as they are."""
    scripts = f"{library()}\n{page_script()}"
    return base64.b64encode(gzip.compress(scripts.encode(), mtime=0)).decode(), scripts


def _height(figure: Figure) -> int:
    """About how tall a figure is in a page."""
    height: Any = figure.chart.to_dict(validate=False)["height"]
    if isinstance(height, dict):
        rows = figure.table().rows
        lanes = len(rows) if height.get("for") == "offset" else len({row[0] for row in rows})
        height = 1.25 * height["step"] * lanes
    return int(height) + 210
