"""Settings of a preview. A setting is one merge: the recipe with some of its keys overridden."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, Varying, in_words, leaves, make_recipe, plain
from ..recipe.overrides import full_key, put, split_setting
from ..recipe.schedules import varied
from ..rules import METHODS
from ..text import natural, nearest
from ..yaml import parse_yaml

#: The name of the base model among the tasks.
BASE = "base"
#: A grid with more settings is refused.
MAX_SETTINGS = 2000
DEFAULT_WEIGHTS = "0:1:0.1"

Weights = str | Sequence[str] | Mapping[str, "str | float"]
"""`0:1:0.1` for one weight that all tasks share, `yelp=0:1:0.25` for one task, or several of these; or task → range."""
Overrides = Sequence[str] | Mapping[str, Any]
"""`["damping=1e-3"]`, or key → value; for a sweep, key → range or list of values."""

#: Recipe keys that a preview may vary, besides options. A key affects a method if its rule reads one of these inputs.
_INPUTS_OF_KEY = {
    "damping": {"damping"},
    "reduction": {"prior", "curvature", "grams"},
    "missing": {"prior", "curvature"},
    "include": {"tuned"},
    "exclude": {"tuned"},
    "output.dtype": {"tuned"},
    "base.curvature": {"prior"},
    "base.examples": {"prior"},
    "base.penalty": {"penalty"},
    "base.weight": {"base_weight"},
    "models.N.curvature": {"curvature", "grams"},
    "models.N.weight": {"weights"},
}
_WEIGHT = re.compile(r"models\.\d+\.weight")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
#: What looks like a range; `parse_range` reads its numbers.
_RANGE = re.compile(r"[-+.\deE\s]+(:[-+.\deE\s]+){1,2}")


class Setting(Mapping[str, Any]):
    """One merge: dotted keys of a recipe with their values, such as `{"method": "ties", "models.0.weight": 0.3}`.

    It has the method, the weight of every model if the method takes weights, and all other keys that differ from the
    recipe. Lists are tuples, and no value is a mapping.
    """

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = {key: overrides[key] for key in sorted(overrides, key=natural)}

    def __getitem__(self, key: str) -> Any:
        return self._overrides[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._overrides)

    def __len__(self) -> int:
        return len(self._overrides)

    def __hash__(self) -> int:
        return hash(tuple(self._overrides.items()))

    def __repr__(self) -> str:
        return f"Setting({self._overrides})"

    @property
    def method(self) -> str:
        return str(self.get("method", ""))

    @property
    def weights(self) -> tuple[Varying, ...]:
        """The weight of every model; empty for a method that takes no weights."""
        return tuple(value for key, value in self.items() if _WEIGHT.fullmatch(key))

    @property
    def changes(self) -> dict[str, Any]:
        """The keys beside the method and the weights, such as `options.density`."""
        return {key: value for key, value in self.items() if key != "method" and not _WEIGHT.fullmatch(key)}

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.method, self.weights_text, changes_text(self.changes)) if part)

    @property
    def weights_text(self) -> str:
        """`0.3` where all are the same, or `0.3, 0.5`."""
        return ", ".join(map(in_words, self.weights[:1] if len(set(self.weights)) == 1 else self.weights))


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of figures: one or several recipe keys that share one value."""

    label: str
    keys: tuple[str, ...] = ()

    def position(self, setting: Setting) -> float | None:
        """Return the position of a setting on the axis; None if its keys do not share one number."""
        values = {setting.get(key) for key in self.keys}
        value = values.pop() if len(values) == 1 else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def curve(self, setting: Setting) -> str:
        """Return the name of the curve that a setting is on: the method, and changes that are not on the axis."""
        others = {key: value for key, value in setting.changes.items() if key not in self.keys}
        return f"{setting.method} {changes_text(others)}".strip()


@dataclass(frozen=True)
class Dimension:
    """One dimension of a grid: recipe keys that always share one value, and the values to try."""

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()
    """The values to try; empty for a range without a step."""
    low: float = math.nan
    high: float = math.nan
    methods: tuple[str, ...] = ()
    """The methods that depend on the keys."""
    parameter: str = "weights "
    """The beginning of error messages: the argument that gave the values."""

    @property
    def is_weight(self) -> bool:
        return bool(_WEIGHT.fullmatch(self.keys[0]))


@dataclass(frozen=True)
class Grid:
    """All combinations of the methods with the values of the dimensions."""

    recipe: Recipe
    methods: Sequence[str]
    dimensions: Sequence[Dimension] = ()

    def settings(self) -> list[Setting]:
        """Return all settings, each once. Raise InputError if there are too many, or if a value is invalid."""
        for dimension in self.dimensions:
            if not dimension.values:
                ends = f"{dimension.low:g}:{dimension.high:g}"
                raise InputError(f"{dimension.parameter}{ends}: a grid needs a step, such as {ends}:0.1")
        count = sum(
            math.prod(len(dimension.values) for dimension in self.dimensions_of(method)) for method in self.methods
        )
        if count > MAX_SETTINGS:
            parameter = self.dimensions[0].parameter.rstrip(" =")
            raise InputError(
                f"{parameter}: the grid has {count:,} settings; the limit is {MAX_SETTINGS:,}. Use larger steps"
            )
        found = dict.fromkeys(
            self.setting(method, values)
            for method in self.methods
            for values in itertools.product(*(dimension.values for dimension in self.dimensions_of(method)))
        )
        for setting in found:
            try:
                recipe_with(self.recipe, setting)
            except InputError as error:
                raise InputError(f"{setting.name}: {error}") from None
        return list(found)

    def dimensions_of(self, method: str) -> list[Dimension]:
        """Return the dimensions that affect a method."""
        return [dimension for dimension in self.dimensions if method in dimension.methods]

    def setting(self, method: str, values: Sequence[Any]) -> Setting:
        """Return the setting of a method, given one value for each of its dimensions."""
        overrides: dict[str, Any] = {}
        for dimension, value in zip(self.dimensions_of(method), values, strict=True):
            overrides |= dict.fromkeys(dimension.keys, value)
        return make_setting(self.recipe, method, overrides)

    @property
    def own(self) -> list[Setting]:
        """The recipe's own merge, in a list; empty if its method is not compared."""
        return [make_setting(self.recipe, self.recipe.method)] if self.recipe.method in self.methods else []

    @property
    def axis(self) -> Axis:
        """The horizontal axis of figures: the weights, or if they do not vary, the first swept key with numbers."""
        varying = [d for d in self.dimensions if d.high > d.low or len(d.values) > 1]
        weights = [d for d in varying if d.is_weight]
        swept = [d for d in varying if sum(isinstance(value, int | float) for value in d.values) > 1]
        if swept and not weights:
            return Axis(swept[0].keys[0].removeprefix("options."), swept[0].keys)
        names, every = task_names(self.recipe), weight_keys(self.recipe)
        keys = weights[0].keys if len(weights) == 1 else tuple(every)
        label = f"weight of {names[every.index(keys[0])]}" if len(keys) == 1 else "weight, the same for all tasks"
        return Axis(label if len(names) > 1 else "weight", keys)


def make_setting(recipe: Recipe, method: str, overrides: Mapping[str, Any] | None = None) -> Setting:
    """Return a setting with these overrides. Models without an override keep the recipe's weight."""
    known: dict[str, Any] = dict(zip(weight_keys(recipe), recipe.weights, strict=True))
    for key, value in (overrides or {}).items():
        known |= _flattened(key, value)
    if not takes_weights(method):
        known = {key: value for key, value in known.items() if not _WEIGHT.fullmatch(key)}
    return Setting({**known, "method": method})


def recipe_with(recipe: Recipe, setting: Setting) -> Recipe:
    """Return the recipe of a setting, without keys that only the recipe's own method supports."""
    rule, raw = METHODS[setting.method], recipe.model_dump(mode="json", exclude_unset=True)
    for model in raw["models"]:
        model.pop("weight", None)
    if setting.method != recipe.method:
        for part in (raw, *raw["models"]):
            part.pop("options", None)
        for key, needed in (("weight", "base_weight"), ("penalty", "penalty"), ("examples", "prior")):
            if raw.get("base") and needed not in rule.inputs:
                raw["base"].pop(key, None)
        if rule.precision is None and raw.get("output"):
            raw["output"].pop("curvature", None)
    for key, value in setting.items():
        put(raw, key, plain(value), key)
    return make_recipe(raw, folder=recipe.folder, where=str(recipe.file or "recipe")).with_origin(recipe)


def weight_keys(recipe: Recipe) -> list[str]:
    """Return the recipe key of each model's weight."""
    return [f"models.{i}.weight" for i in range(len(recipe.models))]


def task_names(recipe: Recipe) -> list[str]:
    """Return a task name for each fine-tuned model: the last part of its path, or if not unique, the whole path."""
    paths = [model.adapter or model.model for model in recipe.models]
    short = [Path(path.partition("@")[0]).name or path for path in paths]
    names = [path if short.count(name) > 1 or name == BASE else name for path, name in zip(paths, short, strict=True)]
    # A recipe may name a model twice.
    earlier = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True)]


def is_removal(recipe: Recipe) -> bool:
    """Return whether a recipe removes tasks: method `removal`, or task arithmetic with negative weights."""
    negative = all(leaf < 0 for weight in recipe.weights for leaf in leaves(weight))
    return recipe.rule.removes or (recipe.method == "task-arithmetic" and negative)


def takes_weights(method: str) -> bool:
    return "weights" in METHODS[method].inputs


def changes_text(changes: Mapping[str, Any]) -> str:
    """Return changes as text: `damping 0.001, density 0.2`."""
    return ", ".join(f"{key.removeprefix('options.')} {in_words(value)}" for key, value in changes.items())


def method_names(methods: Sequence[str] | str | None) -> list[str]:
    """Return methods, given as `a,b` or as a list, as a list."""
    return [part.strip() for part in methods.split(",")] if isinstance(methods, str) else list(methods or ())


def check_methods(methods: Sequence[str] | str | None, recipe: Recipe) -> list[str]:
    """Return the methods to compare, by default the recipe's own. Raise InputError if one cannot be compared."""
    chosen = list(dict.fromkeys(method_names(methods) or [recipe.method]))
    for method in chosen:
        if method not in METHODS:
            hint = f"{nearest(method, METHODS)}\n  Known are {', '.join(METHODS)}."
            raise InputError(f"methods: {method} is not a method{hint}")
        recipe_with(recipe, make_setting(recipe, method))
    return chosen


def key_matters(key: str, method: str) -> bool:
    """Return whether the result of a method depends on a recipe key."""
    rule, words = METHODS[method], key.split(".")
    if "options" in words:
        name = "".join(words[words.index("options") + 1 :][:1])
        return any(option.name == name and (words[0] == "options" or option.help.per_model) for option in rule.options)
    return bool(_INPUTS_OF_KEY[_general(key)] & set(rule.inputs))


def _general(key: str) -> str:
    """Return the key of `_INPUTS_OF_KEY` that a dotted key equals or is below; empty if there is none."""
    general = re.sub(r"^models\.\d+\.", "models.N.", key)
    return next((known for known in _INPUTS_OF_KEY if general == known or general.startswith(f"{known}.")), "")


def changes_inputs(key: str) -> bool:
    """Return whether changing a key changes which tensors or curvature a merge reads. It then needs its own plan."""
    if "options" in key.split("."):
        return any(rule.when.get("prior") == key.removeprefix("options.") for rule in METHODS.values())
    return key != "method" and _general(key) not in ("damping", "models.N.weight")


def _known_key(key: str, methods: Sequence[str], where: str) -> str:
    """Return the dotted key. Raise InputError, with the nearest key, if it affects none of the methods."""
    full = full_key(key, [METHODS[method] for method in methods], where)
    words = full.split(".")
    if "options" not in words and not _general(full):
        known = ", ".join([*_INPUTS_OF_KEY, "options.NAME", "models.N.options.NAME"])
        raise InputError(f"{where}: {full} cannot vary{nearest(full, _INPUTS_OF_KEY)}; known are {known}")
    if not any(key_matters(full, method) for method in methods):
        options = dict.fromkeys(option.name for method in methods for option in METHODS[method].options)
        near = nearest(words[-1], options) if "options" in words else ""
        raise InputError(f"{where}: {full} makes no difference to {', '.join(methods)}{near}")
    return full


def _flattened(key: str, value: Any) -> dict[str, Any]:
    """Return a key and its value as flat items: a mapping becomes dotted keys, and lists become tuples."""
    if isinstance(value, Mapping):
        return {
            full: item for name, inner in value.items() for full, item in _flattened(f"{key}.{name}", inner).items()
        }
    try:
        return {key: varied(_with_numbers(value), lambda item: item) if value not in ([], ()) else ()}
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def _with_numbers(value: Any) -> Any:
    """Convert strings such as 1e-3 to numbers. YAML reads them as strings."""
    if isinstance(value, list | tuple):
        return [_with_numbers(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _with_numbers(item) if name == "value" else item for name, item in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def parse_range(text: str, parameter: str = "weights ") -> Dimension:
    """Parse `0:1:0.1` with both ends, `0:1`, `0,0.3,1` or `0.5`. Decimals are exact: three steps of 0.1 are 0.3."""
    write = "write START:STOP:STEP such as 0:1:0.1, a list such as 0,0.3,1, or one number"
    try:
        parts = [Decimal(part.strip()) for part in text.split(":" if ":" in text else ",")]
    except InvalidOperation:
        parts = []
    if not parts or not all(part.is_finite() for part in parts) or (":" in text and len(parts) > 3):
        raise InputError(f"{parameter}{text}: {write}")
    if ":" in text:
        start, stop = parts[:2]
        if len(parts) == 2:
            return Dimension((), (), float(min(parts)), float(max(parts)), (), parameter)
        steps = (stop - start) / parts[2] if parts[2] else Decimal(-1)
        if not 0 <= steps < MAX_SETTINGS:
            raise InputError(
                f"{parameter}{text}: the step must lead from {start} to {stop} in at most {MAX_SETTINGS:,}"
            )
        parts = sorted(start + i * parts[2] for i in range(int(steps) + 1))
    values = tuple(dict.fromkeys(int(x) if x == x.to_integral_value() else float(x) for x in parts))
    return Dimension((), values, float(min(values)), float(max(values)), (), parameter)


def parse_weights(
    given: Weights | None, recipe: Recipe, methods: Sequence[str], default: str | None = DEFAULT_WEIGHTS
) -> list[Dimension]:
    """Parse ranges of weights into dimensions: one for each task with its own range, and one that all others share.

    Without ``given``, all tasks share ``default``. If that is None, they keep the recipe's weights.
    """
    if isinstance(given, Mapping):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [given] if isinstance(given, str) else list(given or ([default] if default else []))
    keys = dict(zip(task_names(recipe), weight_keys(recipe), strict=True))
    ranges: dict[str, Dimension] = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        if equals and name not in keys:
            hint = f"{nearest(name, keys)}\n  Tasks are {', '.join(keys)}."
            raise InputError(f"weights {text}: no task of the recipe is called {name!r}{hint}")
        if name in ranges:
            raise InputError(
                f"weights {text}: {name or 'all tasks'} has a range already; for one task write NAME=RANGE"
            )
        ranges[name] = parse_range(rest, f"weights {name}=" if name else "weights ")
    shared = ranges.pop("", None)
    found = [replace(dimension, keys=(keys.pop(name),)) for name, dimension in ranges.items()]
    if shared is not None and keys:
        found.append(replace(shared, keys=tuple(keys.values())))
    return [replace(dimension, methods=tuple(filter(takes_weights, methods))) for dimension in found]


def parse_sweeps(given: Overrides | None, methods: Sequence[str]) -> list[Dimension]:
    """Parse ranges of other keys into dimensions. Values are START:STOP:STEP, `a,b`, or lists as `[0, 1],[1, 0]`."""
    pairs = (
        given.items() if isinstance(given, Mapping) else [split_setting(t, "sweep", "0.1:0.9:0.2") for t in given or ()]
    )
    found: dict[str, Dimension] = {}
    for name, text in pairs:
        where = f"sweep {name}={text}"
        key = _known_key(name, methods, where)
        if key in found:
            raise InputError(f"{where}: {key} has values already")
        knowing = tuple(method for method in methods if key_matters(key, method))
        if isinstance(text, str) and _RANGE.fullmatch(text):
            dimension = parse_range(text, f"sweep {name}=")
        else:
            dimension = Dimension((), tuple(_values(text, where)), parameter=f"sweep {name}=")
        found[key] = replace(dimension, keys=(key,), methods=knowing)
    # Settings that read the same files are neighbors.
    return sorted(found.values(), key=lambda dimension: not changes_inputs(dimension.keys[0]))


def _values(text: Any, where: str) -> list[Any]:
    if isinstance(text, str):
        text = parse_yaml(f"[{text}]", where)
    values = [_with_numbers(value) for value in (text if isinstance(text, list | tuple) else [text])]
    if not values or "" in values or None in values:
        raise InputError(f"{where}: gives no value; write START:STOP:STEP or a list such as 0.1,0.5")
    return list({repr(value): value for value in values}.values())


def with_changes(
    recipe: Recipe, given: Overrides | None, methods: Sequence[str] = ()
) -> tuple[Recipe, list[Dimension]]:
    """Set keys of a recipe, as `merge --set` does. Return the recipe, and dimensions for options of other methods.

    Other methods take no options from the recipe. Each option that is set here becomes a dimension with one value for
    them, so that it applies to all methods.
    """
    pairs = given.items() if isinstance(given, Mapping) else [split_setting(text) for text in given or ()]
    if not pairs:
        return recipe, []
    fixed: list[Dimension] = []
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    tried = [method for method in dict.fromkeys([recipe.method, *methods]) if method in METHODS]
    for name, text in pairs:
        where = f"set {name}={text}"
        value = parse_yaml(text, where) if isinstance(text, str) and text.strip() else text
        key = full_key(name, [METHODS[method] for method in tried], where)
        if "options" in key.split("."):
            _known_key(key, tried, where)
            others = tuple(method for method in tried if method != recipe.method and key_matters(key, method))
            fixed.append(Dimension((key,), (value,), methods=others, parameter=f"set {name}="))
            if not key_matters(key, recipe.method):
                continue
        put(raw, key, value, where)
    where = f"{recipe.file or 'recipe'} with changes"
    return make_recipe(raw, folder=recipe.folder, where=where).with_origin(recipe), fixed
