"""Validate the options of a method against the signature of its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, create_model

from ..errors import InputError
from ..rules import Rule
from ..rules.spec import Option, OrNone
from .fields import NONE, Number, RecipePart, explain, number_or
from .schedules import VARYING


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
    each = [_validated(rule, {**options, **own}, where.format(number)) for number, own in enumerate(model_options)]
    for name in per_model:
        if any(name in own for own in model_options):
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
    """A pydantic model with one field per option."""
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
