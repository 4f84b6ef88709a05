"""The page and the figures of an experiment, made from its results.json alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from benchmarks.tables import table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What results.md and figures/ consist of."""

    title: str
    about: str
    sections: Mapping[str, Callable[[Results], str]]
    """Heading → text with a table; an empty text leaves the section out."""
    figures: Mapping[str, Callable[[Results, Path], None]] = field(default_factory=dict)
    """Name → function that draws it as SVG."""


def write_report(report: Report, results: Results, folder: Path) -> None:
    """Write results.md and figures/ to ``folder``."""
    (folder / "results.md").write_text(page(report, results), "utf-8")
    for name, draw in report.figures.items():
        draw(results, folder / "figures" / f"{name}.svg")


def page(report: Report, results: Results) -> str:
    """Return the text of results.md."""
    count = len(results["seeds"])
    spread = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    machine = results["machine"]
    origin = f"`{results['command']}`: {spread}; {machine['device']}, torch {machine['torch']}."
    parts = [f"# {report.title}", origin, report.about]
    for heading, section in report.sections.items():
        if text := section(results):
            parts += [f"## {heading}", text]
    parts += [f"![{name}](figures/{name}.svg)" for name in report.figures]
    return "\n\n".join(parts) + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns, except the first, are aligned to the right."""
    first, _, *rest = table(tuple(header), [tuple(row) for row in rows]).split("\n")
    return "\n".join([first, "|---|" + "---:|" * (len(header) - 1), *rest])


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return `86.5 ± 0.2`: mean, and standard deviation over seeds where there are several."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


#: Color and marker of a method, in every figure.
STYLES: dict[str, dict[str, Any]] = {
    "gradient-matching": {"color": "#0072B2", "marker": "o", "label": "gradient matching"},
    "task-arithmetic": {"color": "#767676", "marker": "s", "label": "task arithmetic"},
    "fisher-averaging": {"color": "#009E73", "marker": "D", "label": "Fisher averaging"},
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
def figure(path: Path, width: float = 6.0, height: float = 3.6, panels: int = 1) -> Iterator[Any]:
    """Yield axes (a list for several panels) to draw on, and write them as SVG to ``path`` at the end."""
    with plt.rc_context(_STYLE):
        drawn, axes = plt.subplots(1, panels, figsize=(width, height))
        try:
            yield list(axes.flat) if panels > 1 else axes
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.savefig(path, metadata={"Date": None})
        finally:
            plt.close(drawn)


def band(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean over seeds as a line, and from their lowest to their highest value as a band."""
    columns = list(zip(*runs, strict=True))
    means = [statistics.fmean(column) for column in columns]
    axes.plot(x, means, linewidth=2, markersize=5, markerfacecolor="white", **style)
    if len(runs) > 1:
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
