"""`gradmerge merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.merge import merge as merge_models
from ..errors import InputError
from ..text import size
from .options import DryRun, Printing, Settings, command, from_environment, method_names
from .output import echo, heavy_imports, print_dry_run, print_result, progress

if TYPE_CHECKING:
    from ..recipe import Recipe

EXAMPLE = (
    "Examples: gradmerge merge recipe.yml -o merged   ·   "
    "gradmerge merge -m ties --base ./base --model ./a=0.7 --model ./b --set density=0.3 -o merged   ·   "
    "sed s/ties/dare/ recipe.yml | gradmerge merge - -o merged"
)

Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT", help="New folder or URL for the result.")]
CurvatureOption = Annotated[
    list[str] | None,
    typer.Option(
        "--curvature",
        metavar="[NAME=]PATH",
        help="Curvature of the base (base=PATH) or a model (MODEL=PATH), or plain paths in order, the base first; "
        "identity:1.0 for a constant. Default: the curvature/ folder in a model.",
    ),
]


@command(api=merge_models, without=["ray_address"])
def merge(
    *,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe file (YAML), or - for standard input. Without it, give --method, --base and --model.",
        ),
    ] = None,
    out: Out = None,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="The method; see `gradmerge methods`.", autocompletion=method_names),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="The base model.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL[=WEIGHT]", help="A fine-tuned model and its weight. Repeatable.")
    ] = None,
    curvature: CurvatureOption = None,
    set_: Settings = None,
    dry_run: DryRun = False,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Merge models, as described by a recipe file or by options.

    A model is a Hugging Face folder, a .safetensors file, a Hub id (org/name@revision), a PEFT LoRA adapter folder,
    or the URL of one of these (s3://, hf://, …).
    """
    with heavy_imports():
        from .recipe_args import build_recipe, from_options

    allow_code = options["allow_code"]
    if recipe is None:
        if method is None or not model:
            raise InputError("give a recipe file, or --method, --base and at least one --model")
        built = build_recipe(from_options(method, base, model, curvature or []), set_ or [], allow_code=allow_code)
    elif base is not None or model or curvature:
        raise InputError("--base, --model and --curvature cannot change a recipe file; use --set")
    else:
        built = build_recipe(recipe, set_ or [], method, allow_code)
    run_recipe(built, out, options, dry_run, printing)


def run_recipe(recipe: Recipe, out: Path | None, options: dict[str, Any], dry_run: bool, printing: Printing) -> None:
    """Merge and print the result, or print the plan. ``options`` are keywords of :func:`gradmerge.merge`."""
    device = options["device"]
    if device == "auto" or (device == "mps" and from_environment("device", device)):
        options["device"] = "cpu"  # a default for running models; merges run on cpu or cuda
    if dry_run:
        with heavy_imports():
            from ..api.dry_run import dry_run_merge

        names = ("threads", "allow_pickle", "allow_config", "dequantize")
        print_dry_run(dry_run_merge(recipe, out, **{name: options[name] for name in names}), printing)
        return
    if out is None:
        raise InputError("give a folder for the result: -o OUT")
    with heavy_imports(), progress(printing.silent) as shown:
        result = merge_models(recipe, out, progress=shown, **options)
    if not print_result(result, printing, method=recipe.method):
        return
    if result.already_done:
        echo(f"{out} is already complete")
    else:
        rate = (result.bytes_read + result.bytes_written) / max(result.seconds, 1e-9)
        echo(
            f"{recipe.method}: {result.merged} tensors merged, {result.copied} copied → {out} "
            f"({size(result.bytes_written)} in {result.seconds:.1f} s, {size(rate)}/s read and written)"
        )
