"""`gradmerge distill`."""

from __future__ import annotations

from typing import Any

from ..api.distill import distill as distill_model
from .calibrate import Merged, NamedRows, NamedTeacher, Out, print_refinement
from .options import Printing, command, named
from .output import heavy_imports, progress, typed

EXAMPLE = (
    "Examples: gradmerge distill ./calibrated --data yelp=yelp.jsonl --data imdb=imdb.jsonl -o ./distilled   ·   "
    "gradmerge distill ./merged --data code=code.jsonl --teacher code=./code-model --steps 100 -o ./distilled"
)


@command(
    api=distill_model,
    without=["teachers", "seed", "dtype"],
    defaults={"limit": "256", "batch_size": "16, fewer for long texts"},
)
def distill(
    *,
    merged: Merged,
    data: NamedRows,
    out: Out,
    teacher: NamedTeacher = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Train a merge with the fine-tuned models as teachers.

    It is best to calibrate the merge first. Rows need no labels. If no step is better on held-out rows, OUT is MERGED
    unchanged.
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
        )
    print_refinement(done, printing, "the loss over the steps")
