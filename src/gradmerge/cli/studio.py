"""`gradmerge studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.merge import merge
from ..errors import InputError
from .options import READING, NamedData, Printing, command, named
from .output import echo, heavy_imports, print_json

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
    data: NamedData = None,
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
    """Title → recipe and data: one for a recipe file, two for the folder of the demonstration."""
    if source.is_file():
        return {source.stem: (source, data)}
    from ..compare.settings import BASE, task_names
    from ..demo.digits import REMOVED
    from ..demo.run import MATCHING, REMOVAL
    from ..recipe import load_recipe

    jobs = {}
    for title, name, base in (("Merge three tasks", MATCHING, "upright"), (f"Remove {REMOVED}", REMOVAL, "rest")):
        recipe = source / "recipes" / f"{name}.yml"
        if not recipe.is_file():
            raise InputError(
                f"{source}: is neither a recipe file (YAML) nor a folder that gradmerge demo finished. "
                "`gradmerge demo -o demo` makes one."
            )
        # A model NAME or joint-NAME was fine-tuned on data/NAME.npz.
        rows = {model: model.removeprefix("joint-") for model in task_names(load_recipe(recipe))} | {BASE: base}
        files = {model: source / "data" / f"{stem}.npz" for model, stem in rows.items()}
        jobs[title] = (recipe, {model: f"{file}:valid" for model, file in files.items() if file.is_file()})
    if data:
        raise InputError("--data: the demonstration has its own; give a recipe file to use other data")
    return jobs
