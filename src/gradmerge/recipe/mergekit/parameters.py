"""The parameters of mergekit's recipes: one value, a list over the layers, or cases by filter, at several levels."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from typing import Any

from ...rules.spec import Help
from ..schedules import is_glob
from ..yaml_values import YamlValue
from .methods import REQUIRED, Parameter


def resolved(parameter: Parameter, levels: Sequence[YamlValue], limits: Help | None) -> Any:
    """The value of a parameter, as recipes of ours have it; None where no level gives it to every tensor.

    For each tensor the first of the levels that has a value for it counts, and then the default. ``limits`` are those
    of the option here.
    """
    cases: list[dict[str, Any]] = []
    for level in levels:
        setting = level.get(parameter.name)
        for filter_, place in () if setting is None else _conditions(setting):
            value = _converted(parameter, place, limits)
            if filter_ is None:
                return [*cases, {"value": value}] if cases else value
            if parameter.kind is not float:
                raise place.fail(f"{parameter.name}: filters are only supported for numbers")
            # A filter of mergekit's is a part of a name, whatever is in it.
            text = f"*{glob.escape(filter_)}*" if is_glob(filter_) else filter_
            cases.append({"filter": text, "value": value})
    if parameter.default is REQUIRED:
        return None
    default = parameter.words.get(parameter.default, parameter.default)
    return [*cases, {"value": default}] if cases else default


def _conditions(setting: YamlValue) -> Iterator[tuple[str | None, YamlValue]]:
    """Filters, None for everything, and the values behind them."""
    value = setting.value
    if isinstance(value, dict):
        items = [setting]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = list(setting)
    else:
        if value != []:
            yield None, setting
        return
    for item in items:
        item.mapping()
        if item.get("value") is None or set(item.keys) - {"filter", "value"}:
            raise item.fail(f"{setting.name}: should have a `value` and a `filter`, but it is {item.shown}")
        filter_ = item.get("filter")
        text = "*" if filter_ is None else filter_.text() if filter_.value != "" else "*"
        yield None if text == "*" else text, item.at("value")


def _converted(parameter: Parameter, place: YamlValue, limits: Help | None) -> Any:
    """A value, or a list of them over the layers, by the type that a parameter has."""

    def one(place: YamlValue) -> Any:
        kinds = {float: place.number, int: place.whole, bool: place.truth}
        value = kinds[parameter.kind]()
        if limits is not None and parameter.kind is not bool:
            low, above, high = limits.ge, limits.gt, limits.le
            if (low is not None and value < low) or (above is not None and value <= above):
                raise place.fail(f"{parameter.name}: {value:g} is too small for {parameter.option} here")
            if high is not None and value > high:
                raise place.fail(f"{parameter.name}: {value:g} is above {high:g}, the most that is possible here")
        return parameter.words.get(value, value)

    if not isinstance(place.value, list):
        return one(place)
    values = [one(item) for item in place.sequence()]
    if all(value == values[0] for value in values):
        return values[0]
    if parameter.kind is not float:
        raise place.fail(f"{parameter.name}: a list over the layers is only supported for numbers")
    return values
