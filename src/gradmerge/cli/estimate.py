"""`gradmerge curvature estimate`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..api.estimate import estimate_curvature
from ..errors import InputError
from ..text import count
from .options import (
    Data,
    DryRun,
    Model,
    Printing,
    command,
)
from .output import Notes, heavy_imports, print_dry_run, print_json, print_notes, progress
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge curvature estimate ./yelp --data reviews.jsonl -o ./yelp/curvature   ·   "
    "gradmerge curvature estimate ./gpt2-toxic --data comments.txt.gz --dtype bfloat16 --precision log8 "
    "-o ./toxic-curvature"
)


Likelihood = Annotated[
    Literal["empirical", "sampled", "exact"],
    typer.Option(help="The labels: of the data, drawn from the model, or the expectation over its classes."),
]


@command(api=estimate_curvature, without=["output", "shard_size", "save_every", "processes"], processes=True)
def estimate(
    *,
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT", help="Curvature folder to write.")] = None,
    dry_run: DryRun = False,
    likelihood: Likelihood = "empirical",
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Estimate curvature on data.

    Curvature is the sum over examples of the squared gradient of each example's loss. It costs about a training step
    per batch. Name the file in a recipe, or write it to MODEL/curvature, where merges find it.
    """
    if dry_run:
        with heavy_imports():
            from ..api.dry_run import dry_run_estimate

        for name in ("seed", "resume", "force"):
            del options[name]
        print_dry_run(dry_run_estimate(model, data, out, likelihood=likelihood, **options), printing)
        return
    if out is None:
        raise InputError("give a folder for the result: -o OUT")
    logging.basicConfig(handlers=[Notes()], level=logging.ERROR if printing.quiet else logging.WARNING)
    with heavy_imports(), progress(printing.silent, "examples") as bar:
        result: Any = estimate_curvature(model, data, likelihood, out=out, progress=bar, processes=True, **options)
    precision = options["precision"]
    if printing.json:
        request = {"model": model, "data": data, "likelihood": likelihood, "precision": precision}
        print_json({**asdict(result), "out": str(out), **request})
        return
    print_notes(result.notes, printing.quiet)
    if not printing.quiet:
        kinds = {"gram": "Gram matrices", "kronecker": f"{likelihood} Kronecker factors"}
        echo(
            f"{out}: {kinds.get(result.kind) or f'{likelihood} curvature'} of {result.tensors} tensors, "
            f"{count(result.entries)} entries, sum over {result.examples} examples ({result.task}), "
            f"stored as {precision}; {result.seconds:.1f} s on {result.device}"
            f"{f', {result.processes} processes' if result.processes > 1 else ''}"
        )
