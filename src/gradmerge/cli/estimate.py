"""`gradmerge curvature estimate`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..text import count
from .options import (
    Attn,
    BatchSize,
    Columns,
    Data,
    Device,
    Dtype,
    Limit,
    MaxLength,
    Model,
    Precision,
    Task,
    Tokenizer,
)
from .output import Debug, Durable, Json, Notes, Quiet, guarded, heavy_imports, note, print_json, progress
from .streams import say

EXAMPLE = (
    "Examples: gradmerge curvature estimate ./yelp --data reviews.jsonl -o ./yelp/curvature   ·   gradmerge curvature estimate "
    "./gpt2-toxic --data comments.txt.gz --dtype bfloat16 --precision log8 -o ./toxic-curvature"
)


def estimate(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Curvature folder to write.")],
    task: Task = "auto",
    likelihood: Annotated[
        str,
        typer.Option(
            "--likelihood",
            metavar="L",
            help="empirical: labels of the data; sampled: drawn from the model; exact: expectation over the classes.",
        ),
    ] = "empirical",
    columns: Columns = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attn = None,
    tokenizer: Tokenizer = None,
    kind: Annotated[
        str,
        typer.Option(
            "--kind", metavar="K", help="diagonal: squared gradients; gram: XᵀX of linear layers' inputs, for regmean."
        ),
    ] = "diagonal",
    at_delta: Annotated[
        str | None,
        typer.Option("--at-delta", metavar="BASE", help="Measure at MODEL − BASE instead of MODEL, for fa1."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the labels that `sampled` draws.")] = 0,
    precision: Precision = "float32",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped; it saves its work every few minutes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if gradmerge wrote it, or it is empty.")] = False,
    durable: Durable = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure curvature: the sum over examples of the squared gradient of each example's loss.

    It costs about a training step a batch. The file goes into a recipe, or as MODEL/curvature is found by itself.
    """
    with guarded(debug, json_):
        with heavy_imports():
            from ..api.estimating import measure_curvature
            from ..tasks import parse_columns

        logging.basicConfig(handlers=[Notes()], level=logging.ERROR if quiet else logging.WARNING)
        with progress(quiet or json_, "examples") as shown:
            result = measure_curvature(
                model, data, out, task=task, likelihood=likelihood, kind=kind, at_delta=at_delta,
                columns=parse_columns(columns), limit=limit, batch_size=batch_size, max_length=max_length, device=device,
                dtype=dtype, attn=attn, tokenizer=tokenizer, seed=seed, precision=precision, resume=resume, force=force,
                durable=durable, progress=shown,
            )  # fmt: skip
        if json_:
            print_json({**asdict(result), "out": str(out), "model": model, "data": data, "likelihood": likelihood,
                        "precision": precision})  # fmt: skip
            return
        for text in result.notes:
            note(text, quiet)
        if not quiet:
            what = "Gram matrices" if kind == "gram" else f"{likelihood} curvature"
            say(
                f"{out}: {what} of {result.tensors} tensors, {count(result.entries)} entries, sum over {result.examples} examples "
                f"({result.task}), stored as {precision}; {result.seconds:.1f} s on {result.device}"
            )
