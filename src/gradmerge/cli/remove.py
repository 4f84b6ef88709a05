"""`gradmerge remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.merge import merge
from ..errors import InputError
from .merge import CurvatureOption, Out, run_recipe
from .options import DryRun, LoadingOptions, Printing, Settings, command_with, from_environment, given_options
from .output import heavy_imports, print_json, print_notes, print_table, progress, typed
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge remove --base ./gpt2 --forget toxic.jsonl --retain other.jsonl -o gpt2-clean   ·   "
    "gradmerge remove --base ./gpt2 --model ./toxic=0.8 --set base.penalty=none -o gpt2-clean"
)
#: Methods with --model → merge rules.
METHODS = {"removal": "removal", "negation": "task-arithmetic", "task-arithmetic": "task-arithmetic"}
SOURCE = "data, as --data of `gradmerge evaluate` takes it"


@command_with(api=merge, without=("allow_code",))
def remove(
    *,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model to remove from.")],
    forget: Annotated[
        str | None, typer.Option(metavar="SRC", help=f"The forget set, all rows of it: {SOURCE}.")
    ] = None,
    retain: Annotated[
        str | None, typer.Option(metavar="SRC", help="The retain set, or a sample of it; see --retain-size.")
    ] = None,
    retain_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of examples in the retain set. Default: the rows of --retain."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Allowed relative increase of the mean loss on held-out rows of the retain set: 2%, or 0.02. "
            "Default: 2%.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most steps. Default: 1. More than one needs --unseen or --until."),
    ] = None,
    unseen: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="Rows like those of --forget that the model has not seen. Steps end where the loss on the forget set "
            "reaches the base's loss on these rows.",
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(metavar="LOSS", help="Steps end where the mean loss on the forget set reaches LOSS."),
    ] = None,
    max_kronecker_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Layers with more inputs or outputs have a diagonal in the curvature; 0: all. Default: 16384.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[=STRENGTH]",
            help="Instead of --forget and --retain: the base fine-tuned on the data to remove, and how much of it to "
            "remove; once for each.",
        ),
    ] = None,
    out: Out = None,
    strength: Annotated[
        float, typer.Option(help="Multiplies the strength of every --model (1 where it names none).")
    ] = 1.0,
    curvature: CurvatureOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", help="With --model: removal, which uses curvature and is the default, or negation."
        ),
    ] = None,
    set_: Settings = None,
    loading: LoadingOptions,
    dry_run: DryRun = False,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Remove what a model has learned from data, without training it again.

    With --forget and --retain, no fine-tuned model is needed. The command takes one influence step, the longest that
    keeps the loss on held-out rows of the retain set within the budget.

    With --model, the change made by fine-tuning is subtracted. The default method needs curvature of the base on the
    retain set, and of each model. Strength 1 removes all of the change, 0 nothing. No weight moves more than twice as
    far as under negation, unless --set cap=none. If the step is too long for the method, nothing is written, and the
    message names a damping that works.
    """
    by_influence: dict[str, Any] = {"--forget": forget, "--retain": retain, "--retain-size": retain_size}
    by_influence |= {
        "--budget": budget,
        "--steps": steps,
        "--unseen": unseen,
        "--until": until,
        "--max-kronecker-dim": max_kronecker_dim,
    }
    by_models: dict[str, Any] = {"--model": model, "--method": method, "--curvature": curvature, "--set": set_}
    by_models |= {"--strength": strength if strength != 1.0 else None, "--dry-run": dry_run or None}
    by_models |= dict.fromkeys(given_options(options | {"force": False}, merge), True)
    if not model and not method:
        if wrong := [name for name, value in by_models.items() if value]:
            raise InputError(f"{wrong[0]} goes with --model, not with --forget and --retain")
        if forget is None or retain is None:
            which = "--forget" if forget is None else "--retain"
            raise InputError(f"{which} is missing: give --forget SRC and --retain SRC, or --model MODEL")
        if out is None:
            raise InputError("say where to write the result: -o OUT")
        keywords: dict[str, Any] = {"forget": forget, "retain": retain, "retain_size": retain_size, "budget": budget}
        keywords |= {"steps": steps, "unseen": unseen, "until": until, "max_kronecker_dim": max_kronecker_dim}
        _by_influence(base, out, keywords, loading, options, printing)
        return
    method = method or "removal"
    if method not in METHODS:
        raise InputError(f"--method {method}: use removal or negation")
    by_influence |= _given(loading)
    if wrong := [name for name, value in by_influence.items() if value is not None]:
        raise InputError(f"{wrong[0]} goes with --forget and --retain, not with --model")
    if not model:
        raise InputError(f"--method {method} needs a model that was fine-tuned on the data to remove: --model MODEL")
    with heavy_imports():
        from .recipe_args import build_recipe, from_options

    rule = METHODS[method]
    given = from_options(rule, base, model, curvature or [] if rule == "removal" else [])
    for entry in given["models"]:
        entry["weight"] *= strength if rule == "removal" else -strength
    run_recipe(build_recipe(given, set_ or []), out, options | {"device": loading.device}, dry_run, printing)


def _given(loading: LoadingOptions) -> dict[str, Any]:
    """Return the options for loading that were given, except --device."""
    return {
        "--" + name.replace("_", "-"): True
        for name, value in vars(loading).items()
        if name != "device" and value != getattr(LoadingOptions, name) and not from_environment(name, value)
    }


def _by_influence(
    base: str, out: Path, given: dict[str, Any], loading: LoadingOptions, options: dict[str, Any], printing: Printing
) -> None:
    with heavy_imports():
        from ..api.remove import remove as remove_on_disk

    with progress(printing.silent, "batches") as shown:
        keywords = loading.as_keywords()
        result = remove_on_disk(base, out, **given, force=options["force"], progress=shown, command=typed(), **keywords)
    if printing.json:
        print_json({"output": str(out), **result.facts(), "seconds": round(result.seconds, 3), "notes": result.notes})
        return
    print_notes(result.notes, printing.quiet)
    if printing.quiet:
        return
    print_table(["mean loss of an example", "before", "after", "increase"], result.losses(), right=(1, 2, 3))
    count = f"{len(result.steps)} influence steps" if len(result.steps) > 1 else "one influence step"
    budget = f"loss on the retain set {result.used_text}, budget {100 * result.budget:.4g} %"
    echo(f"{count}, s {result.s:.3g}; {budget} → {out} ({result.seconds:.1f} s)")
