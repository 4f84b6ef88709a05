"""`gradmerge remove`."""

from __future__ import annotations

from typing import Annotated, Any

import click
import typer
from click.core import ParameterSource

from ..api.remove import remove as remove_model
from ..errors import InputError
from .merge import CurvatureOption, Out, run_recipe
from .options import Printing, Settings, command
from .output import echo, heavy_imports, print_result, print_table, progress, typed

EXAMPLE = (
    "Examples: gradmerge remove --base ./gpt2 --forget toxic.jsonl --retain other.jsonl -o gpt2-clean   ·   "
    "gradmerge remove --base ./gpt2 --model ./toxic=0.8 --set base.penalty=none -o gpt2-clean"
)
#: Parameters that go with --model only, and those that go with it and with --forget.
WITH_MODELS = {"model", "curvature", "set_", "accept_untrusted"}
ALWAYS = {"base", "out", "force", "device", "json", "quiet", "debug"}


@command(api=remove_model, without=["max_kronecker_dim", "output", "dtype"])
def remove(
    *,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model to remove from.")],
    options: dict[str, Any],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[=STRENGTH]",
            help="Instead of --forget and --retain: the base fine-tuned on the data to remove, and how much of it to "
            "remove (1: all). Repeatable.",
        ),
    ] = None,
    curvature: CurvatureOption = None,
    set_: Settings = None,
    accept_untrusted: Annotated[
        bool, typer.Option("--accept-untrusted", help="With --model: write the result even if the step is too long.")
    ] = False,
    out: Out = None,
    printing: Printing,
) -> None:
    """Remove what a model has learned, without training it again.

    With --forget and --retain, no fine-tuned model is needed. The command takes one influence step, the longest that
    keeps the loss on held-out rows of the retain set within the budget.

    With --model, the change made by fine-tuning is subtracted, weighted by the curvature of the base on the retain set
    and of each model. Strength 1 removes all of the change, 0 nothing. No weight moves more than twice as
    far as under negation, unless --set cap=none. If the step is too long for the method, nothing is written, and the
    message names a damping that works. `gradmerge merge --method removal` does the same, with all options of a merge.
    """
    typed_names = _given_parameters()
    with_models = "model" in typed_names
    if wrong := sorted(typed_names - WITH_MODELS - ALWAYS if with_models else typed_names & WITH_MODELS):
        option = "--" + wrong[0].rstrip("_").replace("_", "-")
        raise InputError(f"{option} does not go with --model" if with_models else f"{option} goes with --model only")
    if out is None:
        raise InputError("say where to write the result: -o OUT")
    if with_models:
        with heavy_imports():
            from .recipe_args import build_recipe, from_options

        recipe = from_options("removal", base, model or [], curvature or [])
        settings = {
            "device": options.get("device", "auto"),
            "force": options["force"],
            "accept_untrusted": accept_untrusted,
        }
        run_recipe(build_recipe(recipe, set_ or []), out, settings, False, printing)
        return
    if options["forget"] is None or options["retain"] is None:
        raise InputError("give --forget SRC and --retain SRC, the rows to forget and rows to keep; or --model MODEL")
    with heavy_imports(), progress(printing.silent, "batches") as bar:
        result: Any = remove_model(base, out, progress=bar, command=typed(), **options)
    if not print_result(result, printing):
        return
    print_table(["mean loss of an example", "before", "after", "increase"], result.losses(), right=(1, 2, 3))
    count = f"{len(result.steps)} influence steps" if len(result.steps) > 1 else "one influence step"
    limit = f"loss on the retain set {result.used_text}, budget {100 * result.budget:.4g} %"
    echo(f"{count}, s {result.s:.3g}; {limit} → {out} ({result.seconds:.1f} s)")


def _given_parameters() -> set[str]:
    """The parameters that were typed, rather than left at their defaults or set in the environment."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
