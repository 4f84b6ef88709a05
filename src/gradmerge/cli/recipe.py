"""`gradmerge recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..text import one_line
from .help import Commands
from .options import Printing, command
from .output import heavy_imports, print_json, print_notes
from .streams import say

app = Commands(help="Recipes: those of mergekit written as ours.")
EXAMPLE = "Example: gradmerge recipe convert mergekit-config.yml -o recipe.yml"


@app.callback()
def _recipe() -> None:
    """Recipes: those of mergekit written as ours."""


@app.command("convert", epilog=EXAMPLE)
@command
def convert(
    *,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Recipe file of mergekit's, or - for standard input.")],
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
        from .request import read_recipe

    recipe = convert_recipe(read_recipe(source) if str(source) == "-" else source, out, force=force)
    if printing.json:
        facts = {"out": str(out), "method": recipe.method, "named": list(recipe.merges), "notes": recipe.notes}
        print_json(facts)
        return
    print_notes(recipe.notes, printing.quiet)
    if not printing.quiet:
        say(one_line(f"{recipe.file or 'standard input'} → {out}: {recipe.method}"))
