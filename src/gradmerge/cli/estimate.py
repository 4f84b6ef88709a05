"""`gradmerge curvature estimate`."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..text import count
from .completion import words_of
from .options import (
    Data,
    DryRun,
    Force,
    LoadingOptions,
    Model,
    Precision,
    Printing,
    command_with,
)
from .output import Notes, heavy_imports, memory_of, print_json, print_notes, progress
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge curvature estimate ./yelp --data reviews.jsonl -o ./yelp/curvature   ·   "
    "gradmerge curvature estimate ./gpt2-toxic --data comments.txt.gz --dtype bfloat16 --precision log8 "
    "-o ./toxic-curvature"
)


@dataclass(frozen=True)
class EstimateOptions:
    """How curvature is estimated and written: options of :func:`gradmerge.api.estimate.estimate_to_disk`."""

    likelihood: Annotated[
        str,
        typer.Option(
            metavar="L",
            help="empirical: labels of the data; sampled: drawn from the model; exact: expectation over the classes.",
            autocompletion=words_of("likelihood"),
        ),
    ] = "empirical"
    kind: Annotated[
        str,
        typer.Option(
            metavar="K",
            help="diagonal: squared gradients; gram: XᵀX of linear layers' inputs, for regmean; kronecker: two factors "
            "per linear layer, for gradient-matching and removal.",
            autocompletion=words_of("kind"),
        ),
    ] = "diagonal"
    max_kronecker_dim: Annotated[
        int,
        typer.Option(
            metavar="N", help="With --kind kronecker: layers with more inputs or outputs than this have a diagonal."
        ),
    ] = 16384
    at_delta: Annotated[
        str | None, typer.Option(metavar="BASE", help="Estimate at MODEL − BASE instead of MODEL, for fa1.")
    ] = None
    accumulate_on: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where sums are kept until they are written: device, cpu or disk.",
            show_default="where the weights are",
        ),
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the labels that `sampled` draws.")] = 0
    precision: Precision = "float32"
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped; it saves its work every few minutes.")
    ] = False
    force: Force = False


@command_with(processes=True)
def estimate(
    *,
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT", help="Curvature folder to write.")] = None,
    loading: LoadingOptions,
    dry_run: DryRun = False,
    options: EstimateOptions,
    printing: Printing,
) -> None:
    """Estimate curvature: the sum over examples of the squared gradient of each example's loss.

    It costs about a training step per batch. The file goes into a recipe, or as MODEL/curvature is found by itself.
    """
    keywords = {**asdict(options), **loading.as_keywords()}
    if dry_run:
        with heavy_imports():
            from ..api.dry_run import dry_run_estimate
            from .dry_run import print_dry_run

        for name in ("seed", "resume", "force"):
            del keywords[name]
        print_dry_run(dry_run_estimate(model, data, out, **keywords), printing)
        return
    if out is None:
        raise InputError("give a folder for the result: -o OUT")
    with heavy_imports():
        from ..api.estimate import estimate_to_disk

    logging.basicConfig(handlers=[Notes()], level=logging.ERROR if printing.quiet else logging.WARNING)
    with progress(printing.silent, "examples") as bar:
        result = estimate_to_disk(model, data, out, progress=bar, processes=True, **keywords)
    if printing.json:
        request = {"model": model, "data": data, "likelihood": options.likelihood, "precision": options.precision}
        print_json({**asdict(result), "out": str(out), **request})
        return
    print_notes(result.notes, printing.quiet)
    if not printing.quiet:
        kinds = {"gram": "Gram matrices", "kronecker": f"{options.likelihood} Kronecker factors"}
        echo(
            f"{out}: {kinds.get(options.kind) or f'{options.likelihood} curvature'} of {result.tensors} tensors, "
            f"{count(result.entries)} entries, sum over {result.examples} examples ({result.task}), "
            f"stored as {options.precision}; {result.seconds:.1f} s on {result.device}"
            f"{f', {result.processes} processes' if result.processes > 1 else ''}{memory_of(result.memory)}"
        )
