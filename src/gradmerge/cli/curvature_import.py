"""`gradmerge curvature import`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..text import count
from .options import CurvatureOut, Force, Precision, Printing, command
from .output import heavy_imports, print_json, print_notes
from .stdio import echo

EXAMPLE = (
    "Example: gradmerge curvature import ./yelp/checkpoint-500 --dataset-size 25000 --batch-size 32 -o ./yelp-curvature"
)


@command()
def import_(
    *,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="TRAINER_CHECKPOINT",
            help="Checkpoint folder of the Hugging Face Trainer: "
            "optimizer.pt (read with weights_only) and config.json.",
        ),
    ],
    dataset_size: Annotated[int, typer.Option(metavar="N", min=1, help="Number of training examples.")],
    batch_size: Annotated[
        int,
        typer.Option(
            metavar="B",
            min=1,
            help="Examples in an optimizer step: batch size per device × devices × accumulated batches.",
        ),
    ],
    out: CurvatureOut,
    precision: Precision = "float32",
    force: Force = False,
    printing: Printing,
) -> None:
    """Take curvature from the optimizer in a training checkpoint.

    The optimizer is Adam, AdamW or IVON. With Adam it is N·B·v̂, the sum over N examples, from the second moments v̂ of
    steps of B examples each. It assumes a loss that is a mean over the batch, and a mean gradient that is small;
    `curvature estimate` assumes neither, but needs a pass over the data.
    """
    with heavy_imports():
        from ..curvature.from_optimizer import import_curvature
        from ..engine.input_state import model_paths
        from ..io.atomic_dir import AtomicDir

    read = model_paths(checkpoint)
    with AtomicDir(out, "curvature", force=force, reads=read, inside=read) as staging:
        curvature = import_curvature(checkpoint, dataset_size, batch_size)
        curvature.write(staging.folder, precision)
    parameters = sum(value.numel() for value in curvature.values())
    if printing.json:
        facts = {
            "path": str(out),
            "checkpoint": checkpoint,
            "likelihood": curvature.likelihood,
            "examples": curvature.examples,
            "batch_size": batch_size,
            "precision": precision,
            "tensors": len(curvature),
            "parameters": parameters,
            "notes": curvature.notes,
        }
        print_json(facts)
        return
    print_notes(curvature.notes, printing.quiet)
    if not printing.quiet:
        echo(
            f"{out}: {curvature.likelihood} curvature of {len(curvature)} tensors, {count(parameters)} entries, "
            f"sum over {curvature.examples} examples, stored as {precision}"
        )
