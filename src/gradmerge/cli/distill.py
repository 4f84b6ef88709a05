"""`gradmerge distill`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .calibrate import NamedRows, NamedTeacher, RowOptions
from .options import Force, Printing, command, named
from .output import heavy_imports, print_json, print_notes, print_table, progress, typed
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge distill ./calibrated --data yelp=yelp.jsonl --data imdb=imdb.jsonl -o ./distilled   ·   "
    "gradmerge distill ./merged --data code=code.jsonl --teacher code=./code-model --steps 100 -o ./distilled"
)


@dataclass(frozen=True)
class BatchOptions(RowOptions):
    """The same, with the batches of a training."""

    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows of each task in a step.", show_default="16, fewer for long texts"),
    ] = None


@command
def distill(
    *,
    merged: Annotated[
        str, typer.Argument(metavar="MERGED", help="Merged or calibrated model: folder, Hub id or LoRA adapter.")
    ],
    data: NamedRows,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    teacher: NamedTeacher = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="representations, answers, both, or auto, which goes by the task.",
        ),
    ] = "auto",
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Steps. Default: 273 for 256 rows per task; to match answers, 91."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(metavar="R", help="Highest learning rate. Default: 0.06 over the model's width."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the order of batches.")] = 0,
    loading: BatchOptions,
    force: Force = False,
    printing: Printing,
) -> None:
    """Train a merge on unlabeled rows, with the fine-tuned models as teachers. Best after calibrate.

    Labels are not read. If no step is better on held-out rows, OUT is MERGED unchanged.
    """
    sources, teachers = named(data), named(teacher or [], "teacher")
    with heavy_imports():
        from ..api.distill import distill as distill_merge

    with progress(printing.silent, "steps") as shown:
        done = distill_merge(
            merged,
            sources,
            teachers=teachers,
            out=out,
            match=match,
            steps=steps,
            lr=lr,
            seed=seed,
            progress=shown,
            force=force,
            command=typed(),
            **loading.as_keywords(),
        )
    if printing.json:
        print_json(done.to_dict())
        return
    print_notes(done.notes, printing.quiet)
    if printing.quiet:
        return
    columns, rows = done.table()
    print_table(columns, rows, right=range(1, len(columns)))
    echo("\n" + " ".join(done.verdict).replace("**", "").replace("`", ""))
    echo(f"{out}: written in {done.seconds:.1f} s; report.html shows the loss over the steps.")
