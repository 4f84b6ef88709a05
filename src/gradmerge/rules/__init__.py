"""The merge rules: pure functions, tensors in, tensor out. One family per file."""

from __future__ import annotations

import importlib
import pkgutil

from .full import gradient_matching_full, removal_full
from .spec import Help, Option, Rule, rule

_MODULES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]


def _order(rule: Rule) -> tuple[int, str]:
    """By what a rule needs: models alone, their base too, or curvature; then by name."""
    if {"curvature", "grams"} & {*rule.inputs}:
        return 2, rule.name
    return int("base" in rule.inputs and "base" not in {*rule.optional, *rule.when}), rule.name


#: Every rule of this package by name: whatever its modules declare with ``@rule``.
METHODS: dict[str, Rule] = {
    found.name: found
    for found in sorted(
        {id(v): v for m in _MODULES for v in vars(m).values() if isinstance(v, Rule)}.values(),
        key=_order,
    )
}

__all__ = ["METHODS", "Help", "Option", "Rule", "gradient_matching_full", "removal_full", "rule"]
