"""`gradmerge extract-lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.extract_lora import extract_lora as extract
from ..text import one_line, size
from .options import Model, Printing, command
from .output import echo, heavy_imports, print_result, print_table, progress

EXAMPLE = (
    "Examples: gradmerge extract-lora --base ./base ./yelp --rank 16 -o ./yelp-lora   ·   "
    "gradmerge extract-lora --base ./base ./yelp --rank 64 --exclude '*embed*' --exclude '*norm*' -o ./yelp-lora"
)
#: Number of tensors printed, those that lose most; --json has all.
PRINTED = 10


@command(api=extract, without=["threads", "dtype"])
def extract_lora(
    *,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Adapter folder to write.")],
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Write a fine-tuned model as a LoRA adapter of its base.

    The adapter approximates the change made by fine-tuning, and the command reports how much of it is lost. One matrix
    of the difference is in memory at a time. Changed tensors that LoRA cannot represent (norms, biases, embeddings that
    are also the head) are saved whole; --exclude leaves them out.
    """
    with heavy_imports():
        from ..engine.adapter import LOSSLESS

    with progress(printing.silent) as bar:
        result = extract(model, out, progress=bar, **options)
    if not print_result(result, printing, model=model, base=options["base"], rank=options["rank"]):
        return
    share, loss = result.lost_share or 0.0, "without loss"
    if share > LOSSLESS:
        worst = sorted(result.lost, key=lambda name: -result.lost[name])[:PRINTED]
        print_table(["tensor", "lost"], [[name, f"{100 * result.lost[name]:.3g} %"] for name in worst], right=(1,))
        loss = f"{100 * share:.3g} % of the change lost (squared Frobenius norm)"
    echo(one_line(f"{out}: LoRA of {len(result.lost)} matrices, {loss}, {size(result.bytes_written)}"))
