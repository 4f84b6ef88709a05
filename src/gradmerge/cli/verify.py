"""`gradmerge verify`."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from ..api.verify import verify as verify_model
from .options import Data, Printing, command
from .output import heavy_imports, print_json, print_table, progress

EXAMPLE = (
    "Examples: gradmerge verify ./merged   ·   gradmerge verify ./calibrated --data prompts.jsonl   ·   "
    "gradmerge verify ./base-with-lora --model ./lora"
)


@command(api=verify_model, without=["models"], loading=["columns", "limit", "device"], defaults={"limit": "16"})
def verify(
    *,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder of a merged, calibrated or distilled model.")],
    data: Annotated[str | None, *get_args(Data)[1:]] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="What OUT was made of: a fine-tuned model or an adapter. Default: as in its gradmerge.json. "
            "Repeatable.",
        ),
    ] = None,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Check a merged model: tensors, answers, generation.

    It must load, answer like its models, and stop generating where they stop. Tensors that the recipe excludes must be
    those of the base. Answers must be finite, and closer to those of some fine-tuned model than the base's answers. An
    adapter merged into its base must answer like base + adapter. The command does not read labels of the data. Without
    data, it uses a few built-in prompts. Exit status 1 if a check fails.
    """
    with heavy_imports(), progress(printing.silent, "models") as bar:
        result = verify_model(out, data, models=model or [], progress=bar, **options)
    if printing.json:
        print_json(result.to_dict())
    else:
        print_table(*result.table())
    if not result.passed:
        raise typer.Exit(1)
