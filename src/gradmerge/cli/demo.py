"""`gradmerge demo`."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Printing, command
from .output import heavy_imports, print_json, print_table, progress
from .stdio import echo

if TYPE_CHECKING:
    from ..demo import DemoResult

EXAMPLE = "Examples: gradmerge demo   ·   gradmerge demo -o my-demo --seed 1"


@command
def demo(
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="New folder for everything."),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the split, the weights and the batches.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder of an earlier demonstration.")] = False,
    printing: Printing,
) -> None:
    """Show the whole job on small models: train, estimate curvature, merge by every method, remove a task, compare.

    On the handwritten digits of scikit-learn (pip install 'gradmerge[demo]'), in a minute or two. Models, data,
    recipes, reports and the commands that repeat each step are in the folder.
    """
    with heavy_imports():
        from ..demo import Settings, run_demo

    begun = time.perf_counter()

    def tell(text: str) -> None:
        if not printing.silent:  # a progress bar replaces sys.stderr, to put these lines above itself
            echo(text, err=True)

    with progress(printing.silent, "steps") as shown:
        outcome = run_demo(out, settings=Settings(seed=seed), force=force, progress=shown, say=tell)
    seconds = time.perf_counter() - begun
    if printing.json:
        commands = {what: list(map(shlex.join, several)) for what, several in outcome.commands.items()}
        facts = {"folder": str(out), "seconds": round(seconds, 1)}
        print_json({**outcome.results, **facts, "commands": commands})
        return
    _print_tables(outcome)
    if not printing.quiet:
        _print_rest(outcome, seconds)


def _print_tables(outcome: DemoResult) -> None:
    from ..demo.demo_settings import REMOVED
    from ..demo.tables import merge_table, removal_table

    accuracy = f"Accuracy on {outcome.results['images']['test']} test images per task, per cent, and the mean loss:\n"
    removing = f"\nTaking {REMOVED} out of the model trained on all; KL is the distance to the target on {REMOVED}:\n"
    for title, (columns, rows) in (
        (accuracy, merge_table(outcome.merging)),
        (removing, removal_table(outcome.removal)),
    ):
        echo(title)
        print_table(columns, rows, right=range(1, len(columns)))


def _print_rest(outcome: DemoResult, seconds: float) -> None:
    from ..demo.commands import finding, highlights
    from ..demo.tables import flatness

    folder = outcome.folder
    echo("\nOver one weight for all tasks, mean accuracy on validation images:")
    echo("\n".join(flatness(outcome.results)))
    echo(f"\nDone in {seconds:.0f} s. {folder / 'results.md'} explains the tables.")
    echo(f"Reports: {folder / 'preview' / 'report.html'}, {folder / 'diagnose' / 'report.html'}")
    echo(f"\nTo repeat the steps (all of them are in {folder / 'commands.sh'}):\n")
    if shutil.which("gradmerge") is None:
        echo(finding())
    echo(f"cd {shlex.quote(os.fspath(folder))}")
    echo("\n".join(map(shlex.join, highlights(outcome.commands))))
