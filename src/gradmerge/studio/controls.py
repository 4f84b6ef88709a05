"""The methods that fit a recipe, and its keys that are numbers, with ranges for sliders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..compare.candidates import derive_plan
from ..compare.settings import is_removal, make_setting, recipe_with, takes_weights, task_names, weight_keys
from ..engine.plan import Plan
from ..errors import InputError
from ..recipe import Recipe, leaves, mapped
from ..rules import METHODS
from ..rules.spec import Option, OrNone

#: Methods that remove something from the base.
REMOVING = ("removal", "task-arithmetic")
#: Upper ends of options without a limit.
HIGHEST = {"epsilon": 1e-3, "r": 2.0, "alpha": 1.0, "t": 1e-2, "cap": 4.0, "scale": 2.0}
#: Options that come first.
MAIN_OPTIONS = ("damping", "options.density", "options.t", "options.cap")


@dataclass(frozen=True)
class Control:
    """A key of a recipe that is a number, with the range of its slider."""

    key: str
    """The recipe's dotted key: `models.0.weight`, `damping`, `options.density`."""
    label: str
    low: float
    high: float
    step: float
    value: Any
    """The recipe's value, or the method's default. Besides a number, it may be `auto`, None, or a weight by layer."""
    meaning: str = ""
    logarithmic: bool = False
    """The slider is the power of ten."""

    @property
    def is_weight(self) -> bool:
        return self.key.startswith("models.")

    def position(self, value: Any) -> float:
        """Where the slider is for a value. Of a weight by layer, it is the mean."""
        if isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
            return round(sum(value) / len(value), 3)
        if not isinstance(value, int | float):
            middle = math.log10(self.low * self.high) / 2
            return round(middle, 1) if self.logarithmic else min(self.high, max(self.low, 1.0))
        return math.log10(max(value, self.low)) if self.logarithmic else value

    def value_at(self, position: float) -> Any:
        """The value of a position of the slider. A slider that was not moved has the recipe's value."""
        if math.isclose(position, self.position(self.value), abs_tol=1e-9):
            return self.value
        if self.logarithmic:
            return float(f"{10**position:.3g}")
        return int(position) if isinstance(self.step, int) else round(position, 10)  # browsers add steps in binary

    def slider(self, value: Any) -> dict[str, Any]:
        """The keywords of the slider that shows a value."""
        position = self.position(value)
        ends = [math.log10(end) if self.logarithmic else end for end in (self.low, self.high)]
        word = "" if isinstance(self.value, int | float | tuple) else f" ({self.value or 'none'} until it is moved)"
        return {
            "minimum": min(ends[0], position),
            "maximum": max(ends[1], position),
            "step": self.step,
            "value": position,
            "label": f"{self.label} (power of ten)" if self.logarithmic else self.label,
            "info": f"{self.meaning}{word}" or None,
            "visible": True,
        }


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
            derive_plan(plan, recipe_with(recipe, make_setting(recipe, name, dict.fromkeys(weight_keys(recipe), 1.0))))
        except InputError:
            continue
        found.append(name)
    return found


def controls_of(method: str, recipe: Recipe) -> dict[str, Control]:
    """Key → control: a weight for each model, damping if the method uses it, and its options that are numbers."""
    rule = METHODS[method]
    given: Mapping[str, Any] = recipe.resolved_options if recipe.method == method else {}
    found = _weights(method, recipe)
    if "damping" in rule.inputs:
        meaning = "δ, added to the curvature"
        found.append(Control("damping", "damping", 1e-12, 1e3, 0.1, recipe.damping, meaning, logarithmic=True))
    for option in rule.options:
        value = given.get(option.name, option.default)
        number = option.type in (int, float, OrNone) and not isinstance(value, tuple | list)
        if number and not option.required:
            found.append(_option(option, value))
    return {control.key: control for control in sorted(found, key=_order)}


def _order(control: Control) -> int:
    return 0 if control.is_weight else 1 if control.key in MAIN_OPTIONS else 2


def _weights(method: str, recipe: Recipe) -> list[Control]:
    """A weight for each model, unless the method takes none. Of task arithmetic that removes, weights are below 0."""
    if not takes_weights(method):
        return []
    low, high = 0.0, 1.5
    if is_removal(recipe):
        low, high = (0.0, 2.0) if METHODS[method].removes else (-2.0, 0.0)
    turned = is_removal(recipe) and METHODS[method].removes != recipe.rule.removes
    found = []
    for key, name, weight in zip(weight_keys(recipe), task_names(recipe), recipe.weights, strict=True):
        value = mapped(weight, lambda item: -item) if turned else weight
        ends = [low, high, *leaves(value)]
        found.append(Control(key, name, min(ends), max(ends), 0.01, value))
    return found


def _option(option: Option, value: Any) -> Control:
    ends = option.help
    low = ends.ge if ends.ge is not None else ends.gt if ends.gt is not None else 0.0
    high = ends.le if ends.le is not None else HIGHEST.get(option.name, 100)
    step: float = 1
    if option.type is int:
        low, high = int(low), int(high)
    else:
        step = 0.01 if high - low >= 0.5 else (high - low) / 100
        low = step if ends.gt is not None else low
    return Control(f"options.{option.name}", option.name.replace("_", " "), low, high, step, value, option.meaning)
