"""`gradmerge distill`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..api.distill import distill as distill_model
from .calibrate import Merged, NamedRows, NamedTeacher, Out, RowOptions, print_refinement
from .options import Printing, command_with, named
from .output import heavy_imports, progress, typed

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


@command_with(api=distill_model, without=["teachers"])
def distill(
    *,
    merged: Merged,
    data: NamedRows,
    out: Out,
    teacher: NamedTeacher = None,
    options: dict[str, Any],
    loading: BatchOptions,
    printing: Printing,
) -> None:
    """Train a merge on unlabeled rows, with the fine-tuned models as teachers. Best after calibrate.

    Labels are not read. If no step is better on held-out rows, OUT is MERGED unchanged.
    """
    sources, teachers = named(data), named(teacher or [], "teacher")
    with heavy_imports(), progress(printing.silent, "steps") as bar:
        done = distill_model(
            merged,
            sources,
            teachers=teachers,
            out=out,
            progress=bar,
            command=typed(),
            **options,
            **loading.as_keywords(),
        )
    print_refinement(done, printing, "the loss over the steps")
