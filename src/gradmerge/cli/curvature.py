"""`gradmerge curvature`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..text import count, one_line
from .options import Printing, command
from .output import print_json, print_table
from .stdio import echo

EXAMPLE = "Example: gradmerge curvature show ./yelp-curvature"


@command()
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
    """Show what a curvature file contains.

    For each group of parameters: sum, mean, share of zeros and maximum. For Kronecker factors these are of the diagonal
    of G ⊗ A / T.
    """
    from ..curvature.curvature import pieces, summarize
    from ..curvature.format import open_curvature

    if plot:
        from ..report.curvature import check_plot_path, plot_curvature

        check_plot_path(plot)
    with open_curvature(path) as file:
        if plot:
            plot_curvature(file, plot)
        groups = summarize(pieces(file))
    facts: dict[str, Any] = {
        "path": path,
        "examples": file.examples,
        "likelihood": file.likelihood,
        "model": file.metadata.get("model", ""),
        "kind": file.kind,
        "precision": file.precision,
        "parameters": sum(g.entries for g in groups),
        "groups": [g.as_dict() for g in groups],
        **({"tokens": file.tokens} if file.kind == "kronecker" else {}),
        **({"plot": str(plot)} if plot else {}),
    }
    if printing.json:
        print_json(facts)
        return
    likelihood = one_line(file.likelihood) or "not stated"
    what = {
        "diagonal": f"diagonal curvature, likelihood {likelihood}",
        "gram": "Gram matrices XᵀX of linear layers' inputs",
        "kronecker": f"Kronecker factors of {len(file.tokens)} layers and diagonals, likelihood {likelihood}",
    }[file.kind]
    echo(
        f"{one_line(path)}: {what}, sum over {file.examples} examples, "
        f"estimated for {one_line(facts['model']) or 'a model that is not named'}, stored as {file.precision}"
    )
    rows = []
    for g in groups:
        zeros = f"{100 * g.share_of_zeros:.1f} %"
        rows.append([g.name, count(g.entries), f"{g.total:.4g}", f"{g.per_entry:.3g}", zeros, f"{g.largest:.3g}"])
    print_table(["group", "entries", "sum", "mean per entry", "zeros", "max"], rows, right=(1, 2, 3, 4, 5))
    if not printing.quiet:
        echo("Sums over examples; divide by the number of examples for `reduction: mean`.")
