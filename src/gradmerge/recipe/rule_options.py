"""The options of a method, checked against the signature of its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, create_model

from ..errors import InputError
from ..rules import Rule
from ..rules.spec import Option, OrNone
from .fields import NONE, Number, RecipePart, number_or
from .schedules import VARYING
from .validation_errors import explain


def check_options(
    rule: Rule, options: Mapping[str, Any], own: Sequence[Mapping[str, Any]] = (), where: str = "models[{}].options"
) -> dict[str, Any]:
    """The options of a rule, checked, with defaults filled in.

    ``own`` are those of every model. An option that one of them has becomes a list, with a value for each model.
    """
    checked = _validated(rule, options, "options")
    varies = [option.name for option in rule.options if option.help.per_model]
    for place, given in enumerate(own):
        for name in given:
            if name not in varies and name in checked:
                may = f"; those that may are {', '.join(varies)}" if varies else ""
                raise InputError(f"{where.format(place)}.{name}: does not differ between models in {rule.name}{may}")
    each = [_validated(rule, {**options, **given}, where.format(place)) for place, given in enumerate(own)]
    for name in varies:
        if any(name in given for given in own):
            checked[name] = [values[name] for values in each]
    return checked


def _validated(rule: Rule, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    model = _options_model(rule.name, rule.options)
    try:
        found = model.model_validate(dict(options))
    except ValidationError as error:
        raise InputError(explain(error, where, model, rule=rule.name)) from None
    return {name: getattr(found, name) for name in model.model_fields}


@cache
def _options_model(name: str, options: tuple[Option, ...]) -> type[BaseModel]:
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
