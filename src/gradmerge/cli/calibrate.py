"""`gradmerge calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.calibrate import calibrate as calibrate_model
from ..load_options import DEFAULTS
from .options import DryRun, Printing, command, named
from .output import echo, heavy_imports, print_dry_run, print_result, print_table, progress, typed

if TYPE_CHECKING:
    from ..api.refine import RefinementResult

EXAMPLE = (
    "Examples: gradmerge calibrate ./merged --data yelp=yelp.jsonl --data imdb=imdb.jsonl -o ./calibrated   ·   "
    "gradmerge calibrate ./merged --data code=code.jsonl --teacher code=./code-model --curvature none -o ./calibrated"
)
NamedRows = Annotated[
    list[str],
    typer.Option(
        "--data",
        "-d",
        metavar="NAME=SRC",
        help="Unlabeled rows of a task: the name of its fine-tuned model, and a data source as for evaluate. Repeat it "
        "for each task.",
    ),
]
NamedTeacher = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="The fine-tuned model of a task. Default: the model of that name in MERGED/gradmerge.json. Repeatable.",
    ),
]
Merged = Annotated[
    str, typer.Argument(metavar="MERGED", help="Merged or calibrated model: folder, Hub id or LoRA adapter.")
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")]


@command(
    api=calibrate_model,
    without=["teachers", "check", "seed", "dtype"],
    defaults={"limit": "256", "batch_size": "32, fewer for long texts"},
)
def calibrate(
    *,
    merged: Merged,
    data: NamedRows,
    out: Out,
    teacher: NamedTeacher = None,
    options: dict[str, Any],
    dry_run: DryRun = False,
    printing: Printing,
) -> None:
    """Improve a merge on a few unlabeled rows, layer by layer.

    A closed-form solution for each layer brings the merge closer to its fine-tuned models. Labels are not read. If the
    result is not closer on held-out rows, OUT is the merge unchanged.
    """
    sources, teachers = named(data), named(teacher or [], "teacher")
    if dry_run:
        with heavy_imports():
            from ..api.calibrate import dry_run_calibrate

        loading: Any = {name: value for name, value in options.items() if name in (*DEFAULTS, "cache_memory")}
        print_dry_run(dry_run_calibrate(merged, sources, teachers=teachers, out=out, **loading), printing)
        return
    with heavy_imports(), progress(printing.silent, "blocks") as bar:
        done = calibrate_model(merged, sources, teachers=teachers, out=out, progress=bar, command=typed(), **options)
    print_refinement(done, printing, "the distance after each block")


def print_refinement(done: RefinementResult, printing: Printing, figures: str) -> None:
    """Print the result of `calibrate` or `distill`; ``figures`` says what the report shows."""
    if not print_result(done, printing):
        return
    columns, rows = done.table()
    print_table(columns, rows, right=range(1, len(columns)))
    echo("\n" + " ".join(done.verdict).replace("**", "").replace("`", ""))
    echo(f"{done.output}: written in {done.seconds:.1f} s; report.html shows {figures}.")
