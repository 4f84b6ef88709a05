"""`gradmerge calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.calibrate import calibrate as calibrate_model
from .options import DryRun, LoadingOptions, Printing, command_with, named
from .output import heavy_imports, print_result, print_table, progress, typed
from .stdio import echo

if TYPE_CHECKING:
    from ..api.refine import RefinementResult
    from ..tasks import LoadOptions

EXAMPLE = (
    "Examples: gradmerge calibrate ./merged --data yelp=yelp.jsonl --data imdb=imdb.jsonl -o ./calibrated   ·   "
    "gradmerge calibrate ./merged --data code=code.jsonl --teacher code=./code-model --curvature none -o ./calibrated"
)
NamedRows = Annotated[
    list[str],
    typer.Option("--data", "-d", metavar="NAME=SRC", help="Unlabeled rows of a task. Repeat it for each task."),
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


@dataclass(frozen=True)
class RowOptions(LoadingOptions):
    """How models and unlabeled rows are loaded."""

    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Read at most N rows of each task.")] = 256
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows at once; the result does not depend on it.",
            show_default="32, fewer for long texts",
        ),
    ] = None  # type: ignore[assignment]

    def as_keywords(self) -> LoadOptions:
        """As keywords of the Python functions, which have batch sizes of their own."""
        keywords = super().as_keywords()
        if self.batch_size is None:
            del keywords["batch_size"]
        return keywords


@command_with(api=calibrate_model, without=["teachers"])
def calibrate(
    *,
    merged: Merged,
    data: NamedRows,
    out: Out,
    teacher: NamedTeacher = None,
    options: dict[str, Any],
    loading: RowOptions,
    dry_run: DryRun = False,
    printing: Printing,
) -> None:
    """Bring a merge closer to its fine-tuned models, with a closed-form solve per layer on a few unlabeled rows.

    Labels are not read. If the result is not closer on held-out rows, OUT is the merge unchanged.
    """
    rows: dict[str, Any] = {"teachers": named(teacher or [], "teacher"), "out": out, **loading.as_keywords()}
    if dry_run:
        with heavy_imports():
            from ..api.calibrate import dry_run_calibrate
            from .dry_run import print_dry_run

        settings = {name: options[name] for name in ("cache_memory", "check")}
        print_dry_run(dry_run_calibrate(merged, named(data), **settings, **rows), printing)
        return
    with heavy_imports(), progress(printing.silent, "blocks") as bar:
        done = calibrate_model(merged, named(data), progress=bar, command=typed(), **options, **rows)
    print_refinement(done, printing, "the distance after each block")


def print_refinement(done: RefinementResult, printing: Printing, figures: str) -> None:
    """Print the result of `calibrate` or `distill`; ``figures`` says what the report shows."""
    if not print_result(done, printing):
        return
    columns, rows = done.table()
    print_table(columns, rows, right=range(1, len(columns)))
    echo("\n" + " ".join(done.verdict).replace("**", "").replace("`", ""))
    echo(f"{done.output}: written in {done.seconds:.1f} s; report.html shows {figures}.")
