"""`gradmerge diagnose`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..text import one_line
from .options import Attn, BatchSize, Columns, Device, Dtype, Limit, MaxLength, Task, Tokenizer
from .output import (
    AllowConfig,
    AllowPickle,
    Debug,
    Json,
    Quiet,
    guarded,
    heavy_imports,
    note,
    print_json,
    print_table,
    progress,
)
from .streams import say

EXAMPLE = (
    "Examples: gradmerge diagnose recipe.yml -o report   ·   gradmerge diagnose recipe.yml --data yelp=yelp.jsonl "
    "--data sst2=sst2.jsonl --limit 200 -o report"
)
TaskData = Annotated[
    list[str] | None,
    typer.Option(
        "--data", "-d", metavar="NAME=SRC", help="Data of a task (its model's folder name, or base). Repeatable."
    ),
]


def diagnose(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, with curvature of every model.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="REPORT_DIR", help="Folder for the report.")],
    merged: Annotated[
        str | None,
        typer.Option(
            "--merged", metavar="DIR", help="A merged model to look at, instead of what the recipe would give."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="DIR", help="A model trained on everything, for the true mismatch (needs --data)."
        ),
    ] = None,
    data: TaskData = None,
    task: Task = "auto",
    columns: Columns = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attn = None,
    tokenizer: Tokenizer = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Threads; by default one a core, at most 4.")
    ] = None,
    allow_pickle: AllowPickle = False,
    allow_config: AllowConfig = None,
    force: Annotated[bool, typer.Option("--force", help="Replace REPORT_DIR if gradmerge wrote it.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say what a merge costs: which task loses, in which layers, and where tasks pull apart.

    From curvature alone, beside task arithmetic, average, Fisher averaging and gradient matching; with --data also measured.
    """
    with guarded(debug, json_):
        with heavy_imports():
            from ..api.diagnosing import as_json, write_diagnosis
            from ..report.diagnosis_page import prediction_table, verdict
            from ..tasks import parse_columns

        loading = {
            "task": task, "columns": parse_columns(columns), "limit": limit, "max_length": max_length, "device": device,
            "dtype": dtype, "attn": attn, "tokenizer": tokenizer,
        }  # fmt: skip
        with progress(quiet or json_) as shown:
            found = write_diagnosis(
                recipe, out, merged=merged, target=target, data=named(data or []), loading=loading, batch_size=batch_size,
                threads=threads, allow_pickle=allow_pickle, allow_config=allow_config or (), force=force,
                progress=shown, command=shlex.join(["gradmerge", *sys.argv[1:]]),
            )  # fmt: skip
        if json_:
            print_json({**as_json(found), "report": str(out / "report.html")})
            return
        for text in found.notes:
            note(text, quiet)
        table = prediction_table(found)
        rows = [[_shown(cell) for cell in row] for row in table.rows]
        print_table(list(table.columns), rows, right=range(1, len(table.columns)))
        if not quiet:
            say("\n" + "\n".join(map(one_line, verdict(found))))
            say(f"\n{out / 'report.html'} has the rest. Predictions rank; they are no losses in nats.")


def named(pairs: list[str]) -> dict[str, str]:
    """`NAME=SRC` options as a mapping."""
    from ..errors import InputError

    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, source = pair.partition("=")
        if not equals or not name or not source:
            raise InputError(f"--data {pair}: give the task's name and its data, as --data yelp=reviews.jsonl")
        if name in found:
            raise InputError(f"--data {pair}: {name} has data already")
        found[name] = source
    return found


def _shown(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
