"""`gradmerge evaluate`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ..distributed import launched
from ..text import Measured, one_line
from .options import (
    Data,
    GenerationOptions,
    HarnessOptions,
    LoadingOptions,
    Model,
    Printing,
    command_with,
)
from .output import heavy_imports, print_json, print_notes, print_table, progress
from .stdio import echo

if TYPE_CHECKING:
    from ..tasks import LoadedTask

EXAMPLE = (
    "Examples: gradmerge evaluate ./yelp --data reviews.jsonl --columns text=review,label=stars   ·   "
    "gradmerge evaluate org/model@main --data org/dataset:test --limit 500   ·   "
    "gradmerge evaluate ./vit --data ./photos   ·   "
    "gradmerge evaluate ./chat --data dialogues.jsonl --generate --metrics exact-match,rouge   ·   "
    "gradmerge evaluate ./merged --lm-eval arc_easy,hellaswag --limit 200"
)


@command_with(processes=True)
def evaluate(
    *,
    model: Model,
    data: Annotated[str | None, *get_args(Data)[1:]] = None,
    head: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Evaluate with the head of this model instead of MODEL's own.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also put the numbers into the model card of a folder that gradmerge wrote.")
    ] = False,
    loading: LoadingOptions,
    writing: GenerationOptions,
    harness: HarnessOptions,
    printing: Printing,
) -> None:
    """Evaluate a model: on data, by what it writes, or on tasks of the lm-evaluation-harness.

    On data: accuracy and F1, errors of a regression, or loss and perplexity; with --generate the answers too.
    """
    with heavy_imports():
        from ..api.evaluate import evaluated

    begun = time.perf_counter()
    given = loading.as_keywords()
    with progress(printing.silent, "examples") as shown:
        generation, asked = writing.as_generation(), (harness.lm_eval, harness.lm_eval_tasks)
        found, loaded = evaluated(model, data, generation, *asked, given, shown, card, processes=True, head=head)
    notes = list(loaded.notes) if loaded is not None else []
    if harness.lm_eval is not None and launched() is not None:
        notes.append("--lm-eval ran in the first process alone")
    facts: dict[str, Any] = {"model": model, **({"data": data} if data is not None else {}), **found}
    if loaded is not None:
        facts |= {"columns": {role: list(names) for role, names in loaded.columns.items()}}
        facts["device"] = str(loaded.device)
    facts |= {"seconds": time.perf_counter() - begun, "notes": notes}
    if printing.json:
        print_json(facts)
        return
    print_notes(notes, printing.quiet)
    if loaded is not None:
        _print_numbers(f"{model} on {data}", loaded, found, printing.quiet)
    if "lm_eval" in found:
        _print_harness(found["lm_eval"])


def _print_numbers(what: str, loaded: LoadedTask, numbers: dict[str, Any], quiet: bool) -> None:
    from .. import tasks

    if not quiet:
        read = ", ".join(f"{role} from {' + '.join(names)}" for role, names in loaded.columns.items())
        echo(one_line(f"{what}: {loaded.task}, {read}"))
    told = {name: value for name, value in numbers.items() if name in tasks.MEANINGS}
    errors = numbers["standard_errors"]
    shown_as = {name: Measured(value, errors[name]) if name in errors else value for name, value in told.items()}
    rows = [[name, "undefined" if value is None else value, tasks.MEANINGS[name]] for name, value in shown_as.items()]
    print_table(["metric", "value ± standard error", "meaning"], rows, right=(1,), digits=5)


def _print_harness(found: dict[str, dict[str, Any]]) -> None:
    rows = [
        [task, name, Measured(value, numbers["standard_errors"][name]), numbers["examples"]]
        for task, numbers in found.items()
        for name, value in numbers.items()
        if name in numbers["standard_errors"]
    ]
    print_table(["lm-eval task", "metric", "value ± standard error", "examples"], rows, right=(2, 3), digits=5)
