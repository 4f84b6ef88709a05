"""The merge rules: pure functions from tensors to a tensor, one family per file."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

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

    def __getitem__(self, name: str) -> Rule:
        if name not in self._rules:
            self._load_installed()
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        self._load_installed()
        return iter(sorted(self._rules, key=lambda name: _order(self._rules[name])))

    def __len__(self) -> int:
        self._load_installed()
        return len(self._rules)

    def add(self, rule: Rule) -> Rule:
        """Add a rule from outside, or replace one that was added; return it as added.

        Raises ValueError if the name is that of a built-in method, and TypeError if the signature is invalid. Whatever
        the added rule raises later is a ValueError that names the rule.
        """
        if rule.name in self._built_in:
            raise ValueError(f"the name {rule.name!r} is that of a built-in method")
        rule = replace(rule, function=_checked(rule))
        _ = rule.inputs, rule.options  # reads the signature
        self._rules[rule.name] = rule
        return rule

    def _load_installed(self) -> None:
        if self._installed:
            return
        self._installed = True
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINTS):
            try:
                self.add(entry.load())
            except Exception as error:  # whatever the package's code raises
                warnings.warn(f"method {entry.name!r} cannot be loaded: {type(error).__name__}: {error}", stacklevel=2)


def _checked(rule: Rule) -> Callable[..., Tensor]:
    """The function of a rule from outside, whose exceptions and wrong results are raised as ValueError."""
    signature = inspect.signature(rule.function)

    @functools.wraps(rule.function)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        try:
            merged = rule.function(*args, **kwargs)
        except (ValueError, MemoryError):
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {error}") from error
        shape = signature.bind(*args, **kwargs).arguments["tuned"][0].shape
        if not isinstance(merged, Tensor) or merged.shape != shape:
            found = list(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
            raise ValueError(f"the result must be a tensor of shape {list(shape)}, not {found}")
        return merged

    return run


def _order(rule: Rule) -> tuple[int, str]:
    """Sort by what a rule needs (models only, their base, curvature), then by name."""
    if {"curvature", "grams"} & {*rule.inputs}:
        return 2, rule.name
    return int("base" in rule.inputs and "base" not in {*rule.optional, *rule.when}), rule.name


METHODS = Methods()
"""All merge rules by name."""

__all__ = ["METHODS", "Help", "Option", "Rule", "rule"]
