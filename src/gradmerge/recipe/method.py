"""The method of a recipe: rules from Python files (`method: ./my_rule.py`), and validation of options."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, Field, ValidationError, create_model

from ..errors import InputError
from ..rules import METHODS, Rule
from ..rules.spec import Option, OrNone
from ..urls import is_url
from .fields import NONE, Number, RecipePart, explain, number_or
from .schedules import VARYING


def is_rule_file(method: Any) -> TypeGuard[str]:
    """Return whether a recipe's `method` is a Python file and not a name."""
    return isinstance(method, str) and method.endswith(".py")


def load_rule(method: str, folder: Path, *, allow_code: bool) -> Rule:
    """Run a Python file that defines one rule with @rule, and add the rule to METHODS.

    The rule knows the path as written (``file``) and the SHA-256 of the file's content (``digest``).
    """
    path = Path(method).expanduser()
    if is_url(method) or (is_url(folder) and not path.is_absolute()):
        raise InputError(f"method: {method}: a rule must be a file on this machine, not at a URL")
    path = folder / path
    if not allow_code:
        raise InputError(
            f"method: {method} is Python code that the merge would run. Read {path}; if you trust it, set "
            "allow_code=True"
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"method: {path}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(source).hexdigest()
    module = ModuleType(f"gradmerge_rule_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise InputError(f"method: {where}: {type(error).__name__}: {error}") from error
    values = {id(value): value for value in vars(module).values() if isinstance(value, Rule)}
    rules = [rule for rule in values.values() if rule.function.__module__ == module.__name__]
    if len(rules) != 1:
        names = f" ({', '.join(rule.name for rule in rules)})" if rules else ""
        raise InputError(f"method: {path}: defines {len(rules)} rules{names}; it must define one function with @rule")
    try:
        return METHODS.add(replace(rules[0], file=method, digest=digest))
    except Exception as error:  # also from evaluating the annotations of the file
        raise InputError(f"method: {path}: {error}") from error


def check_options(
    rule: Rule,
    options: Mapping[str, Any],
    model_options: Sequence[Mapping[str, Any]] = (),
    where: str = "models[{}].options",
) -> dict[str, Any]:
    """Return the validated options of a rule with defaults filled in.

    An option that ``model_options`` sets for a model becomes a list with one value per model. ``where`` names the
    options of model number {} in errors.
    """
    checked = _validated(rule, options, "options")
    per_model = [option.name for option in rule.options if option.help.per_model]
    for number, of_model in enumerate(model_options):
        for name in of_model:
            if name not in per_model and name in checked:
                allowed = f"; these can: {', '.join(per_model)}" if per_model else ""
                raise InputError(f"{where.format(number)}.{name}: cannot be set per model for {rule.name}{allowed}")
    each = [
        _validated(rule, {**options, **of_model}, where.format(number)) for number, of_model in enumerate(model_options)
    ]
    for name in per_model:
        if any(name in of_model for of_model in model_options):
            checked[name] = [values[name] for values in each]
    return checked


def _validated(rule: Rule, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    model = _options_model(rule.name, rule.options)
    try:
        values = model.model_validate(dict(options))
    except ValidationError as error:
        raise InputError(explain(error, where, model, rule=rule.name)) from None
    return {name: getattr(values, name) for name in model.model_fields}


@cache
def _options_model(name: str, options: tuple[Option, ...]) -> type[BaseModel]:
    """Return a pydantic model with one field per option."""
    fields: dict[str, Any] = {}
    for option in options:
        default = ... if option.required else option.default
        limits: dict[str, Any] = {"ge": option.help.ge, "gt": option.help.gt, "le": option.help.le}
        kind = Number if option.type is float else option.type
        if option.type == OrNone:
            kind, limits = Annotated[OrNone, number_or(NONE, option.help.ge or 0, option.help.le)], {}
        varying = VARYING if option.type is float else ()
        fields[option.name] = (Annotated[kind, Field(**limits), *varying], Field(default, description=option.help.text))
    return create_model(f"Options of {name}", __base__=RecipePart, **fields)
