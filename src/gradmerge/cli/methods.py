"""`gradmerge methods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..text import nearest
from .options import Printing, command, method_names
from .output import echo, print_json, print_table

EXAMPLE = "Examples: gradmerge methods   ·   gradmerge methods ties"
LEGEND = """
θ_0 is the base, θ_t the fine-tuned model t of T, Δ_t = θ_t − θ_0, w_t its weight (in brackets: the default).
F_0 and F_t are the curvature of the base and of model t, δ is the damping, P the penalty matrix used in training.
I is the identity matrix. Other symbols are options, or the text of the method explains them."""


@command()
def methods(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Explain this method.", autocompletion=method_names)
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run NAME, the path of a Python file that defines a method.")
    ] = False,
    printing: Printing,
) -> None:
    """List the merge methods, or explain one with its options."""
    from ..rules import METHODS

    if name is not None and name.endswith(".py"):
        from ..recipe.method import load_rule

        name = load_rule(name, Path(), allow_code=allow_code).name
    if name is not None and name not in METHODS:
        raise InputError(f"there is no method {name!r}{nearest(name, METHODS)}\n  Known are {', '.join(METHODS)}.")
    if printing.json:
        print_json([_facts(rule) for rule in METHODS.values()] if name is None else _facts(METHODS[name]))
        return
    if name is None:
        print_table(["method", "α_t", "H_0", "H_t"], [[r.name, *r.matching_form] for r in METHODS.values()])
        if not printing.quiet:
            echo("\nA method is a choice of α_t, H_0 and H_t, exactly or approximately, in")
            echo("θ̂ = θ_0 + Σ α_t H̄⁻¹ (H_0 + H_t) (θ_t − θ_0),  H̄ = H_0 + Σ α_t H_t.")
            echo(LEGEND)
            echo("\nTo see a method in words, with its options: gradmerge methods NAME")
        return
    rule = METHODS[name]
    echo(f"{rule.name}\n")
    echo(rule.explanation)
    echo(f"\nform:       α_t = {rule.matching_form[0]};  H_0 = {rule.matching_form[1]};  H_t = {rule.matching_form[2]}")
    echo(f"reference:  {rule.reference}")
    echo(f"needs:      {rule.needs_in_words}")
    if rule.memory_in_words:
        echo(f"memory:     {rule.memory_in_words}")
    if rule.options:
        echo("\noptions:")
        rows = [
            [f"  {o.name}", o.kind, "required" if o.required else _shown(o.default), o.meaning] for o in rule.options
        ]
        print_table(["  name", "value", "default", "meaning"], rows)
    if not printing.quiet:
        echo(LEGEND)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _facts(rule: Any) -> dict[str, Any]:
    return {
        "name": rule.name,
        "summary": rule.summary,
        "alpha": rule.matching_form[0],
        "H_0": rule.matching_form[1],
        "H_t": rule.matching_form[2],
        "reference": rule.reference,
        "inputs": list(rule.inputs),
        "memory": rule.memory_in_words,
        "options": [
            {"name": o.name, "value": o.kind, "default": None if o.required else o.default, "help": o.meaning}
            for o in rule.options
        ],
    }
