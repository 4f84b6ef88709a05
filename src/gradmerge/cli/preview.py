"""`gradmerge preview`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.merge import merge
from ..api.preview import as_json, best_recipe, preview as preview_recipe
from .options import (
    READING,
    NamedData,
    Printing,
    Settings,
    command,
    method_names,
    named,
)
from .output import echo, heavy_imports, print_json, print_notes, print_table, print_verdict, progress, typed

EXAMPLE = (
    "Examples: "
    "gradmerge preview recipe.yml --weights 0:1:0.1 --methods gradient-matching,task-arithmetic -o preview   ·   "
    "gradmerge preview recipe.yml --data yelp=yelp.jsonl --data sst2=sst2.jsonl --limit 200 --save-best merged "
    "-o preview   ·   gradmerge preview recipe.yml --suggest -o preview   ·   "
    "gradmerge preview recipe.yml --methods ties,dare --sweep density=0.1:0.9:0.2 -o preview"
)


@command(api=preview_recipe, only=["suggest", *READING, "force"], without=["threads", "dtype"])
def preview(
    *,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or - for standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="REPORT_DIR", help="New folder for the report.")],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights",
            "-w",
            metavar="[NAME=]RANGE",
            help="START:STOP:STEP with both ends, a list 0,0.3,1, or one number: a weight that all tasks share, or "
            "NAME=RANGE for one task. Repeatable; all combinations are tried. Default: 0:1:0.1, with --sweep the "
            "recipe's weights, or 0:1.5 for each task with --suggest.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "-m",
            metavar="A,B",
            help="Methods to compare. Default: the recipe's.",
            autocompletion=method_names,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=RANGE",
            help="Try values of a key of the recipe, such as density=0.1:0.9:0.2 (both ends), damping=1e-6,1e-3, "
            "rescale=none,l1, or t=[0,1],[1,0] over the layers. Repeatable; all combinations are tried.",
        ),
    ] = None,
    set_: Settings = None,
    data: NamedData = None,
    save_best: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Merge the best setting into this new folder.")
    ] = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Compare weights and methods before merging. No model is written.

    With a few labeled rows of each task, every setting is merged in memory and evaluated. Without data, losses are
    predicted from the curvature of the models, and only ranks are shown.
    """
    with heavy_imports():
        from ..report.comparison import best_table
        from .recipe_args import read_recipe

    sources = named(data or [])
    settings: dict[str, Any] = {"weights": weights, "methods": methods, "changes": set_, "sweep": sweep}
    settings |= {"save_best": save_best, **options}
    given = read_recipe(recipe, options["allow_code"])
    with progress(printing.silent, "merges") as shown:
        result = preview_recipe(given, out, data=sources, progress=shown, command=typed(), **settings)
    if save_best is not None:
        with progress(printing.silent) as shown:
            reading = {name: options[name] for name in READING if name in options}
            merge(best_recipe(result), save_best, force=options["force"], progress=shown, **reading)
    if printing.json:
        more = {"report": str(out / "report.html")} | ({"saved": str(save_best)} if save_best is not None else {})
        print_json({**as_json(result), **more})
        return
    print_notes(result.notes, printing.quiet)
    if printing.quiet:
        return
    table = best_table(result)
    print_table(table.columns, table.rows, right=range(2, len(table.columns) - 1))
    print_verdict(result.verdict)
    echo(f"\n{out / 'report.html'} has the figures, {out / 'preview.csv'} every setting.")
    if save_best is not None:
        echo(f"{save_best} contains the best setting; {out / 'recipe.yml'} is its recipe.")
