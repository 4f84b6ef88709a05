"""`gradmerge diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.diagnose import as_json, diagnose as diagnose_recipe
from .options import NamedData, Printing, Settings, command, named
from .output import echo, heavy_imports, print_json, print_notes, print_table, print_verdict, progress, typed

EXAMPLE = (
    "Examples: gradmerge diagnose recipe.yml -o report   ·   gradmerge diagnose recipe.yml --data yelp=yelp.jsonl "
    "--data sst2=sst2.jsonl --limit 200 -o report"
)


@command(api=diagnose_recipe, without=["changes", "threads", "dtype"])
def diagnose(
    *,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="Recipe file (YAML), or - for standard input; with curvature of every model."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="REPORT_DIR", help="Folder for the report.")],
    set_: Settings = None,
    data: NamedData = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Report what a merge costs each task, and why.

    The report says which task loses, in which layers, and which tasks conflict. It compares the merge with task
    arithmetic, average, Fisher averaging and gradient matching: predicted from curvature, and with --data also
    measured.
    """
    with heavy_imports():
        from ..report.comparison import measured_table, prediction_table
        from .recipe_args import read_recipe

    with progress(printing.silent) as shown:
        found = diagnose_recipe(
            read_recipe(recipe, options["allow_code"]),
            out,
            changes=set_,
            data=named(data or []),
            progress=shown,
            command=typed(),
            **options,
        )
    if printing.json:
        print_json({**as_json(found), "report": str(out / "report.html")})
        return
    print_notes(found.notes, printing.quiet)
    if printing.quiet:
        return
    table = prediction_table(found)
    print_table(table.columns, table.rows, right=range(1, len(table.columns)), digits=3)
    if found.measured is not None:
        echo("")
        table = measured_table(found)
        print_table(table.columns, table.rows, right=range(1, len(table.columns)))
    print_verdict(found.verdict)
    echo(f"\n{out / 'report.html'} has the figures. Predictions rank merges; they are not losses in nats.")
