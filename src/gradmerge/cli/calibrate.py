"""`gradmerge calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DryRun, Force, LoadingOptions, Printing, command, named
from .output import heavy_imports, print_json, print_notes, print_table, progress, typed
from .stdio import echo

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
if TYPE_CHECKING:
    from ..tasks import LoadOptions

CacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Hidden states kept in memory, such as 8GB; more go to a file. Default: half of what is free.",
    ),
]


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


@command
def calibrate(
    *,
    merged: Annotated[str, typer.Argument(metavar="MERGED", help="Merged model: folder, Hub id or LoRA adapter.")],
    data: NamedRows,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    teacher: NamedTeacher = None,
    curvature: Annotated[
        str,
        typer.Option(metavar="C", help="Output factors: none, merge, or auto, which compares both on held-out rows."),
    ] = "auto",
    alpha: Annotated[
        float, typer.Option(metavar="A", help="Share of the fine-tuned model's activations in the targets, 0 to 1.")
    ] = 0.25,
    ridge: Annotated[float, typer.Option(metavar="L", help="How strongly weights are held to the merge.")] = 0.3,
    max_kronecker_dim: Annotated[
        int, typer.Option(metavar="N", min=1, help="Layers with more inputs or outputs have no output factor.")
    ] = 16384,
    cache_memory: CacheMemory = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Hold out a tenth of the rows, and keep the merge if it is closer."),
    ] = True,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the labels that are sampled.")] = 0,
    loading: RowOptions,
    force: Force = False,
    dry_run: DryRun = False,
    printing: Printing,
) -> None:
    """Bring a merge closer to its fine-tuned models, with a closed-form solve per layer on a few unlabeled rows.

    Labels are not read. If the result is not closer on held-out rows, OUT is the merge unchanged.
    """
    sources, teachers = named(data), named(teacher or [], "teacher")
    with heavy_imports():
        from ..api.calibrate import calibrate as calibrate_model, dry_run_calibrate

    if dry_run:
        from .dry_run import print_dry_run

        job = dry_run_calibrate(
            merged, sources, teachers=teachers, out=out, cache_memory=cache_memory, check=check, **loading.as_keywords()
        )
        print_dry_run(job, printing)
        return
    with progress(printing.silent, "blocks") as bar:
        done = calibrate_model(
            merged,
            sources,
            teachers=teachers,
            out=out,
            curvature=curvature,
            alpha=alpha,
            ridge=ridge,
            max_kronecker_dim=max_kronecker_dim,
            cache_memory=cache_memory,
            check=check,
            seed=seed,
            progress=bar,
            force=force,
            command=typed(),
            **loading.as_keywords(),
        )
    if printing.json:
        print_json(done.to_dict())
        return
    print_notes(map(str, done.notes), printing.quiet)
    if printing.quiet:
        return
    columns, rows = done.table()
    print_table(columns, rows, right=range(1, len(columns)))
    echo("\n" + " ".join(done.verdict).replace("**", "").replace("`", ""))
    echo(f"{out}: written in {done.seconds:.1f} s; report.html shows the distance after each block.")
