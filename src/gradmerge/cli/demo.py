"""`gradmerge demo`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Printing, command
from .output import echo, heavy_imports, print_json, print_table, progress

EXAMPLE = "Examples: gradmerge demo   ·   gradmerge demo -o my-demo"


@command()
def demo(
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="New folder for everything."),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the split, the weights and the batches.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder of an earlier demonstration.")] = False,
    printing: Printing,
) -> None:
    """Run the whole workflow on small models.

    The steps are: train, estimate curvature, merge, calibrate, distill, remove, evaluate. They use the handwritten
    digits of scikit-learn (pip install 'gradmerge[demo]') and take a minute or two. Prints each command that it runs.
    The folder holds models, data, recipes, reports and the commands.
    """
    with heavy_imports():
        from ..demo import Settings, run_demo
        from ..demo.digits import REMOVED
        from ..demo.run import EVERY, REST

    begun = time.perf_counter()

    def say(text: str) -> None:
        if not printing.silent:  # a progress bar replaces sys.stderr, to put these lines above itself
            echo(text, err=True)

    with progress(printing.silent, "steps") as shown:
        results = run_demo(out, settings=Settings(seed=seed), force=force, progress=shown, say=say)
    seconds = time.perf_counter() - begun
    if printing.json:
        print_json({**results, "folder": str(out), "seconds": round(seconds, 1)})
        return
    images = results["images"]["test"]
    echo(f"Accuracy on {images} test images per task in percent with its standard error, and the mean loss:\n")
    columns = ["model", *EVERY, "mean ± error", "loss"]
    rows = [_cells(row, EVERY) for row in results["merging"]]
    print_table(columns, rows, right=range(1, len(columns)))
    echo(f"\nRemoving {REMOVED} from the joint model; KL is the distance to the target on {REMOVED} in nats:\n")
    columns = ["model", REMOVED, *REST, "rest, mean ± error", "rest, loss", "KL"]
    rows = [[*_cells(row, (REMOVED, *REST)), f"{row['kl']:.3f}"] for row in results["removal"]]
    print_table(columns, rows, right=range(1, len(columns)))
    if not printing.quiet:
        echo(f"\nDone in {seconds:.0f} s. Commands that repeat the steps: {out / 'commands.sh'}")
        echo(f"Reports: {out / 'preview' / 'report.html'}, {out / 'diagnose' / 'report.html'}")


def _cells(row: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    """Return a model's name, accuracies in percent, their mean with its standard error, and the mean loss."""
    scores = [f"{100 * row['scores'][task]:.1f}" for task in tasks]
    return [row["name"], *scores, f"{100 * row['mean']:.1f} ± {100 * row['mean_error']:.1f}", f"{row['mean_loss']:.3f}"]
