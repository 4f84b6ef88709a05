"""`gradmerge evaluate`."""

from __future__ import annotations

import time
from typing import Annotated, Any, get_args

from ..api.evaluate import evaluate as evaluate_model
from ..text import Measured, one_line
from .options import Data, Model, Printing, command
from .output import echo, heavy_imports, print_json, print_notes, print_table, progress

EXAMPLE = (
    "Examples: gradmerge evaluate ./yelp --data reviews.jsonl --columns text=review,label=stars   ·   "
    "gradmerge evaluate org/model@main --data org/dataset:test --limit 500   ·   "
    "gradmerge evaluate ./vit --data ./photos   ·   "
    "gradmerge evaluate ./chat --data dialogues.jsonl --metrics exact-match,rouge   ·   "
    "gradmerge evaluate ./merged --lm-eval arc_easy,hellaswag --limit 200"
)


@command(api=evaluate_model, without=["processes"], processes=True)
def evaluate(
    *,
    model: Model,
    data: Annotated[str | None, *get_args(Data)[1:]] = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Evaluate a model on labeled data, or with lm-eval.

    On data: accuracy and F1, errors of a regression, or loss and perplexity; with --metrics also scores of answers.
    """
    with heavy_imports():
        from ..tasks import MEANINGS, TASK_MEANINGS

    start = time.perf_counter()
    with progress(printing.silent, "examples") as bar:
        found = evaluate_model(model, data, progress=bar, processes=True, **options)
    if printing.json:
        facts = {"model": model} | ({} if data is None else {"data": data})
        print_json({**facts, **found, "seconds": time.perf_counter() - start})
        return
    print_notes(found["notes"], printing.quiet)
    if data is not None:
        if not printing.quiet:
            columns = ", ".join(f"{role} from {' + '.join(names)}" for role, names in found["columns"].items())
            echo(one_line(f"{model} on {data}: {found['task']}, {columns}"))
        errors, meanings = found["standard_errors"], {**MEANINGS, **TASK_MEANINGS.get(found["task"], {})}
        rows = [
            [
                name,
                "undefined" if value is None else Measured(value, errors[name]) if name in errors else value,
                meanings[name],
            ]
            for name, value in found.items()
            if name in meanings
        ]
        print_table(["metric", "value ± standard error", "meaning"], rows, right=(1,), digits=5)
    if "lm_eval" in found:
        rows = [
            [task, name, Measured(value, result["standard_errors"][name]), result["examples"]]
            for task, result in found["lm_eval"].items()
            for name, value in result.items()
            if name in result["standard_errors"]
        ]
        print_table(["lm-eval task", "metric", "value ± standard error", "examples"], rows, right=(2, 3), digits=5)
