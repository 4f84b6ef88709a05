"""`gradmerge curvature`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..text import count, one_line
from .options import Printing, command
from .output import print_json, print_table, progress
from .stdio import echo

EXAMPLE = "Example: gradmerge curvature show ./yelp-curvature"


@command
def show(
    *,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Curvature folder or file, or a model folder that holds one.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page (.html) with the distribution of the values by layer. Replaces FILE.",
        ),
    ] = None,
    printing: Printing,
) -> None:
    """Show what a curvature file holds: sum, mean, share of zeros and maximum of each group of parameters.

    Of Kronecker factors these are of the diagonal that they make; sizes, traces and eigenvalues of every layer follow.
    """
    from ..curvature.format import open_curvature
    from ..curvature.summary import layers_of, pieces, spectra, summarize

    if plot:
        from ..report.curvature import check_plot_path, plot_curvature

        check_plot_path(plot)
    with open_curvature(path) as file, progress(printing.silent, "layers") as bar:
        if plot:
            plot_curvature(file, plot)
        groups = summarize(pieces(file))
        layers: list[dict[str, Any]] = []
        if names := layers_of(file):
            bar.begin("finding eigenvalues", len(names))
        for name in names:
            layers.append(spectra(file, name))
            bar.advance(1)
        facts: dict[str, Any] = {
            "path": path,
            "examples": file.examples,
            "likelihood": file.likelihood,
            "model": file.metadata.get("model", ""),
            "kind": file.kind,
            "precision": file.precision,
            "parameters": sum(g.entries for g in groups),
            "groups": [g.as_dict() for g in groups],
            **({"layers": layers} if file.kind == "kronecker" else {}),
            **({"plot": str(plot)} if plot else {}),
        }
    if printing.json:
        print_json(facts)
        return
    likelihood = one_line(file.likelihood) or "not stated"
    diagonals = len(file.shapes) - 2 * len(layers)
    what = {
        "diagonal": f"diagonal curvature, likelihood {likelihood}",
        "gram": "Gram matrices XᵀX of linear layers' inputs",
        "kronecker": f"Kronecker factors of {len(layers)} layers and {diagonals} diagonals, likelihood {likelihood}",
    }[file.kind]
    echo(
        f"{one_line(path)}: {what}, sum over {file.examples} examples, "
        f"estimated for {one_line(facts['model']) or 'a model that is not named'}, stored as {file.precision}"
    )
    rows = []
    for g in groups:
        zeros = f"{100 * g.zeros / max(1, g.entries):.1f} %"
        rows.append([g.name, count(g.entries), f"{g.total:.4g}", f"{g.per_entry:.3g}", zeros, f"{g.largest:.3g}"])
    print_table(["group", "entries", "sum", "mean per entry", "zeros", "max"], rows, right=(1, 2, 3, 4, 5))
    if layers:
        echo("")
        columns = ["layer", "tokens T"]
        for factor in ("A/T", "G"):
            columns += [factor, "trace", "largest", "median", "rank"]
        table = [
            [layer["name"], f"{layer['tokens']:,}", *_cells(layer["inputs"]), *_cells(layer["outputs"])]
            for layer in layers
        ]
        print_table(columns, table, right=range(1, len(columns)))
    if not printing.quiet:
        echo("Sums over examples; divide by the number of examples for `reduction: mean`.")
        if layers:
            echo("Groups: diagonal of G ⊗ A / T. A/T: mean over tokens. G: sum over examples. Rank: (Σλ)²/Σλ².")


def _cells(factor: dict[str, float | None]) -> list[str]:
    formats = {"size": "d", "trace": ".3g", "largest": ".3g", "median": ".3g", "effective_rank": ".1f"}
    return ["–" if factor[key] is None else format(factor[key], spec) for key, spec in formats.items()]
