"""`gradmerge extract-lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..text import one_line, size
from .options import Force, Model, Printing, ReadOptions, command
from .output import heavy_imports, note, print_json, print_table, progress
from .stdio import say

EXAMPLE = (
    "Examples: gradmerge extract-lora --base ./base ./yelp --rank 16 -o ./yelp-lora   ·   "
    "gradmerge extract-lora --base ./base ./yelp --rank 64 --exclude '*embed*' --exclude '*norm*' -o ./yelp-lora"
)
#: How many tensors are printed, those that lose most; --json has all.
PRINTED = 10


@command
def extract_lora(
    *,
    model: Model,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The base model of MODEL.")],
    rank: Annotated[int, typer.Option(metavar="N", min=1, max=10**6, help="The largest rank of a matrix.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Adapter folder to write.")],
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Tensors that the adapter may change; by default all. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Tensors that stay as in the base, such as '*norm*'. Repeatable."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of the factors: float32 (auto), float64, bfloat16 or float16.")
    ] = "auto",
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after an earlier run was killed.")] = False,
    options: ReadOptions,
    printing: Printing,
) -> None:
    """Write the difference between a fine-tuned model and its base as a LoRA adapter, and report the loss.

    One matrix of the difference is in memory at a time. Changed tensors that LoRA cannot represent (norms, biases,
    embeddings that are also the head) are saved whole; --exclude leaves them out.
    """
    with heavy_imports():
        from ..api.extract_lora import extract_lora as extract
        from ..engine.peft_config import ROUNDING

    with progress(printing.silent) as bar:
        result = extract(
            model,
            out,
            base=base,
            rank=rank,
            include=include or ["*"],
            exclude=exclude or [],
            dtype=dtype,
            force=force,
            resume=resume,
            progress=bar,
            **options.as_keywords(),
        )
    if printing.json:
        print_json(
            {
                "output": str(out),
                "model": model,
                "base": base,
                "rank": rank,
                "lost_share": result.lost_share,
                "lost": result.lost,
                "bytes_written": result.bytes_written,
                "seconds": round(result.seconds, 3),
                "already_done": result.already_done,
                "notes": result.notes,
            }
        )
        return
    for text in result.notes:
        note(text, printing.quiet and not text.is_warning)
    if printing.quiet:
        return
    if result.already_done:
        say(f"{out} is already complete")
        return
    share, loss = result.lost_share or 0.0, "without loss"
    if share > ROUNDING:
        worst = sorted(result.lost, key=lambda name: -result.lost[name])[:PRINTED]
        print_table(["tensor", "lost"], [[name, f"{100 * result.lost[name]:.3g} %"] for name in worst], right=(1,))
        loss = f"{100 * share:.3g} % of the change lost (squared Frobenius norm)"
    say(one_line(f"{out}: LoRA of {len(result.lost)} matrices, {loss}, {size(result.bytes_written)}"))
