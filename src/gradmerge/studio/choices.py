"""The methods that fit a recipe, and their options with ranges for sliders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..compare.candidates import plan_of
from ..compare.settings import (
    Setting,
    is_removal,
    make_setting,
    recipe_with,
    takes_weights,
    task_names,
    weight_keys,
)
from ..engine.plan import Plan
from ..errors import InputError
from ..recipe import Recipe, Varying, leaves, mapped
from ..recipe.overrides import full_key
from ..rules import METHODS
from ..rules.spec import Option, OrNone
from ..text import nearest

#: Methods that remove something from the base.
REMOVING = ("removal", "task-arithmetic")
#: Strengths of the curve of a removal, as multiples of the recipe's.
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_HIGHEST = {"epsilon": 1e-3, "r": 2.0, "alpha": 1.0, "t": 1e-2, "cap": 4.0, "scale": 2.0}


@dataclass(frozen=True)
class Control:
    """A key of a recipe that is a number, with its range."""

    key: str
    """The recipe's key, dotted: `damping`, `options.density`; `weight` for a model's."""
    label: str
    low: float
    high: float
    step: float
    value: Any
    """The recipe's value, or the method's default."""
    meaning: str
    word: str | None = None
    """What the key may be instead of a number: `auto`, `none`."""
    logarithmic: bool = False
    """``low`` and ``high`` are above 0."""


def methods_of(recipe: Recipe, plan: Plan) -> list[str]:
    """The methods that can merge a recipe's models, its own first.

    Only fa1 uses curvature at the differences. Methods that merge and methods that remove are not mixed.
    """
    removes, found = is_removal(recipe), [recipe.method]
    for name, rule in METHODS.items():
        other_kind = name not in REMOVING if removes else rule.removes
        at_delta = "fa1" in (name, recipe.method) and "curvature" in rule.inputs
        if name in found or rule.fallback is not None or other_kind or at_delta:
            continue
        needs = rule.needs({option.name: option.default for option in rule.options})
        lacking = ("prior" in needs and plan.inputs.prior is None) or (
            "curvature" in needs and not plan.inputs.curvature
        )
        if lacking or ("base" in needs - rule.optional and plan.inputs.base is None):
            continue
        try:
            plan_of(plan, recipe_with(recipe, make_setting(recipe, name, dict.fromkeys(weight_keys(recipe), 1.0))))
        except InputError:
            continue
        found.append(name)
    return found


def controls_of(method: str, recipe: Recipe) -> list[Control]:
    """Damping if the method uses it, and its options that are numbers and do not vary over the layers."""
    rule, own = METHODS[method], recipe.method == method
    given: Mapping[str, Any] = recipe.resolved_options if own else {}
    found = [
        _control(option, given.get(option.name, option.default))
        for option in rule.options
        if option.type in (int, float, OrNone)
        and not isinstance(given.get(option.name), tuple | list)
        and not option.required
    ]
    if "damping" in rule.inputs:
        value = recipe.damping
        found.insert(
            0, Control("damping", "damping", 1e-12, 1e3, 0.1, value, "δ, added to the curvature", "auto", True)
        )
    return found


def _control(option: Option, value: Any) -> Control:
    key, label, meaning = f"options.{option.name}", option.name.replace("_", " "), option.meaning
    low = option.help.ge if option.help.ge is not None else option.help.gt if option.help.gt is not None else 0.0
    high = option.help.le if option.help.le is not None else _HIGHEST.get(option.name, 100)
    if option.type is int:
        return Control(key, label, int(low), int(high), 1, value, meaning)
    step = 0.01 if high - low >= 0.5 else (high - low) / 100
    low = step if option.help.gt is not None else low
    return Control(key, label, low, high, step, value, meaning, "none" if option.type == OrNone else None)


def weight_control(method: str, recipe: Recipe) -> Control | None:
    """The range of a model's weight; None for a method that takes none."""
    if not takes_weights(method):
        return None
    low, high, meaning = 0.0, 1.5, "how much the model counts"
    if is_removal(recipe):
        low, high = (0.0, 2.0) if METHODS[method].removes else (-2.0, 0.0)
        meaning = "how much of it is removed"
    every = [leaf for weight in recipe.weights for leaf in leaves(weight)] if method == recipe.method else []
    value = 1.0 if METHODS[method].removes or low == 0 else -1.0
    return Control("weight", "weight", min([low, *every]), max([high, *every]), 0.01, value, meaning)


class Choices:
    """The settings of a recipe that can be chosen."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._recipe = recipe
        self.methods = methods_of(recipe, plan)
        self.models = task_names(recipe)

    def controls(self, method: str) -> list[Control]:
        self._check(method)
        return controls_of(method, self._recipe)

    def weight_control(self, method: str) -> Control | None:
        self._check(method)
        return weight_control(method, self._recipe)

    def setting(self, method: str | None, weights: Mapping[str, float], changes: Mapping[str, Any]) -> Setting:
        """A setting from names; keys that are not given are the recipe's."""
        method = method or self._recipe.method
        self._check(method)
        for name in weights:
            if name not in self.models:
                hint = f"{nearest(name, self.models)}\n  Models are {', '.join(self.models)}."
                raise InputError(f"weights: no model is called {name!r}{hint}")
        own = zip(self.models, self._weights_of(method), strict=True)
        chosen = (weights.get(name, weight) for name, weight in own)
        rules = [METHODS[method]]
        others = {full_key(key, rules, f"changes: {key}"): value for key, value in changes.items()}
        return make_setting(
            self._recipe, method, {**dict(zip(weight_keys(self._recipe), chosen, strict=True)), **others}
        )

    def strengths(self, method: str | None) -> list[Setting]:
        """The recipe's weights times several factors."""
        method = method or self._recipe.method
        self._check(method)
        own = dict(zip(weight_keys(self._recipe), self._weights_of(method), strict=True))
        return [
            make_setting(self._recipe, method, {key: _times(weight, strength) for key, weight in own.items()})
            for strength in STRENGTHS
        ]

    def _check(self, method: str) -> None:
        if method not in self.methods:
            hint = f"{nearest(method, self.methods)}\n  Methods here are {', '.join(self.methods)}."
            raise InputError(f"{method}: cannot merge these models{hint}")

    def _weights_of(self, method: str) -> list[Varying]:
        """The recipe's weights for another method: for a removal, task arithmetic has the opposite sign."""
        turned = is_removal(self._recipe) and METHODS[method].removes != self._recipe.rule.removes
        weights = self._recipe.weights
        return [_times(weight, -1.0) for weight in weights] if turned else weights


def _times(weight: Varying, factor: float) -> Varying:
    found: Varying = mapped(weight, lambda value: value * factor + 0.0)  # no -0
    return found
