"""A plot of a curvature file: how its values are distributed, layer by layer."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from ..curvature.curvature import group_of, pieces
from ..curvature.format import CurvatureFile
from ..errors import InputError
from ..text import count, one_line
from .figures import heat_map
from .page import Figure, Page, Section, Table, Value, write_page

#: Powers of ten of the smallest and largest float32 number, divided by any number of examples.
_LOW, _HIGH = -64, 40
#: Powers of ten below this share of all entries have no column.
_RARE = 0.005
_TEXT = (
    "Each row is a layer. A cell is the share of its entries whose curvature is in this power of ten; the first column "
    "after the zeros includes rare smaller values. The curvature of a parameter is the mean over examples of the "
    "squared gradient, in (loss / parameter)²."
)


def check_plot_path(path: Path) -> None:
    """Raise InputError before any work if a plot cannot be written there."""
    if path.suffix.lower() != ".html":
        raise InputError(f"plot: {path} must end in .html; the page has buttons to save SVG and PNG")
    if path.is_dir():
        raise InputError(f"plot: {path} is a folder")
    if not path.absolute().parent.is_dir():
        raise InputError(f"plot: there is no folder {path.parent}")


def plot_curvature(file: CurvatureFile, path: Path) -> None:
    """Write a page with the distribution of a file's curvature by layer."""
    check_plot_path(path)
    if file.kind == "gram":
        raise InputError(f"{file.label}: has Gram matrices; the plot needs one number for each parameter")
    write_page(path, curvature_page(file))


def curvature_page(file: CurvatureFile) -> Page:
    """The page of :func:`plot_curvature`."""
    counts, totals = count_decades(file)
    entries = {layer: max(1, int(one.sum())) for layer, one in counts.items()}
    every = sum(counts.values(), torch.zeros(_HIGH - _LOW + 1, dtype=torch.int64))[1:]
    known = every.nonzero().flatten().tolist() or [0]
    first = int((every.cumsum(0) >= _RARE * every.sum()).nonzero()[0])
    last = max(known)
    columns = ["0", *(f"1e{_LOW + decade}" for decade in range(first, last + 1))]
    cells = []
    for layer, one in counts.items():
        zeros, below, *others = [int(one[0]), int(one[1 : first + 2].sum()), *one[first + 2 : last + 2].tolist()]
        cells.append([100 * value / entries[layer] for value in (zeros, below, *others)])
    chart = heat_map(list(counts), columns, cells, "% of the layer's entries")
    rows: list[list[Value]] = [
        [layer, entries[layer], totals[layer] / entries[layer], 100 * int(one[0]) / entries[layer]]
        for layer, one in counts.items()
    ]
    facts = f"mean over {file.examples:,} examples · likelihood {one_line(file.likelihood) or 'not stated'} · "
    facts += f"{count(sum(entries.values()))} entries · "
    facts += "diagonal of G ⊗ A / T" if file.kind == "kronecker" else f"stored as {file.precision}"
    table = Table("Layers", "layers", ["layer", "entries", "mean", "zeros, %"], rows)
    figures = [Figure("Distribution of the curvature", "curvature", chart)]
    title = one_line(Path(file.label).name or file.label)
    section = Section("Curvature by layer", _TEXT, figures, [table])
    return Page(f"Curvature: {title}", facts, [], [section])


def count_decades(file: CurvatureFile) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Layer → number of zeros and of entries in each power of ten; and layer → sum of the means over examples."""
    counts: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for name, values in pieces(file):
        layer = group_of(name)
        means = values.flatten().double().div_(file.examples)
        above = means[means > 0]
        decades = above.log10().floor().long().clamp_(_LOW, _HIGH - 1) - _LOW + 1
        found = torch.bincount(decades, minlength=_HIGH - _LOW + 1)
        found[0] = means.numel() - above.numel()
        counts[layer] = counts[layer] + found if layer in counts else found
        totals[layer] = math.fsum((totals.get(layer, 0.0), float(means.sum())))
    return counts, totals
