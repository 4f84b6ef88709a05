"""Set single keys of a recipe: `--set`, and the settings of a preview."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from ..rules import METHODS, Rule
from ..text import nearest
from ..yaml import parse_yaml
from .schema import Recipe


def apply_settings(recipe: dict[str, Any], settings: Sequence[str]) -> None:
    """Set keys from `key=value` texts. Keys can be dotted, and options of the method need no `options.`."""
    for setting in settings:
        key, text = split_setting(setting)
        rule = METHODS.get(str(recipe.get("method")))
        value = parse_yaml(text, f"--set {key}") if text.strip() else ""
        put(recipe, full_key(key, [rule] if rule is not None else [], f"--set {setting}"), value, f"--set {setting}")


def split_setting(setting: str, option: str = "--set", value: str = "0.2") -> tuple[str, str]:
    """Split `key=value`."""
    key, equals, text = setting.partition("=")
    if not equals or not _parts(key):
        raise InputError(f"{option} {setting}: write key=value, such as {option} options.density={value}")
    return key, text


def full_key(key: str, rules: Sequence[Rule], where: str) -> str:
    """Return the dotted key, with `options.` for an option of one of these rules; without rules any key is valid."""
    parts = _parts(key)
    if parts[0] in Recipe.model_fields or not rules:
        return ".".join(parts)
    options = {rule.name: [option.name for option in rule.options] for rule in rules}
    names = list(dict.fromkeys(name for of_rule in options.values() for name in of_rule))
    if parts[0] not in names:
        near = nearest(parts[0], [*names, *Recipe.model_fields])
        of = ", and ".join(f"of {name}: {', '.join(of_rule) or 'none'}" for name, of_rule in options.items())
        raise InputError(
            f"{where}: there is no key {parts[0]}{near}; known are {', '.join(Recipe.model_fields)}, and {of}"
        )
    return ".".join(["options", *parts])


def put(recipe: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in a recipe that is a mapping; ``where`` starts error messages."""
    parts: list[str | int] = [int(part) if part.isdecimal() and len(part) < 10 else part for part in _parts(key)]
    target: Any = recipe
    for depth, part in enumerate(parts):
        if isinstance(target, list):
            if not isinstance(part, int) or part >= len(target):
                raise InputError(f"{where}: there is no item {part} in a list of {len(target)}")
        elif isinstance(target, dict):
            target.setdefault(part, {})
        else:
            raise InputError(f"{where}: {parts[depth - 1]} is a single value and has no {part}")
        if depth == len(parts) - 1:
            target[part] = value
        elif isinstance(target[part], str):  # a model given as a path, or a word in place of a mapping
            is_model = part == "base" or isinstance(target, list)
            target[part] = {"model": target[part]} if is_model else {}
        target = target[part]


def _parts(key: str) -> list[str]:
    """Split `models[0].weight` into its parts."""
    return [part for part in re.split(r"[.\[\]]+", key) if part]
