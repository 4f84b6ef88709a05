"""The settings of a preview: which weights and other keys are tried, with which methods."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, Varying, in_words, leaves, make_recipe, mapped, plain
from ..recipe.overrides import put
from ..rules import METHODS
from ..text import nearest
from .sweeps import Changes, Sweep, as_changes
from .weight_ranges import MOST, Ranges


@dataclass(frozen=True)
class Setting:
    """One merge of a preview."""

    method: str
    weights: tuple[Varying, ...]
    """One per task; empty for a method that takes none."""
    position: float | None = None
    """Where it lies on the axis of the figures."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys of the recipe that are set beside these, each with its value: ("damping", 0.001), ("options.t", (0, 1)).

    Lists are tuples, and a mapping is one key for each of its own: ("reduction.mean_times", 100).
    """
    swept: str = ""
    """The key of ``changes`` that the figures' axis shows; empty where that is a weight."""

    def same(self, other: Setting) -> bool:
        """Whether both are the same merge."""
        own, others = ((one.method, one.weights, dict(one.changes)) for one in (self, other))
        return own == others

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.method, self.weights_in_words, self.changes_in_words) if part)

    @property
    def series(self) -> str:
        """What all settings of one curve have in common: the method, and changes that are not on the axis."""
        off_axis = tuple(pair for pair in self.changes if pair[0] != self.swept)
        return f"{self.method} {in_few_words(off_axis)}".strip()

    @property
    def changes_in_words(self) -> str:
        """`damping 0.001, density 0.2`."""
        return in_few_words(self.changes)

    @property
    def weights_in_words(self) -> str:
        """`0.3` where all are the same, or `0.3, 0.5`."""
        if len(set(self.weights)) == 1:
            return in_words(self.weights[0])
        return ", ".join(map(in_words, self.weights))


def is_removal(recipe: Recipe) -> bool:
    """Whether a recipe takes something away: `removal`, or task arithmetic with weights below 0."""
    below = all(leaf < 0 for weight in recipe.weights for leaf in leaves(weight))
    return recipe.method == "removal" or (recipe.method == "task-arithmetic" and below)


def takes_weights(method: str) -> bool:
    return "weights" in METHODS[method].inputs


def check_methods(methods: Sequence[str] | str | None, recipe: Recipe) -> list[str]:
    """The methods of a preview: those named, or the recipe's own. Every one must fit the recipe's models."""
    chosen = list(dict.fromkeys(method_names(methods) or [recipe.method]))
    for method in chosen:
        if method not in METHODS:
            hint = f"{nearest(method, METHODS)}\n  Known are {', '.join(METHODS)}."
            raise InputError(f"--methods {method}: there is no such method{hint}")
        if METHODS[method].fallback is not None:
            raise InputError(
                f"--methods: {method} works on whole matrices and cannot be previewed block by block. "
                "Leave it out with --methods, and use gradmerge merge and gradmerge evaluate for it."
            )
        recipe_with(recipe, Setting(method, tuple(recipe.weights)))
    return chosen


def method_names(methods: Sequence[str] | str | None) -> list[str]:
    """`a,b` or a list as a list."""
    return [part.strip() for part in methods.split(",")] if isinstance(methods, str) else list(methods or ())


@dataclass(frozen=True)
class Space:
    """All that a preview tries: weights and keys of the recipe, for every method."""

    ranges: Ranges
    sweeps: Sequence[Sweep] = ()
    fixed: Mapping[str, Changes] = field(default_factory=dict)
    """Method → what all its settings change of the recipe."""

    @property
    def swept(self) -> str:
        """The key that the figures' axis shows: of those swept the first with numbers; none where weights vary."""
        varying = (s.key for s in self.sweeps if sum(isinstance(value, int | float) for value in s.values) > 1)
        return "" if self.ranges.vary else next(varying, "")

    @property
    def axis(self) -> str:
        """What a figure's horizontal axis shows."""
        return self.swept.removeprefix("options.") or self.ranges.axis

    def own(self, method: str) -> list[Sweep]:
        """The keys that are swept for a method."""
        return [sweep for sweep in self.sweeps if method in sweep.methods]

    def notes(self, methods: Sequence[str]) -> list[str]:
        """Which methods do not know which key."""
        found = []
        for sweep in self.sweeps:
            without = [method for method in methods if method not in sweep.methods]
            if without:
                found.append(f"{sweep.key} makes no difference to {', '.join(without)}, for which it is not swept")
        return found

    def setting(self, method: str, weights: tuple[Varying, ...], values: Sequence[Any] = ()) -> Setting:
        """A setting with a value for each key that is swept for the method."""
        own = self.own(method)
        changes = list(self.fixed.get(method, ()))
        placed = list(weights)
        for sweep, value in zip(own, values, strict=True):
            for key, one in as_changes(sweep.key, value):
                found = re.fullmatch(r"models\.(\d+)\.weight", key)
                if found and int(found[1]) < len(placed) and all(isinstance(leaf, int | float) for leaf in leaves(one)):
                    placed[int(found[1])] = mapped(one, float)
                else:
                    changes = [pair for pair in changes if pair[0] != key] + [(key, one)]
        placed = placed if takes_weights(method) else []
        position = self.ranges.position(placed) if placed and not self.swept else None
        at = {sweep.key: value for sweep, value in zip(own, values, strict=True)}.get(self.swept)
        if isinstance(at, int | float) and not isinstance(at, bool):
            position = float(at)
        swept = self.swept if self.swept in dict(changes) else ""
        return Setting(method, tuple(placed), position, tuple(changes), swept)

    def check(self, methods: Sequence[str], recipe: Recipe) -> None:
        """Say so before any work if a value does not suit a method that knows its key."""
        weights = tuple(recipe.weights)
        for method in methods:
            for sweep in self.own(method):
                for value in sweep.values:
                    try:
                        recipe_with(recipe, replace(self, sweeps=[sweep]).setting(method, weights, [value]))
                    except InputError as error:
                        raise InputError(f"--sweep {sweep.key}={in_words(value)}: {error}") from None
            if not self.own(method):
                recipe_with(recipe, self.setting(method, weights))


def grid(methods: Sequence[str], space: Space) -> list[Setting]:
    """Every combination of the weights and the values that are swept, with every method."""
    dimensions = space.ranges.dimensions()
    open_ = [(one, "--weights ") for _, one in dimensions if not one.values]
    open_ += [(s.range, f"--sweep {s.key}=") for s in space.sweeps if s.range is not None and not s.values]
    for one, option in open_:
        ends = f"{one.low:g}:{one.high:g}"
        step = f"a grid needs a step, such as {ends}:0.1"
        raise InputError(f"{option}{ends}: {step}")
    combinations = math.prod(len(one.values) for _, one in dimensions)
    count = sum(
        math.prod(len(sweep.values) for sweep in space.own(method)) * (combinations if takes_weights(method) else 1)
        for method in methods
    )
    if count > MOST:
        option = "--sweep" if space.sweeps else "--weights"
        most = f"the grid has {count:,} settings; at most {MOST:,} are tried"
        raise InputError(f"{option}: {most}. Take larger steps.")
    points = [space.ranges.weights(point) for point in itertools.product(*(one.values for _, one in dimensions))]
    settings = (
        space.setting(method, weights, values)
        for method in methods
        for values in itertools.product(*(sweep.values for sweep in space.own(method)))
        for weights in points
    )
    return list(dict.fromkeys(settings))


def settings_of(method: str, space: Space, points: Sequence[tuple[Varying, ...]]) -> list[Setting]:
    """Settings of one method at some weights, each once."""
    return list(dict.fromkeys(space.setting(method, weights) for weights in points))


def recipe_with(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe with a setting's method, weights and changes, less keys that only its own method understands."""
    method, rule = setting.method, METHODS[setting.method]
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    raw["method"] = method
    for model, weight in zip(raw["models"], setting.weights or [1.0] * len(raw["models"]), strict=True):
        model.pop("weight", None)
        if takes_weights(method):
            model["weight"] = plain(weight)
    if method != recipe.method:
        for part in (raw, *raw["models"]):
            part.pop("options", None)
        for key, needed in (("weight", "base_weight"), ("penalty", "penalty"), ("examples", "prior")):
            if raw.get("base") and needed not in rule.inputs:
                raw["base"].pop(key, None)
        if rule.precision is None and raw.get("output"):
            raw["output"].pop("curvature", None)
    for key, value in setting.changes:
        put(raw, key, plain(value), key)
    return make_recipe(raw, folder=recipe.folder, where=str(recipe.file or "recipe")).with_origin(recipe)


def in_few_words(changes: Sequence[tuple[str, Any]]) -> str:
    """Changes as they are shown: `damping 0.001, density 0.2`."""
    return ", ".join(f"{key.removeprefix('options.')} {in_words(value)}" for key, value in changes)
