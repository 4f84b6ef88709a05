"""`gradmerge gradient`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..text import count, one_line
from .options import Data, Force, LargeOptions, LoadingOptions, Model, Printing, on_processes
from .output import Durable, heavy_imports, print_json, print_notes, progress
from .streams import say

EXAMPLE = (
    "Examples: gradmerge gradient ./yelp --data reviews.jsonl -o ./yelp-gradient   ·   "
    "gradmerge gradient ./merged --data digits.npz:train --limit 2048 -o ./digits-gradient"
)


@on_processes
def gradient(
    *,
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Gradient folder to write.")],
    loading: LoadingOptions,
    large: LargeOptions,
    force: Force = False,
    durable: Durable = False,
    printing: Printing,
) -> None:
    """Estimate a gradient: the sum over examples of the gradient of each example's loss, and the loss with it.

    It costs about a training step per batch. Of a PEFT adapter folder it is the gradient of the adapter's own tensors.
    A model stored in 16 bits computes in float32, unless --dtype says otherwise: gradients of examples nearly cancel.
    """
    with heavy_imports():
        from ..api.differentiating import estimate_gradient

    begun = time.perf_counter()
    with progress(printing.silent, "examples") as shown:
        given: Any = {**asdict(large), **loading.as_keywords(), "processes": True}
        found = estimate_gradient(model, data, out=out, force=force, durable=durable, progress=shown, **given)
    entries, seconds = sum(value.numel() for value in found.values()), time.perf_counter() - begun
    if printing.json:
        print_json(
            {
                "out": str(out),
                "model": model,
                "data": data,
                "digest": found.digest,
                "examples": found.examples,
                "loss": found.loss,
                "loss_per_example": found.loss / found.examples,
                "norm": found.norm,
                "tensors": len(found),
                "entries": entries,
                "seconds": seconds,
                "notes": found.notes,
            }
        )
        return
    print_notes(found.notes, printing.quiet)
    if not printing.quiet:
        sums = f"loss {found.loss:.6g}, norm {found.norm:.4g}, both sums over {found.examples} examples"
        say(one_line(f"{out}: gradient of {len(found)} tensors, {count(entries)} entries, at {model}"))
        say(f"  {sums}; {seconds:.1f} s")
        say(f"  digest of the model {found.digest}")
