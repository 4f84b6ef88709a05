"""`gradmerge merge`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..text import size
from .completion import method_names, words_of
from .options import VARIABLES, DryRun, Force, Printing, ReadOptions, Settings, command, from_environment
from .output import AllowCode, heavy_imports, note, print_json, progress
from .stdio import say

if TYPE_CHECKING:
    from ..recipe import Recipe

MERGE_EXAMPLE = (
    "Examples: gradmerge merge recipe.yml -o merged   ·   "
    "gradmerge merge --method ties --base ./base --model ./a=0.7 --model ./b --set density=0.3 -o merged   ·   "
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


@dataclass(frozen=True)
class MergeOptions(ReadOptions):
    """The keywords of :func:`gradmerge.merge`."""

    force: Force = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume a merge that was killed; the result has the same bytes.")
    ] = False
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Continue if weights are NaN or infinite.")
    ] = False
    accept_untrusted: Annotated[
        bool, typer.Option("--accept-untrusted", help="Write a removal even if its step is too long to be trusted.")
    ] = False
    engine: Annotated[
        str,
        typer.Option(
            metavar="E",
            help="Execution backend: local, or ray (workers of a Ray cluster).",
            autocompletion=words_of("engine"),
        ),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --engine ray: number of workers. Default: as many as fit."),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --engine ray: the cluster's head, or auto for a cluster on this machine. Default: RAY_ADDRESS, "
            "else a new cluster on this machine.",
        ),
    ] = None


Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="D",
        help="Device of the arithmetic: cpu, cuda, cuda:1, …",
        envvar=VARIABLES["device"],
        autocompletion=words_of("device"),
    ),
]


@command
def merge(
    *,
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or - for standard input.")
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
    device: Device = "cpu",
    dry_run: DryRun = False,
    allow_code: AllowCode = False,
    options: MergeOptions,
    printing: Printing,
) -> None:
    """Merge checkpoints as described by a recipe file or by options.

    A model is a Hugging Face folder, a .safetensors file, a Hub id (org/name@revision), a PEFT LoRA adapter folder,
    or the URL of one of these (s3://, hf://, …).
    """
    with heavy_imports():
        from .recipe_args import build_recipe, from_options

    if recipe is None:
        if method is None or not model:
            raise InputError("give a recipe file, or --method, --base and at least one --model")
        built = build_recipe(from_options(method, base, model, curvature or []), set_ or [], allow_code=allow_code)
    elif base is not None or model or curvature:
        raise InputError("--base, --model and --curvature cannot change a recipe file; use --set")
    else:
        built = build_recipe(recipe, set_ or [], method, allow_code)
    run_recipe(built, out, device, options, dry_run, printing)


def run_recipe(
    recipe: Recipe, out: Path | None, device: str, options: MergeOptions, dry_run: bool, printing: Printing
) -> None:
    """Merge and print the result, or print the plan."""
    with heavy_imports():
        from ..api import merge as merging

    if device == "auto" or (device == "mps" and from_environment("device", device)):
        device = "cpu"  # a default for running models; merges run on cpu or cuda
    settings = options.as_keywords()
    if dry_run:
        from ..api.dry_run import dry_run_merge
        from .dry_run import print_merge

        read = {name: settings[name] for name in ("threads", "allow_pickle", "allow_config", "dequantize")}
        print_merge(*dry_run_merge(recipe, out, **read), printing.json)
        return
    if out is None:
        raise InputError("give a folder for the result: -o OUT")
    with progress(printing.silent) as shown:
        result = merging.merge(recipe, out, device=device, progress=shown, **settings)
    if printing.json:
        print_json(
            {
                "output": str(out),
                "method": recipe.method,
                "merged_tensors": result.merged,
                "copied_tensors": result.copied,
                "bytes_read": result.bytes_read,
                "bytes_written": result.bytes_written,
                "seconds": round(result.seconds, 3),
                "already_done": result.already_done,
                **({} if result.lost_share is None else {"lost_share": result.lost_share, "lost": result.lost}),
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
    else:
        rate = (result.bytes_read + result.bytes_written) / max(result.seconds, 1e-9)
        say(
            f"{recipe.method}: {result.merged} tensors merged, {result.copied} copied → {out} "
            f"({size(result.bytes_written)} in {result.seconds:.1f} s, {size(rate)}/s moved)"
        )
