"""`gradmerge remove`."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from .merge import CurvatureOption, MergeOptions, Out, run_recipe
from .options import DryRun, LoadingOptions, Printing, Settings, command, from_environment
from .output import heavy_imports, print_json, print_notes, print_table, progress
from .streams import say

EXAMPLE = (
    "Examples: gradmerge remove --base ./gpt2 --forget toxic.jsonl --keep kept.jsonl --budget 2% -o gpt2-clean   ·   "
    "gradmerge remove --base ./gpt2 --model ./toxic=0.8 --set base.penalty=none -o gpt2-clean"
)
#: Names of methods, and of the rules that need tuned models.
METHODS = {"influence": "", "removal": "removal", "negation": "task-arithmetic", "task-arithmetic": "task-arithmetic"}
SOURCE = "data, as --data of `gradmerge evaluate` takes it"


@command
def remove(
    *,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model that something is taken out of.")],
    forget: Annotated[str | None, typer.Option(metavar="SRC", help=f"What is to go, all of it: {SOURCE}.")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="SRC", help="Some of what stays, in the same form; see --keep-size.")
    ] = None,
    keep_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many examples stay in all; default: those given.")
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="SHARE", help="How much the mean loss of a kept example may rise: 2%, or 0.02.")
    ] = "2%",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Influence steps, with repairs between; 1 is one alone.")
    ] = 8,
    widest: Annotated[
        int, typer.Option(metavar="N", min=0, help="Layers wider than this have a diagonal in the curvature; 0: all.")
    ] = 16384,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the rows of --keep held back, and sampled.")] = 0,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[=STRENGTH]",
            help="In place of --forget and --keep: the base tuned on what is to go, and how much of it to take out; "
            "once for each.",
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
            "--method", "-m", help="influence, for --forget and --keep; for --model removal, or negation without it."
        ),
    ] = None,
    set_: Settings = None,
    loading: LoadingOptions,
    dry_run: DryRun = False,
    options: MergeOptions,
    printing: Printing,
) -> None:
    """Take what a model has learned from some data out of it, without training it anew.

    With --forget and --keep by influence steps, within a budget of loss on what is kept; no tuned model is needed. With
    --model what the tuned model has learned is subtracted: this needs curvature of the base on data that stays, and of
    each tuned model; strength 1 takes all out, 0 nothing. By default no weight moves more than twice as far as under
    negation (--set cap=none); where the step is too long to be trusted nothing is written, and the message says which
    damping would do.
    """
    method = method or ("removal" if model and not forget and not keep else "influence")
    if method not in METHODS:
        raise InputError(f"--method {method}: remove knows influence, removal and negation")
    by_influence: dict[str, Any] = {"--forget": forget, "--keep": keep, "--keep-size": keep_size}
    by_influence |= {"--budget": budget != "2%", "--rounds": rounds != 8, "--widest": widest != 16384}
    by_influence |= {"--seed": seed}
    by_models: dict[str, Any] = {"--model": model, "--curvature": curvature, "--set": set_, "--dry-run": dry_run}
    by_models |= {"--strength": strength != 1.0, **_given(options, MergeOptions, ("force",))}
    if method == "influence":
        if wrong := [name for name, value in by_models.items() if value]:
            raise InputError(f"{wrong[0]} is for removal with tuned models (--model), not for --forget and --keep")
        if forget is None or keep is None:
            which = "--forget" if forget is None else "--keep"
            raise InputError(f"{which} is missing: give --forget SRC and --keep SRC, or --model for a tuned model")
        asked = {"base": base, "forget": forget, "keep": keep, "keep_size": keep_size, "budget": budget}
        _by_influence(
            {**asked, "rounds": rounds, "widest": widest},
            out,
            seed,
            loading,
            options,
            printing,
        )
        return
    by_influence |= _given(loading, LoadingOptions, ("device",))
    if wrong := [name for name, value in by_influence.items() if value]:
        raise InputError(f"{wrong[0]} is for --method influence; {method} takes --model")
    if not model:
        raise InputError(f"--method {method} takes the model that was tuned on what is to go: --model MODEL")
    with heavy_imports():
        from .request import build_recipe, from_options

    rule = METHODS[method]
    given = from_options(rule, base, model, curvature or [] if rule == "removal" else [])
    for entry in given["models"]:
        entry["weight"] *= strength if rule == "removal" else -strength
    run_recipe(build_recipe(None, given, set_ or [], None), out, loading.device, options, dry_run, printing)


def _given(group: Any, kind: Any, but: tuple[str, ...]) -> dict[str, Any]:
    """The options of a group that were given: neither at their defaults nor from the environment."""
    return {
        "--" + one.name.replace("_", "-"): True
        for one in fields(kind)
        if one.name not in but
        and (value := getattr(group, one.name)) != one.default
        and not from_environment(one.name, value)
    }


def _by_influence(
    given: dict[str, Any],
    out: Path | None,
    seed: int,
    loading: LoadingOptions,
    options: MergeOptions,
    printing: Printing,
) -> None:
    with heavy_imports():
        from ..api.removing import remove as remove_on_disk

    if out is None:
        raise InputError("say where to write the result: -o OUT")
    words = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    typed = ["gradmerge", "remove", *(text for name, value in words.items() for text in (f"--{name}", str(value)))]
    with progress(printing.silent, "rounds") as shown:
        result = remove_on_disk(
            given.pop("base"),
            out,
            **given,
            seed=seed,
            force=options.force,
            progress=shown,
            command=shlex.join([*typed, "-o", str(out)]),
            **loading.as_keywords(),
        )
    if printing.json:
        print_json({"output": str(out), **result.facts(), "seconds": round(result.seconds, 3), "notes": result.notes})
        return
    print_notes(result.notes, printing.quiet)
    if printing.quiet:
        return
    print_table(["mean loss of an example", "before", "after", "rose by"], result.losses(), right=(1, 2, 3))
    used = f"{result.used_words} of kept loss"
    budget = f"{used}, budget {100 * result.budget:.4g} %" if result.budget is not None else used
    several = f"{len(result.rounds)} steps" if len(result.rounds) > 1 else "one step"
    say(f"influence: {several}, s {result.after.s:.3g} in all; {budget} → {out} ({result.seconds:.1f} s)")
