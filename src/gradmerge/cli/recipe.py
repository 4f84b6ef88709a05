"""`gradmerge recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..text import one_line
from .options import Printing, command
from .output import heavy_imports, note, print_json
from .streams import say

app = typer.Typer(help="Recipes: those of mergekit written as ours.", no_args_is_help=True)
EXAMPLE = "Example: gradmerge recipe convert mergekit-config.yml -o recipe.yml"


@app.callback()
def _recipe() -> None:
    """Recipes: those of mergekit written as ours."""


@app.command("convert", epilog=EXAMPLE)
@command
def convert(
    *,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Recipe file of mergekit's.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Recipe file to write; it must not exist.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT if this command wrote it, or it is empty.")
    ] = False,
    printing: Printing,
) -> None:
    """Write a recipe of mergekit's as ours, to read or to change. The merge is the same, byte for byte.

    There is no need to: `gradmerge merge`, `diagnose` and `preview` take recipes of mergekit's as they are.
    """
    with heavy_imports():
        from ..api.converting import convert_recipe

    recipe = convert_recipe(source, out, force=force)
    if printing.json:
        facts = {"out": str(out), "method": recipe.method, "named": list(recipe.merges), "notes": recipe.notes}
        print_json(facts)
        return
    for text in recipe.notes:
        note(text, printing.quiet)
    if not printing.quiet:
        say(one_line(f"{source} → {out}: {recipe.method}"))
