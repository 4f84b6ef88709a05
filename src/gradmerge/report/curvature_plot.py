"""A picture of a curvature file: how its values are spread, layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..curvature.format import CurvatureFile
from ..curvature.summary import group_of, pieces
from ..errors import InputError
from ..text import count, one_line
from .whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
#: More rows than this cannot be told apart; neighbouring layers then share one.
MOST_ROWS = 64
#: Bins of log10: every float32 number, divided by any number of examples, falls into one.
_LOW, _HIGH, _WIDTH = -64.0, 40.0, 0.05
_BINS = round((_HIGH - _LOW) / _WIDTH)
_CENTRES = _LOW + _WIDTH * (np.arange(_BINS) + 0.5)
_INK, _FAINT = "#22303c", "#d7dde2"
#: For words from files: a dollar sign in a name begins no formula.
_AS_IT_IS: dict[str, Any] = {"parse_math": False, "usetex": False}


@dataclass
class LayerRow:
    """The spread of the curvature of one or more layers: means over examples of squared gradients."""

    label: str
    counts: NDArray[np.int64]
    """Entries above zero, by log10 of the curvature per example."""
    entries: int = 0
    zeros: int = 0
    total: float = 0.0
    """Sum over entries, mean over examples."""

    @property
    def mean(self) -> float:
        """Mean over entries and examples."""
        return self.total / max(1, self.entries)


def check_plot_path(path: Path) -> None:
    """Stop before any work if a plot cannot be written there."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--plot {path}: a plot ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if path.is_dir():
        raise InputError(f"--plot {path}: is a folder")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'gradmerge[plot]'") from error


def plot_curvature(file: CurvatureFile, path: Path) -> None:
    """Draw the spread of a file's curvature by layer, in a picture that appears whole or not at all."""
    check_plot_path(path)
    import matplotlib as mpl

    if file.kind == "gram":
        raise InputError(f"{file.label}: holds Gram matrices. The plot shows one number per parameter.")
    rows = legible(spread(file))
    facts = f"mean over {file.examples:,} examples · likelihood {one_line(file.likelihood) or 'not stated'} · "
    facts += f"{count(sum(row.entries for row in rows))} entries · "
    facts += "diagonal of G ⊗ A / T" if file.kind == "kronecker" else f"stored as {file.precision}"
    figure = draw(rows, one_line(Path(file.label).name or file.label), facts)
    ending = path.suffix.lower()
    # Without dates and random ids, the same file gives the same picture.
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})
    with whole_file(path) as partial, mpl.rc_context({"svg.hashsalt": "gradmerge"}):
        figure.savefig(partial, format=ending[1:], dpi=160, metadata=metadata)


def spread(file: CurvatureFile) -> list[LayerRow]:
    """One row per layer, in the natural order of names, read in pieces."""
    rows: dict[str, LayerRow] = {}
    for name, values in pieces(file):
        label = group_of(name)
        row = rows.setdefault(label, LayerRow(label, np.zeros(_BINS, np.int64)))
        means = values.flatten().double().div_(file.examples)
        above = means[means > 0]
        places = above.log10().sub_(_LOW).div_(_WIDTH).long().clamp_(0, _BINS - 1)
        row.counts += torch.bincount(places, minlength=_BINS).numpy()
        row.zeros += means.numel() - above.numel()
        row.total += float(means.sum())
        row.entries += means.numel()
    return list(rows.values())


def legible(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """At most ``MOST_ROWS`` rows: numbered neighbours share a row first, any neighbours if that is not enough."""
    runs: list[list[LayerRow]] = []
    for row in rows:
        if runs and (stem := _stem(row.label)) and stem == _stem(runs[-1][-1].label):
            runs[-1].append(row)
        else:
            runs.append([row])
    longest = max(map(len, runs), default=1)
    for size in range(1, longest + 1):
        joined = [_joined(run[i : i + size]) for run in runs for i in range(0, len(run), size)]
        if len(joined) <= MOST_ROWS:
            return joined
    size = math.ceil(len(joined) / MOST_ROWS)
    return [_joined(joined[i : i + size]) for i in range(0, len(joined), size)]


def _stem(label: str) -> str:
    """`layers.` of `layers.7`; nothing when there is no number at the end."""
    found = re.fullmatch(r"(.*?)\d+", label)
    return found[1] if found else ""


def _joined(rows: Sequence[LayerRow]) -> LayerRow:
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return first
    stem = _stem(first.label)
    numbered = stem and stem == _stem(last.label)
    label = f"{first.label}–{last.label.removeprefix(stem)}" if numbered else f"{first.label} …"
    entries, zeros, totals = zip(*((row.entries, row.zeros, row.total) for row in rows), strict=True)
    return LayerRow(label, np.sum([row.counts for row in rows], axis=0), sum(entries), sum(zeros), sum(totals))


def draw(rows: Sequence[LayerRow], title: str, facts: str) -> Figure:
    """Ridges, the first layer on top, and the share of zeros at the right."""
    from matplotlib.figure import Figure

    inches = 0.24 if len(rows) > 24 else 0.34
    height = 1.75 + inches * max(len(rows), 4)
    figure = Figure(figsize=(9.0, height), facecolor="white", layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(7.5, 1), wspace=0.02)
    ridges = figure.add_subplot(grid[0])
    zeros = figure.add_subplot(grid[1], sharey=ridges)
    _draw_ridges(ridges, rows, size=8.5 if len(rows) <= 40 else 7)
    _draw_zeros(zeros, rows)
    heading = f"Curvature by layer: {title}\n"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK, **_AS_IT_IS)
    figure.text(0.01, 1 - 0.42 / height, facts, fontsize=8.5, color=_INK, va="center", **_AS_IT_IS)
    return figure


def _draw_ridges(axes: Axes, rows: Sequence[LayerRow], size: float) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    left, right = _range(rows)
    seen = (left <= _CENTRES) & (right >= _CENTRES)
    means = [math.log10(row.mean) for row in rows if row.mean > 0]
    shade = Normalize(min(means, default=0) - 0.5, max(means, default=1) + 1.0)
    for place, row in enumerate(rows):
        front = place + 2  # a later row stands in front of the one above it, and all in front of the grid
        axes.axhline(place, color=_FAINT, linewidth=0.6, zorder=front)
        if row.mean <= 0:
            continue
        density = _smooth(row.counts)[seen]
        density /= max(float(density.max()), 1e-300)
        top = place - 1.35 * density
        mean = math.log10(row.mean)
        colour = colormaps["viridis"](shade(mean))
        axes.fill_between(_CENTRES[seen], place, top, color=colour, linewidth=0, zorder=front + 0.2)
        outline = np.where(density > 0.01, top, np.nan)
        axes.plot(_CENTRES[seen], outline, color="white", linewidth=0.9, zorder=front + 0.3)
        axes.plot(mean, place - 0.16, "o", color=_INK, markeredgecolor="white", markersize=4.2, zorder=1000)
    axes.set_ylim(len(rows) - 0.4, -1.5)
    axes.set_xlim(left, right)
    axes.set_yticks(range(len(rows)), [_short(row.label) for row in rows], fontsize=size, color=_INK, **_AS_IT_IS)
    axes.xaxis.set_major_formatter(lambda value, _: f"$10^{{{value:.0f}}}$" if value == round(value) else "")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    unit = "curvature of one parameter: mean over examples of the squared gradient, (loss / parameter)²"
    legend = "each row scaled to its own peak · ● mean over the row's entries"
    axes.set_xlabel(f"{unit}\n{legend}", fontsize=8.5, color=_INK)
    _plain(axes)


def _draw_zeros(axes: Axes, rows: Sequence[LayerRow]) -> None:
    shares = [100 * row.zeros / max(1, row.entries) for row in rows]
    axes.barh(range(len(rows)), shares, height=0.5, color="#c8553d", alpha=0.85)
    for place, share in enumerate(shares):
        text = "0" if share == 0 else "<0.1 %" if share < 0.1 else f"{share:.1f} %" if share < 99.95 else "100 %"
        x, side, colour = (share - 3, "right", "white") if share > 55 else (share + 3, "left", _INK)
        axes.text(x, place, text, ha=side, va="center", fontsize=7, color=colour if share else "#9aa5ae")
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 100], ["0", "100 %"])
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set_xlabel("exact zeros,\nshare of entries", fontsize=8.5, color=_INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(axis="x", labelsize=8.5, color=_FAINT, labelcolor=_INK)
    axes.tick_params(axis="y", length=0)


def _range(rows: Sequence[LayerRow]) -> tuple[float, float]:
    """From the 0.5 % quantile of the row that reaches lowest to the largest value."""
    ends = []
    for row in rows:
        if row.counts.any():
            share = np.cumsum(row.counts) / row.counts.sum()
            ends.append((_CENTRES[int(np.searchsorted(share, 0.005))], _CENTRES[int(np.flatnonzero(row.counts)[-1])]))
    if not ends:
        return -10.0, 0.0
    return min(low for low, _ in ends) - 0.4, max(high for _, high in ends) + 0.4


def _smooth(counts: NDArray[np.int64], width: float = 0.12) -> NDArray[np.float64]:
    """A density, smoothed by a Gaussian of ``width`` decades: 8-bit codes would show as a comb."""
    reach = math.ceil(4 * width / _WIDTH)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * _WIDTH / width) ** 2)
    return np.convolve(counts, kernel / kernel.sum(), mode="same")


def _short(label: str, most: int = 36) -> str:
    label = one_line(label)
    return label if len(label) <= most else "…" + label[-(most - 1) :]
