"""Build recipes from command-line arguments."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, load_recipe, make_recipe
from ..recipe.load import MAX_BYTES, recipe_of_text
from ..recipe.method import is_rule_file, load_rule
from ..recipe.overrides import apply_settings
from ..yaml import parse_yaml


def split_weight(text: str) -> tuple[str, float]:
    """Split `path=0.3` into path and weight (default 1). A text that exists as a path is a path, even with = in it."""
    path, equals, number = text.rpartition("=")
    if equals and not Path(text).exists():
        with contextlib.suppress(ValueError):
            return path, float(number)
    return text, 1.0


def from_options(method: str, base: str | None, models: Sequence[str], curvature: Sequence[str]) -> dict[str, Any]:
    """Return a recipe as a mapping, from --method, --base, --model and --curvature."""
    tuned = [{"model": path, "weight": weight} for path, weight in map(split_weight, models)]
    recipe: dict[str, Any] = {"method": method, "models": tuned}
    if base is not None:
        recipe["base"] = {"model": base}
    _assign_curvature(recipe, curvature)
    return recipe


def _assign_curvature(recipe: dict[str, Any], values: Sequence[str]) -> None:
    """Assign `base=PATH` and `MODEL=PATH` by name, and plain paths in order, the base first if there are enough."""
    models: list[dict[str, Any]] = recipe["models"]
    by_name = {m["model"]: m for m in models} | ({"base": recipe["base"]} if "base" in recipe else {})
    plain: list[str] = []
    for value in values:
        name, equals, path = value.partition("=")
        if equals and name in by_name:
            by_name[name]["curvature"] = _source(path)
        else:
            plain.append(value)
    if not plain:
        return
    targets = [m for m in models if "curvature" not in m]
    if "base" in recipe and len(plain) == len(targets) + 1:
        targets = [recipe["base"], *targets]
    if len(plain) != len(targets):
        raise InputError(
            f"--curvature: {len(plain)} for {len(models)} models. Give one for the base and one for each --model "
            "in order, or name them: --curvature base=PATH --curvature MODEL=PATH"
        )
    for target, path in zip(targets, plain, strict=True):
        target["curvature"] = _source(path)


def _source(text: str) -> Any:
    """Return a path, or the mapping that `identity:1.0` stands for."""
    match = re.fullmatch(r"identity[:=](.+)", text)
    return {"identity": parse_yaml(match[1], "--curvature")} if match else text


def read_recipe(path: str | Path, allow_code: bool = False) -> Recipe:
    """Load a recipe file, or for `-` standard input, whose relative paths start in the working folder."""
    if str(path) != "-":
        return load_recipe(path, allow_code=allow_code)
    stream = getattr(sys.stdin, "buffer", None)  # None if standard input is closed
    try:
        raw = b"" if stream is None else stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"standard input: cannot be read: {error.strerror}") from error
    return recipe_of_text(raw, Path(), "standard input", allow_code=allow_code)


def build_recipe(
    source: Path | dict[str, Any], settings: Sequence[str], method: str | None = None, allow_code: bool = False
) -> Recipe:
    """Return the recipe of a command: a file with changes from options, or a mapping made of options."""
    if isinstance(source, dict):
        if is_rule_file(source["method"]):
            source["method"] = load_rule(source["method"], Path(), allow_code=allow_code).name
        apply_settings(source, settings)
        return make_recipe(source, where="command line", allow_code=allow_code)
    loaded = read_recipe(source, allow_code)
    if not settings and method is None:
        return loaded
    raw = loaded.model_dump(mode="json", exclude_unset=True)
    if is_rule_file(method):
        raw["method"] = load_rule(str(Path(method).absolute()), Path(), allow_code=allow_code).name
    elif method is not None:
        raw["method"] = method
    apply_settings(raw, settings)
    where = "standard input" if loaded.file is None else source
    where = f"{where} with changes from the command line"
    return make_recipe(raw, folder=source.parent, where=where, allow_code=allow_code).with_origin(loaded)
