"""Settings: the merges that are compared, each of them a recipe with some of its keys overridden."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, Varying, in_words, leaves, make_recipe, plain
from ..recipe.overrides import full_key, put, split_setting
from ..recipe.schedules import varied
from ..rules import METHODS
from ..text import nearest
from ..yaml import parse_yaml

#: The name of the base model among the tasks.
BASE = "base"
#: A grid with more settings is refused.
MAX_SETTINGS = 2000
DEFAULT_WEIGHTS = "0:1:0.1"
#: The weights that a search tries by default.
SEARCHED_WEIGHTS = "0:1.5"

Weights = str | Sequence[str] | Mapping[str, "str | float"]
"""`0:1:0.1` for one weight that all tasks share, `yelp=0:1:0.25` for one task, or several of these; or task → range."""
Overrides = Sequence[str] | Mapping[str, Any]
"""`["damping=1e-3"]`, or key → value; for a sweep, key → range or list of values."""
Changes = tuple[tuple[str, Any], ...]
"""Dotted keys of a recipe with their values, sorted by key. Lists are tuples, and no value is a mapping."""

#: A key makes a difference to a method if the method's rule reads one of these inputs.
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
_WEIGHT = re.compile(r"models\.(\d+)\.weight")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
#: What looks like a range; `parse_range` reads its numbers.
_RANGE = re.compile(r"[-+.\deE\s]+(:[-+.\deE\s]+){1,2}")


@dataclass(frozen=True)
class Setting:
    """One merge: a method, a weight for each model, and other keys of the recipe."""

    method: str
    weights: tuple[Varying, ...] = ()
    """Empty for a method that takes no weights."""
    changes: Changes = ()
    """Other keys of the recipe, such as ("damping", 0.001) or ("options.t", (0, 1))."""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.method, self.weights_text, changes_text(self.changes)) if part)

    @property
    def weights_text(self) -> str:
        """`0.3` where all are the same, or `0.3, 0.5`."""
        if len(set(self.weights)) == 1:
            return in_words(self.weights[0])
        return ", ".join(map(in_words, self.weights))


@dataclass(frozen=True)
class Axis:
    """What the horizontal axis of figures shows: a key of the recipe, or the weight of some models."""

    label: str
    key: str = ""
    models: tuple[int, ...] = ()

    def position(self, setting: Setting) -> float | None:
        """Where a setting is on the axis; None if it has no single number there."""
        value: Any
        if self.key:
            value = dict(setting.changes).get(self.key)
        else:
            values = {setting.weights[i] for i in self.models} if setting.weights else set()
            value = values.pop() if len(values) == 1 else None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number else None

    def curve(self, setting: Setting) -> str:
        """The name that all settings of one curve share: the method, and changes that are not on the axis."""
        return f"{setting.method} {changes_text([pair for pair in setting.changes if pair[0] != self.key])}".strip()


@dataclass(frozen=True)
class Dimension:
    """Values that are tried of some keys of the recipe, which all take the same value."""

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()
    """The values of a grid; empty for a range without a step."""
    low: float = math.nan
    high: float = math.nan
    methods: tuple[str, ...] = ()
    """The methods that depend on the keys."""
    parameter: str = "weights "
    """How error messages begin."""

    @property
    def varies(self) -> bool:
        return self.high > self.low or len(self.values) > 1


@dataclass(frozen=True)
class Grid:
    """Every combination of the values of some dimensions, with every method."""

    recipe: Recipe
    methods: Sequence[str]
    weights: Sequence[Dimension] = ()
    sweeps: Sequence[Dimension] = ()
    """Dimensions of other keys than weights."""

    def settings(self) -> list[Setting]:
        """All settings, each once; raises InputError if a range has no step or the settings are too many."""
        for one in (*self.weights, *self.sweeps):
            if not one.values:
                ends = f"{one.low:g}:{one.high:g}"
                raise InputError(f"{one.parameter}{ends}: a grid needs a step, such as {ends}:0.1")
        count = sum(math.prod(len(one.values) for one in self._dimensions(method)) for method in self.methods)
        if count > MAX_SETTINGS:
            first = next(iter([*self.sweeps, *self.weights])).parameter.rstrip(" =")
            raise InputError(
                f"{first}: the grid has {count:,} settings; the limit is {MAX_SETTINGS:,}. Use larger steps"
            )
        settings = [
            self.setting(method, values)
            for method in self.methods
            for values in itertools.product(*(one.values for one in self._dimensions(method)))
        ]
        return list(dict.fromkeys(settings))

    def _dimensions(self, method: str) -> list[Dimension]:
        return [one for one in (*self.sweeps, *self.weights) if method in one.methods]

    def setting(self, method: str, values: Sequence[Any]) -> Setting:
        """The setting of a method with one value for each of its dimensions."""
        overrides: dict[str, Any] = {}
        for one, value in zip(self._dimensions(method), values, strict=True):
            overrides |= dict.fromkeys(one.keys, value)
        return make_setting(self.recipe, method, overrides)

    def check(self) -> None:
        """Raise InputError before any work if a method does not accept a value."""
        for method in self.methods:
            recipe_with(self.recipe, make_setting(self.recipe, method, {}))
            for one in self.sweeps:
                for value in one.values if method in one.methods else ():
                    try:
                        own = Grid(self.recipe, [method], sweeps=[one])
                        recipe_with(self.recipe, own.setting(method, [value]))
                    except InputError as error:
                        raise InputError(f"{one.parameter}{in_words(value)}: {error}") from None

    @property
    def axis(self) -> Axis:
        """The first swept key with numbers, if no weight varies; else a weight."""
        varying = [one for one in self.weights if one.varies]
        swept = [one.keys[0] for one in self.sweeps if sum(isinstance(v, int | float) for v in one.values) > 1]
        if swept and not varying:
            return Axis(swept[0].removeprefix("options."), swept[0])
        names = task_names(self.recipe)
        models = tuple(range(len(names)))
        if len(varying) == 1:
            models = tuple(i for i in models if f"models.{i}.weight" in varying[0].keys)
        label = f"weight of {names[models[0]]}" if len(models) == 1 else "weight, the same for all tasks"
        return Axis(label if len(names) > 1 else "weight", "", models)


def make_setting(recipe: Recipe, method: str, overrides: Mapping[str, Any]) -> Setting:
    """A setting from keys of the recipe; models whose weight is not among them keep the recipe's weight."""
    weights, changes = list(recipe.weights), []
    for key, value in overrides.items():
        for name, item in as_changes(key, value):
            found = _WEIGHT.fullmatch(name)
            if found and int(found[1]) < len(weights):
                weights[int(found[1])] = item if isinstance(item, tuple) else float(item)
            else:
                changes.append((name, item))
    return Setting(method, tuple(weights) if takes_weights(method) else (), tuple(sorted(changes, key=_first)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def recipe_with(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe with a setting's method, weights and changes, without keys that only its own method understands."""
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


def own_setting(grid: Grid) -> Setting:
    """The recipe's own merge; if its method is not compared, the first method that is, at the recipe's weights."""
    if grid.recipe.method in grid.methods:
        return make_setting(grid.recipe, grid.recipe.method, {})
    fixed = {
        one.keys[0]: one.values[0] for one in grid.sweeps if len(one.values) == 1 and grid.methods[0] in one.methods
    }
    return make_setting(grid.recipe, grid.methods[0], fixed)


def same_merge(recipe: Recipe, one: Setting, other: Setting) -> bool:
    """Whether two settings of a recipe mean the same merge, with all defaults filled in."""
    if one == other or (one.method, one.weights) != (other.method, other.weights):
        return one == other
    recipes = [recipe_with(recipe, setting) for setting in (one, other)]
    one_dump, other_dump = ({**each.model_dump(), "options": each.resolved_options} for each in recipes)
    return one_dump == other_dump


def task_names(recipe: Recipe) -> list[str]:
    """A short name for each fine-tuned model: the last part of its path, or all of it where that is not unique."""
    paths = [model.adapter or model.model for model in recipe.models]
    short = [Path(path.partition("@")[0]).name or path for path in paths]
    return [path if short.count(name) > 1 or name == BASE else name for path, name in zip(paths, short, strict=True)]


def is_removal(recipe: Recipe) -> bool:
    """Whether a recipe removes something: `removal`, or task arithmetic with weights below 0."""
    negative = all(leaf < 0 for weight in recipe.weights for leaf in leaves(weight))
    return recipe.rule.removes or (recipe.method == "task-arithmetic" and negative)


def takes_weights(method: str) -> bool:
    return "weights" in METHODS[method].inputs


def changes_text(changes: Sequence[tuple[str, Any]]) -> str:
    """Changes for people: `damping 0.001, density 0.2`."""
    return ", ".join(f"{key.removeprefix('options.')} {in_words(value)}" for key, value in changes)


def method_names(methods: Sequence[str] | str | None) -> list[str]:
    """`a,b` or a list as a list."""
    return [part.strip() for part in methods.split(",")] if isinstance(methods, str) else list(methods or ())


def check_methods(methods: Sequence[str] | str | None, recipe: Recipe) -> list[str]:
    """The methods to compare: those named, or the recipe's own; raises InputError if one cannot be compared."""
    chosen = list(dict.fromkeys(method_names(methods) or [recipe.method]))
    for method in chosen:
        if method not in METHODS:
            hint = f"{nearest(method, METHODS)}\n  Known are {', '.join(METHODS)}."
            raise InputError(f"methods: {method} is not a method{hint}")
        if METHODS[method].fallback is not None:
            raise InputError(
                f"methods: {method} works on whole matrices and cannot be compared block by block. "
                "Leave it out, and use gradmerge merge and gradmerge evaluate for it."
            )
        recipe_with(recipe, make_setting(recipe, method, {}))
    return chosen


def key_matters(key: str, method: str) -> bool:
    """Whether a method's merge depends on a key."""
    rule, words = METHODS[method], key.split(".")
    if "options" in words:
        place = words.index("options")
        name = words[place + 1] if len(words) > place + 1 else ""
        known = {option.name: option for option in rule.options}
        return name in known and (place == 0 or known[name].help.per_model)
    return bool(_INPUTS_OF_KEY[_general(key)] & set(rule.inputs))


def _general(key: str) -> str:
    """The key of `_INPUTS_OF_KEY` that a dotted key is, or is part of; empty if there is none."""
    general = re.sub(r"^models\.\d+\.", "models.N.", key)
    return next((known for known in _INPUTS_OF_KEY if general == known or general.startswith(f"{known}.")), "")


def changes_inputs(key: str) -> bool:
    """Whether a merge with another value of a key reads or merges other tensors."""
    if "options" in key.split("."):
        return any(rule.when.get("prior") == key.removeprefix("options.") for rule in METHODS.values())
    return _general(key) not in ("damping", "models.N.weight")


def known_key(key: str, methods: Sequence[str], where: str) -> str:
    """The dotted key; raises InputError, with the nearest key, if it makes no difference to any of the methods."""
    if key in ("weight", "weights"):
        raise InputError(f"{where}: use weights=RANGE, or models.0.weight=… for lists over layers and filters")
    full = full_key(key, [METHODS[method] for method in methods], where)
    if full == "method":
        raise InputError(f"{where}: compare methods with methods=A,B")
    words = full.split(".")
    if "options" not in words and not _general(full):
        known = ", ".join([*_INPUTS_OF_KEY, "options.NAME", "models.N.options.NAME"])
        raise InputError(
            f"{where}: all settings merge the same models, so {full} cannot vary{nearest(full, _INPUTS_OF_KEY)}; "
            f"known are {known}"
        )
    if not any(key_matters(full, method) for method in methods):
        options = dict.fromkeys(option.name for method in methods for option in METHODS[method].options)
        near = nearest(words[-1], options) if "options" in words else ""
        of = f"; options are {', '.join(options)}" if options and "options" in words else ""
        raise InputError(f"{where}: {full} makes no difference to {', '.join(methods)}{near}{of}")
    return full


def as_changes(key: str, value: Any) -> Changes:
    """One key and its value; a mapping becomes one key for each of its items."""
    if isinstance(value, Mapping):
        return tuple(pair for name, inner in value.items() for pair in as_changes(f"{key}.{name}", inner))
    try:
        return ((key, varied(_numbers(value), lambda item: item) if value not in ([], ()) else ()),)
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def _numbers(value: Any) -> Any:
    """The value with texts such as 1e-3, which YAML does not read as numbers, as numbers."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _numbers(item) if name == "value" else item for name, item in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def parse_range(text: str, parameter: str = "weights ", largest: float = 1000) -> Dimension:
    """Read `0:1:0.1` with both ends, `0:1`, `0,0.3,1` or `0.5`. Decimals are exact: three steps of 0.1 are 0.3."""
    where = f"{parameter}{text}"
    write = "write START:STOP:STEP such as 0:1:0.1, a list such as 0,0.3,1, or one number"

    def number(part: str) -> Decimal:
        try:
            value = Decimal(part.strip())
        except InvalidOperation:
            raise InputError(f"{where}: {part.strip() or 'nothing'!r} is not a number; {write}") from None
        if not value.is_finite() or abs(value) > largest:
            raise InputError(f"{where}: a number must be between {-largest:g} and {largest:g}, not {part.strip()}")
        return value

    if ":" not in text:
        values = tuple(dict.fromkeys(float(number(part)) for part in text.split(",")))
        return Dimension((), values, min(values), max(values), (), parameter)
    parts = [number(part) for part in text.split(":")]
    if len(parts) == 2:
        low, high = sorted(float(part) for part in parts)
        return Dimension((), (), low, high, (), parameter)
    if len(parts) != 3:
        raise InputError(f"{where}: {write}")
    start, stop, step = parts
    if step == 0 or (stop - start) * step < 0:
        raise InputError(f"{where}: steps of {step} from {start} never reach {stop}; {write}")
    steps = int((stop - start) / step)
    if steps >= MAX_SETTINGS:
        raise InputError(f"{where}: more than {MAX_SETTINGS:,} values, which is the limit. Use a larger step")
    values = tuple(sorted(float(start + i * step) + 0.0 for i in range(steps + 1)))
    ends = min(values[0], float(stop)), max(values[-1], float(stop))
    return Dimension((), values, *ends, (), parameter)


def parse_weights(
    given: Weights | None, recipe: Recipe, methods: Sequence[str], default: str | None = DEFAULT_WEIGHTS
) -> list[Dimension]:
    """The dimensions of weights: of single tasks, then the one that all other tasks share.

    Without ``given``, all tasks share ``default``, or keep the recipe's weights if that is None.
    """
    tasks = task_names(recipe)
    if isinstance(given, Mapping):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [given] if isinstance(given, str) else list(given or ([default] if default else []))
    knowing = tuple(method for method in methods if takes_weights(method))
    shared: Dimension | None = None
    own: dict[str, Dimension] = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        if not equals:
            if shared is not None:
                raise InputError(f"weights {text}: all tasks have a range already; for one task write NAME={text}")
            shared = parse_range(rest)
            continue
        if name not in tasks:
            hint = f"{nearest(name, tasks)}\n  Tasks are {', '.join(tasks)}."
            raise InputError(f"weights {text}: no task of the recipe is called {name!r}{hint}")
        if name in own:
            raise InputError(f"weights {text}: {name} has a range already")
        own[name] = parse_range(rest, f"weights {name}=")
    found = [replace(one, keys=(f"models.{tasks.index(name)}.weight",), methods=knowing) for name, one in own.items()]
    others = tuple(f"models.{i}.weight" for i, name in enumerate(tasks) if name not in own)
    if shared is not None and others:
        found.append(replace(shared, keys=others, methods=knowing))
    return found


def parse_sweeps(given: Overrides | None, methods: Sequence[str]) -> list[Dimension]:
    """The dimensions of other keys: numbers START:STOP:STEP, or values of any kind as `a,b` or `[0, 1],[1, 0]`."""
    pairs = (
        given.items() if isinstance(given, Mapping) else [split_setting(t, "sweep", "0.1:0.9:0.2") for t in given or ()]
    )
    found: dict[str, Dimension] = {}
    for name, text in pairs:
        where = f"sweep {name}={text}"
        key = known_key(name, methods, where)
        if key in found:
            raise InputError(f"{where}: {key} has values already")
        knowing = tuple(method for method in methods if key_matters(key, method))
        if isinstance(text, str) and _RANGE.fullmatch(text):
            one = parse_range(text, f"sweep {name}=", 1e30)
        else:
            one = Dimension((), tuple(_values(text, where)), parameter=f"sweep {name}=")
        options = [option for m in knowing for option in METHODS[m].options if key.endswith(f".{option.name}")]
        if any(option.type is int for option in options):
            whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in one.values)
            one = replace(one, values=tuple(whole))
        found[key] = replace(one, keys=(key,), methods=knowing)
    # Settings that read the same files are neighbors.
    return sorted(found.values(), key=lambda one: not changes_inputs(one.keys[0]))


def _values(text: Any, where: str) -> list[Any]:
    if isinstance(text, str):
        text = parse_yaml(f"[{text}]", where)
    values = [_numbers(value) for value in (text if isinstance(text, list | tuple) else [text])]
    if not values or "" in values or None in values:
        raise InputError(f"{where}: gives no value; write START:STOP:STEP or a list such as 0.1,0.5")
    return list({repr(value): value for value in values}.values())


def with_changes(
    recipe: Recipe, given: Overrides | None, methods: Sequence[str] | None
) -> tuple[Recipe, list[Dimension]]:
    """The recipe with keys set as `merge --set` does, and sweeps of one value for options that other methods know.

    A method other than the recipe's takes no options from it, but options that are set here apply to all methods.
    """
    pairs = given.items() if isinstance(given, Mapping) else [split_setting(text) for text in given or ()]
    if not pairs:
        return recipe, []
    sweeps: list[Dimension] = []
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    own = str(raw.get("method"))
    tried = [method for method in dict.fromkeys([own, *(methods or ())]) if method in METHODS]
    for name, text in pairs:
        where = f"set {name}={text}"
        value = parse_yaml(text, where) if isinstance(text, str) and text.strip() else text
        key = full_key(name, [METHODS[method] for method in tried], where)
        if "options" in key.split("."):
            known_key(key, tried, where)
            others = tuple(method for method in tried if method != own and key_matters(key, method))
            sweeps.append(Dimension((key,), (value,), methods=others, parameter=f"set {name}="))
            if not key_matters(key, own):
                continue
        put(raw, key, value, where)
    where = f"{recipe.file or 'recipe'} with changes"
    return make_recipe(raw, folder=recipe.folder, where=where).with_origin(recipe), sweeps
