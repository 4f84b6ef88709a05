"""`gradmerge evaluate`."""

from __future__ import annotations

import time
from typing import Any

from ..text import one_line
from .options import Attn, BatchSize, Columns, Data, Device, Dtype, Limit, MaxLength, Model, Task, Tokenizer
from .output import Debug, Json, Quiet, guarded, heavy_imports, note, print_json, print_table, progress
from .streams import say

EXAMPLE = (
    "Examples: gradmerge evaluate ./yelp --data reviews.jsonl --columns text=review,label=stars   ·   "
    "gradmerge evaluate org/model@main --data org/dataset:test --limit 500   ·   gradmerge evaluate ./vit --data ./photos"
)


def evaluate(
    model: Model,
    data: Data,
    task: Task = "auto",
    columns: Columns = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attn = None,
    tokenizer: Tokenizer = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure how good a model is on data: accuracy and F1, errors of a regression, or loss and perplexity."""
    with guarded(debug, json_):
        with heavy_imports():
            from .. import tasks

        begun = time.perf_counter()
        loaded = tasks.load_task(
            model,
            data,
            task=task,
            columns=tasks.parse_columns(columns),
            limit=limit,
            max_length=max_length,
            device=device,
            dtype=dtype,
            attn=attn,
            tokenizer=tokenizer,
        )
        with progress(quiet or json_, "examples") as shown:
            if shown is not None:
                shown.begin("evaluating", loaded.examples)
            numbers = tasks.evaluate(loaded, batch_size, shown.advance if shown is not None else None)
        facts: dict[str, Any] = {
            "model": model,
            "data": data,
            **numbers,
            "columns": {role: list(names) for role, names in loaded.columns.items()},
            "device": str(loaded.device),
            "seconds": time.perf_counter() - begun,
            "notes": loaded.notes,
        }
        if json_:
            print_json(facts)
            return
        for text in loaded.notes:
            note(text, quiet)
        _print(model, data, numbers, loaded, tasks.MEANINGS, quiet)


def _print(model: str, data: str, numbers: dict[str, Any], loaded: Any, meanings: Any, quiet: bool) -> None:
    if not quiet:
        read = ", ".join(f"{role} from {' + '.join(names)}" for role, names in loaded.columns.items())
        say(one_line(f"{model} on {data}: {numbers['task']}, {read}"))
    rows = [[name, _shown(value), meanings[name]] for name, value in numbers.items() if name in meanings]
    print_table(["metric", "value", "meaning"], rows, right=(1,))


def _shown(value: Any) -> str:
    if value is None:
        return "undefined"
    return str(value) if isinstance(value, int) else f"{value:.5g}"
