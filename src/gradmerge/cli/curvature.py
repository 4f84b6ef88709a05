"""`gradmerge curvature`: estimate it, import it from an optimizer, show a file."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..api.estimate import estimate_curvature
from ..errors import InputError
from ..text import count, one_line
from .options import Data, DryRun, Model, Printing, command
from .output import Notes, echo, heavy_imports, print_dry_run, print_json, print_notes, print_table, progress

ESTIMATE = (
    "Examples: gradmerge curvature estimate ./yelp --data reviews.jsonl -o ./yelp/curvature   ·   "
    "gradmerge curvature estimate ./gpt2-toxic --data comments.txt.gz --dtype bfloat16 --precision log8 "
    "-o ./toxic-curvature"
)
IMPORT = (
    "Example: gradmerge curvature import ./yelp/checkpoint-500 --dataset-size 25000 --batch-size 32 -o ./yelp-curvature"
)
SHOW = "Example: gradmerge curvature show ./yelp-curvature"


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


@command(api=estimate_curvature, only=["precision", "force"], loading=[])
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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Curvature folder to write.")],
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Take curvature from the optimizer in a training checkpoint.

    The optimizer is Adam, AdamW or IVON. With Adam, the curvature is N·B·v̂: v̂ are the second moments of steps of B
    examples, and N is the dataset size. This assumes a loss that is a mean over the batch, and a small mean gradient.
    `curvature estimate` assumes neither, but needs a pass over the data.
    """
    with heavy_imports():
        from ..curvature.from_optimizer import import_curvature
        from ..engine.input_state import model_paths
        from ..io.atomic_dir import AtomicDir

    precision, read = options["precision"], model_paths(checkpoint)
    with AtomicDir(out, "curvature", force=options["force"], reads=read, inside=read) as staging:
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


@command()
def show(
    *,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Curvature folder or file, or a model folder that holds one.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page (.html) with the distribution of the values by layer. Replaces FILE.",
        ),
    ] = None,
    printing: Printing,
) -> None:
    """Show what a curvature file contains.

    For each group of parameters: sum, mean, share of zeros and maximum. For Kronecker factors these are of the diagonal
    of G ⊗ A / T.
    """
    from ..curvature.curvature import pieces, summarize
    from ..curvature.format import open_curvature

    if plot:
        from ..report.curvature import check_plot_path, plot_curvature

        check_plot_path(plot)
    with open_curvature(path) as file:
        if plot:
            plot_curvature(file, plot)
        groups = summarize(pieces(file))
    facts: dict[str, Any] = {
        "path": path,
        "examples": file.examples,
        "likelihood": file.likelihood,
        "model": file.metadata.get("model", ""),
        "kind": file.kind,
        "precision": file.precision,
        "parameters": sum(g.entries for g in groups),
        "groups": [g.as_dict() for g in groups],
        **({"tokens": file.tokens} if file.kind == "kronecker" else {}),
        **({"plot": str(plot)} if plot else {}),
    }
    if printing.json:
        print_json(facts)
        return
    likelihood = one_line(file.likelihood) or "not stated"
    what = {
        "diagonal": f"diagonal curvature, likelihood {likelihood}",
        "gram": "Gram matrices XᵀX of linear layers' inputs",
        "kronecker": f"Kronecker factors of {len(file.tokens)} layers and diagonals, likelihood {likelihood}",
    }[file.kind]
    echo(
        f"{one_line(path)}: {what}, sum over {file.examples} examples, "
        f"estimated for {one_line(facts['model']) or 'a model that is not named'}, stored as {file.precision}"
    )
    rows = []
    for g in groups:
        zeros = f"{100 * g.share_of_zeros:.1f} %"
        rows.append([g.name, count(g.entries), f"{g.total:.4g}", f"{g.per_entry:.3g}", zeros, f"{g.largest:.3g}"])
    print_table(["group", "entries", "sum", "mean per entry", "zeros", "max"], rows, right=(1, 2, 3, 4, 5))
    if not printing.quiet:
        echo("Sums over examples; divide by the number of examples for `reduction: mean`.")
