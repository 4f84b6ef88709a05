"""Keys of the recipe other than method and weights that a preview tries values of: `--sweep`, and `--set`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, make_recipe
from ..recipe.overrides import full_key, put, split_setting
from ..recipe.schedules import varied
from ..rules import METHODS
from ..text import nearest
from ..yaml import parse_yaml
from .weight_ranges import Range, parse_range

Sweeps = Sequence[str] | Mapping[str, Any]
"""`["damping=1e-6,1e-3"]`, or key → range or list of values."""
Changes = tuple[tuple[str, Any], ...]
"""Dotted keys of a recipe with their values; lists are tuples, and no value is a mapping."""

#: The inputs of a rule of which one must be read for a key to matter.
_MATTERS = {
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
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
#: What a range may look like; its numbers are looked at by `parse_range`.
_RANGE = re.compile(r"[-+.\deE\s]+(:[-+.\deE\s]+){1,2}")


@dataclass(frozen=True)
class Sweep:
    """The values that are tried of one key."""

    key: str
    values: tuple[Any, ...]
    methods: tuple[str, ...]
    """Those that know the key."""
    range: Range | None = None
    """The range that was written, without values if it has no step; None for a list of values."""


def as_changes(key: str, value: Any) -> Changes:
    """One key and its value; a mapping as one key for each of its own."""
    if isinstance(value, Mapping):
        return tuple(pair for name, inner in value.items() for pair in as_changes(f"{key}.{name}", inner))
    try:
        return ((key, varied(_numbers(value), lambda item: item) if value not in ([], ()) else ()),)
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def _numbers(value: Any) -> Any:
    """With numbers such as 1e-3, which YAML takes for texts, as numbers."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _numbers(item) if name == "value" else item for name, item in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def matters(key: str, method: str) -> bool:
    """Whether a method's merge depends on a key."""
    rule = METHODS[method]
    words = key.split(".")
    place = words.index("options") if "options" in words else None
    if place is not None:
        name = words[place + 1] if len(words) > place + 1 else ""
        known = {option.name: option for option in rule.options}
        return name in known and (place == 0 or known[name].help.per_model)
    return bool(_MATTERS[_general(key)] & set(rule.inputs))


def _general(key: str) -> str:
    """The key of `_MATTERS` that a dotted key is or lies in, or nothing."""
    general = re.sub(r"^models\.\d+\.", "models.N.", key)
    return next((known for known in _MATTERS if general == known or general.startswith(f"{known}.")), "")


def changes_files(key: str) -> bool:
    """Whether a merge with another value of a key reads or merges something else."""
    name = key.removeprefix("options.")
    if "options" in key.split("."):
        return any(rule.when.get("prior") == name for rule in METHODS.values())
    return _general(key) not in ("damping", "models.N.weight")


def known_key(key: str, methods: Sequence[str], where: str) -> str:
    """The dotted key, which at least one of the methods knows; the nearest is named for one that none does."""
    if key in ("weight", "weights"):
        raise InputError(f"{where}: write --weights RANGE, or models.0.weight=… for lists over layers and filters")
    full = full_key(key, [METHODS[method] for method in methods], where)
    if full == "method":
        raise InputError(f"{where}: methods are compared with --methods A,B")
    words = full.split(".")
    if "options" not in words and not _general(full):
        known = ", ".join([*_MATTERS, "options.NAME", "models.N.options.NAME"])
        raise InputError(
            f"{where}: a preview compares merges of the same models, and {full} is not swept"
            f"{nearest(full, _MATTERS)}; known are {known}"
        )
    if not any(matters(full, method) for method in methods):
        options = dict.fromkeys(option.name for method in methods for option in METHODS[method].options)
        near = nearest(words[-1], options) if "options" in words else ""
        of = f"; options are {', '.join(options)}" if options and "options" in words else ""
        raise InputError(f"{where}: {full} makes no difference to {', '.join(methods)}{near}{of}")
    return full


def parse_sweeps(given: Sweeps | None, methods: Sequence[str]) -> list[Sweep]:
    """The values of `--sweep KEY=RANGE`: numbers START:STOP:STEP, or values of any kind as `a,b` or `[0, 1],[1, 0]`."""
    if not isinstance(given, Mapping):
        given = dict(_each_once([split_setting(text, "--sweep", "0.1:0.9:0.2") for text in given or ()]))
    found: dict[str, Sweep] = {}
    for name, text in given.items():
        where = f"--sweep {name}={text}"
        key = known_key(name, methods, where)
        if key in found:
            raise InputError(f"{where}: {key} has values already")
        knowing = tuple(method for method in methods if matters(key, method))
        one, values = _values(name, text, where)
        whole = any(
            option.type is int for m in knowing for option in METHODS[m].options if key.endswith(f".{option.name}")
        )
        if whole:
            values = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
        found[key] = Sweep(key, tuple(values), knowing, one)
    return sorted(found.values(), key=lambda sweep: not changes_files(sweep.key))


def _each_once(pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    for place, (name, text) in enumerate(pairs):
        if name in (other for other, _ in pairs[:place]):
            raise InputError(f"--sweep {name}={text}: {name} has values already")
    return pairs


def _values(name: str, text: Any, where: str) -> tuple[Range | None, list[Any]]:
    """A range of numbers, and the values of a list or range."""
    if isinstance(text, str) and _RANGE.fullmatch(text):
        one = parse_range(text, f"--sweep {name}=", "value", 1e30)
        return one, list(one.values)
    if isinstance(text, str):
        text = parse_yaml(f"[{text}]", where)
    values = [_numbers(value) for value in (text if isinstance(text, list | tuple) else [text])]
    if not values or "" in values or None in values:
        raise InputError(f"{where}: gives no value; write START:STOP:STEP or a list such as 0.1,0.5")
    return None, list({repr(value): value for value in values}.values())


def with_changes(
    recipe: Recipe, given: Sweeps | None, methods: Sequence[str] | None
) -> tuple[Recipe, dict[str, Changes]]:
    """The recipe with keys set as `merge --set` does, and what that changes for other methods: options that they know.

    A method other than the recipe's takes no options from it, but those that are set here are meant for all.
    """
    pairs = given.items() if isinstance(given, Mapping) else [split_setting(text) for text in given or ()]
    others: dict[str, Changes] = {}
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    for name, text in pairs:
        where = f"--set {name}={text}"
        value = parse_yaml(text, where) if isinstance(text, str) and text.strip() else text
        own = str(raw.get("method"))
        tried = [m for m in dict.fromkeys([own, *(methods or ())]) if m in METHODS]
        key = full_key(name, [METHODS[method] for method in tried], where)
        if "options" in key.split("."):
            known_key(key, tried, where)
            for method in tried:
                if method != own and matters(key, method):
                    others[method] = (*others.get(method, ()), *as_changes(key, value))
            if not matters(key, own):
                continue
        put(raw, key, value, where)
    if not pairs:
        return recipe, {}
    where = f"{recipe.file or 'recipe'} with changes by --set"
    return make_recipe(raw, folder=recipe.folder, where=where).with_origin(recipe), others
