"""`gradmerge studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.merge import merge
from ..errors import InputError
from .options import READING, Printing, command, named
from .output import heavy_imports, print_json
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge studio demo   ·   "
    "gradmerge studio recipe.yml --data yelp=yelp.jsonl --data sst2=sst2.jsonl --limit 200   ·   "
    "gradmerge studio recipe.yml --data yelp=yelp.jsonl --port 8000"
)


@command(api=merge, only=READING, without=["threads"], loading=["columns", "limit", "batch_size", "device"])
def studio(
    *,
    source: Annotated[
        Path, typer.Argument(metavar="RECIPE|DEMO_DIR", help="Recipe file (YAML), or the folder of gradmerge demo.")
    ] = Path("demo"),
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="NAME=SRC",
            help="Labeled data of a task (its model's folder name, or base) to evaluate merges on. Repeatable; the "
            "demo has its own.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Port of the page; 0 is any free port.", show_default="the first free from 7860"
        ),
    ] = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Try weights and methods on a local web page.

    Move a slider, see the measured results, compare answers, and save the best merge. Every move is merged in memory
    and evaluated on the data. Ctrl-C ends it. Needs Gradio (pip install 'gradmerge[studio]').
    """
    from ..studio.server import check_extra, check_port

    check_extra()
    jobs = _jobs(source, named(data or []))
    port = check_port(port)

    def ready(address: str) -> None:
        if printing.json:
            print_json({"address": address})
        else:
            echo(address if printing.quiet else f"gradmerge studio: {address} (Ctrl-C ends it)")

    if source.is_dir():  # small batches would take most of the time of the demonstration's small models
        options["batch_size"] = max(64, options.get("batch_size", 0))
    with heavy_imports():
        from ..studio import serve
    serve(jobs, port=port, ready=ready, **options)


def _jobs(source: Path, data: dict[str, str]) -> dict[str, tuple[Path, dict[str, str]]]:
    """Title → recipe and data: one for a recipe file, two for the demonstration."""
    if source.is_file():
        return {source.stem: (source, data)}
    if not source.exists():
        make = f" `gradmerge demo -o {source}` makes the demonstration" if not source.suffix else ""
        raise InputError(f"{source}: no such recipe or folder.{make or ' Give a recipe file (YAML).'}")
    from ..demo.digits import REMOVED
    from ..demo.run import MATCHING, REMOVAL

    recipes = {name: source / "recipes" / f"{name}.yml" for name in (MATCHING, REMOVAL)}
    if not recipes[MATCHING].is_file():
        raise InputError(
            f"{source}: is a folder, but not one that gradmerge demo finished. Give a recipe file, or make the "
            "demonstration with `gradmerge demo -o demo`."
        )
    if data:
        raise InputError("--data: the demonstration has its own; give a recipe file to use other data")
    jobs = {"Merge three tasks": (recipes[MATCHING], _demo_data(recipes[MATCHING], "upright"))}
    if recipes[REMOVAL].is_file():
        jobs[f"Remove {REMOVED}"] = (recipes[REMOVAL], _demo_data(recipes[REMOVAL], "rest"))
    return jobs


def _demo_data(recipe: Path, base: str) -> dict[str, str]:
    """The validation rows of each model of a recipe of the demonstration; ``base`` is the file of the base's rows.

    A model NAME or joint-NAME was fine-tuned on data/NAME.npz.
    """
    from ..compare.settings import BASE, task_names
    from ..recipe import load_recipe

    names = {name: name.removeprefix("joint-") for name in task_names(load_recipe(recipe))} | {BASE: base}
    files = {name: recipe.parent.parent / "data" / f"{stem}.npz" for name, stem in names.items()}
    return {name: f"{file}:valid" for name, file in files.items() if file.is_file()}
