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
#: Tensors whose loss is printed, those that lose most; --json has all.
SHOWN = 10


@command
def extract_lora(
    *,
    model: Model,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model that MODEL was tuned from.")],
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with work that was killed.")] = False,
    options: ReadOptions,
    printing: Printing,
) -> None:
    """Write what fine-tuning changed as a PEFT LoRA adapter of the base, and say what the rank loses of it.

    One matrix of the difference is held at a time. Changed tensors that LoRA cannot hold (norms, biases, embeddings
    that are also the head) are saved whole; --exclude leaves them out.
    """
    with heavy_imports():
        from ..api.extract_lora import extract_lora as extract
        from ..engine.adapter.peft_config import ROUNDING

    with progress(printing.silent) as shown:
        found = extract(
            model,
            out,
            base=base,
            rank=rank,
            include=include or ["*"],
            exclude=exclude or [],
            dtype=dtype,
            force=force,
            resume=resume,
            progress=shown,
            **options.as_keywords(),
        )
    if printing.json:
        print_json(
            {
                "output": str(out),
                "model": model,
                "base": base,
                "rank": rank,
                "lost_share": found.lost_share,
                "lost": found.lost,
                "bytes_written": found.bytes_written,
                "seconds": round(found.seconds, 3),
                "already_done": found.already_done,
                "notes": found.notes,
            }
        )
        return
    for text in found.notes:
        note(text, printing.quiet and not text.is_warning)
    if printing.quiet:
        return
    if found.already_done:
        say(f"{out} is already complete")
        return
    worst = sorted(found.lost, key=lambda name: -found.lost[name])[:SHOWN]
    share, lost = found.lost_share or 0.0, "nothing of the change lost"
    if share > ROUNDING:
        print_table(["tensor", "lost"], [[name, f"{100 * found.lost[name]:.3g} %"] for name in worst], right=(1,))
        lost = f"{100 * share:.3g} % of the change lost (squared Frobenius norm)"
    say(one_line(f"{out}: LoRA of {len(found.lost)} matrices, {lost}, {size(found.bytes_written)}"))
