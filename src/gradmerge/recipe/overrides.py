"""Single keys of a recipe set anew: `--set`, and the settings of a preview."""

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
    """Change keys by `--set key=value`; a key may be dotted, and a method's option needs no `options.`."""
    for setting in settings:
        key, text = split_setting(setting)
        rule = METHODS.get(str(recipe.get("method")))
        value = parse_yaml(text, f"--set {key}") if text.strip() else ""
        put(recipe, full_key(key, [rule] if rule is not None else [], f"--set {setting}"), value, f"--set {setting}")


def split_setting(setting: str, option: str = "--set", value: str = "0.2") -> tuple[str, str]:
    """`key=value` in its two parts."""
    key, equals, text = setting.partition("=")
    if not equals or not _words(key):
        raise InputError(f"{option} {setting}: write key=value, such as {option} options.density={value}")
    return key, text


def full_key(key: str, rules: Sequence[Rule], where: str) -> str:
    """The dotted key, with `options.` where it is an option of one of these methods; any key where there are none."""
    words = _words(key)
    if words[0] in Recipe.model_fields or not rules:
        return ".".join(words)
    own = {rule.name: [option.name for option in rule.options] for rule in rules}
    options = list(dict.fromkeys(name for names in own.values() for name in names))
    if words[0] not in options:
        near = nearest(words[0], [*options, *Recipe.model_fields])
        of = ", and ".join(f"of {name}: {', '.join(names) or 'none'}" for name, names in own.items())
        raise InputError(
            f"{where}: there is no key {words[0]}{near}; known are {', '.join(Recipe.model_fields)}, and {of}"
        )
    return ".".join(["options", *words])


def _words(key: str) -> list[str]:
    return [word for word in re.split(r"[.\[\]]+", key) if word]


def put(recipe: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one key of a recipe that is a mapping; ``where`` is what messages begin with."""
    parts: list[str | int] = [int(p) if p.isdecimal() and len(p) < 10 else p for p in _words(key)]
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
        elif isinstance(target[part], str):  # a model that is given by its path alone, or a word instead of a mapping
            is_model = part == "base" or isinstance(target, list)
            target[part] = {"model": target[part]} if is_model else {}
        target = target[part]
