"""`gradmerge evaluate`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ..text import one_line
from .options import Data, LoadingOptions, Model, Printing, command
from .output import heavy_imports, note, print_json, print_table, progress
from .streams import say

EXAMPLE = (
    "Examples: gradmerge evaluate ./yelp --data reviews.jsonl --columns text=review,label=stars   ·   "
    "gradmerge evaluate org/model@main --data org/dataset:test --limit 500   ·   "
    "gradmerge evaluate ./vit --data ./photos"
)


@command
def evaluate(
    *,
    model: Model,
    data: Data,
    card: Annotated[
        bool, typer.Option("--card", help="Also put the numbers into the model card of a folder that gradmerge wrote.")
    ] = False,
    loading: LoadingOptions,
    printing: Printing,
) -> None:
    """Evaluate a model on data: accuracy and F1, errors of a regression, or loss and perplexity."""
    with heavy_imports():
        from .. import tasks
        from ..api.publishing import MeasuredCard

    measured = MeasuredCard(model) if card else None
    begun = time.perf_counter()
    loaded = tasks.load_task(model, data, **loading.as_keywords())
    with progress(printing.silent, "examples") as shown:
        shown.begin("evaluating", loaded.examples)
        numbers = tasks.evaluate(loaded, advance=shown.advance)
    if measured is not None:
        measured.add(data, numbers)
    facts: dict[str, Any] = {
        "model": model,
        "data": data,
        **numbers,
        "columns": {role: list(names) for role, names in loaded.columns.items()},
        "device": str(loaded.device),
        "seconds": time.perf_counter() - begun,
        "notes": loaded.notes,
    }
    if printing.json:
        print_json(facts)
        return
    for text in loaded.notes:
        note(text, printing.quiet)
    if not printing.quiet:
        read = ", ".join(f"{role} from {' + '.join(names)}" for role, names in loaded.columns.items())
        say(one_line(f"{model} on {data}: {loaded.task}, {read}"))
    told = {name: value for name, value in numbers.items() if name in tasks.MEANINGS}
    rows = [[name, "undefined" if value is None else value, tasks.MEANINGS[name]] for name, value in told.items()]
    print_table(["metric", "value", "meaning"], rows, right=(1,), digits=5)
