"""The figures of the experiments: one look, SVG with text that stays text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: One colour and marker for a method, in every figure.
LOOKS: dict[str, dict[str, Any]] = {
    "gradient-matching": {"color": "#0072B2", "marker": "o", "label": "gradient matching"},
    "task-arithmetic": {"color": "#767676", "marker": "s", "label": "task arithmetic"},
    "ties": {"color": "#D55E00", "marker": "^", "label": "TIES"},
    "fisher-averaging": {"color": "#009E73", "marker": "D", "label": "Fisher averaging"},
    "average": {"color": "#CC79A7", "marker": "v", "label": "average"},
    "regmean": {"color": "#E69F00", "marker": "P", "label": "RegMean"},
    "tsv": {"color": "#56B4E9", "marker": "X", "label": "TSV"},
    "iso-c": {"color": "#8C510A", "marker": "*", "label": "Iso-C"},
}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradmerge",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#767676",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(path: Path, width: float = 6.0, height: float = 3.6, panels: int = 1, rows: int = 1) -> Iterator[Any]:
    """Axes (a list of them for several panels, row by row) to draw on; written as SVG to ``path`` at the end."""
    with plt.rc_context(_STYLE):
        drawn, axes = plt.subplots(rows, panels, figsize=(width, height))
        try:
            yield list(axes.flat) if panels * rows > 1 else axes
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".partial.svg")
            drawn.savefig(unfinished, metadata={"Date": None})
            unfinished.rename(path)
        finally:
            plt.close(drawn)


def band(axes: Any, x: list[float], runs: list[list[float]], **look: Any) -> None:
    """The mean of several seeds as a line, and from the lowest to the highest of them as a band."""
    columns = list(zip(*runs, strict=True))
    axes.plot(x, [sum(c) / len(c) for c in columns], linewidth=2, markersize=5, markerfacecolor="white", **look)
    if len(runs) > 1:
        axes.fill_between(
            x, [min(c) for c in columns], [max(c) for c in columns], color=look["color"], alpha=0.18, linewidth=0
        )
