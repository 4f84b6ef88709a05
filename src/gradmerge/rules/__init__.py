"""The merge rules: pure functions from tensors to a tensor, one family per file."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Iterator, Mapping

from .full import gradient_matching_full, removal_full
from .spec import Help, Option, Rule, rule

ENTRY_POINTS = "gradmerge.rules"
"""The entry-point group in which installed packages declare rules."""


class Methods(Mapping[str, Rule]):
    """All merge rules by name: those of this package, of installed packages, and of loaded files.

    Rules of installed packages are loaded when a name is unknown or when all rules are listed.
    """

    def __init__(self) -> None:
        modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
        rules = [value for module in modules for value in vars(module).values() if isinstance(value, Rule)]
        self._rules = {rule.name: rule for rule in rules}
        self._built_in = frozenset(self._rules)
        self._installed = False
        self._sorted: list[str] = []

    def __getitem__(self, name: str) -> Rule:
        if name not in self._rules:
            self._load_installed()
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        self._load_installed()
        if len(self._sorted) != len(self._rules):
            self._sorted = sorted(self._rules, key=lambda name: _order(self._rules[name]))
        return iter(self._sorted)

    def __len__(self) -> int:
        self._load_installed()
        return len(self._rules)

    def add(self, rule: Rule) -> None:
        """Add a rule, or replace one that was added; raise ValueError if the name is a built-in one."""
        if rule.name in self._built_in:
            raise ValueError(f"the name {rule.name!r} is that of a built-in method")
        rule.inputs, rule.options  # noqa: B018 (raises TypeError if the signature is invalid)
        self._rules[rule.name] = rule

    def _load_installed(self) -> None:
        if self._installed:
            return
        self._installed = True
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINTS):
            try:
                rule = entry.load()
                if not isinstance(rule, Rule):
                    raise TypeError(f"{entry.value} is not a function with @rule")
                self.add(rule)
            except Exception as error:  # whatever the package's code raises
                warnings.warn(f"method {entry.name!r} cannot be loaded: {type(error).__name__}: {error}", stacklevel=2)


def _order(rule: Rule) -> tuple[int, str]:
    """Sort by what a rule needs (models only, their base, curvature), then by name."""
    if {"curvature", "grams"} & {*rule.inputs}:
        return 2, rule.name
    return int("base" in rule.inputs and "base" not in {*rule.optional, *rule.when}), rule.name


METHODS = Methods()
"""All merge rules by name."""

__all__ = ["METHODS", "Help", "Option", "Rule", "gradient_matching_full", "removal_full", "rule"]
