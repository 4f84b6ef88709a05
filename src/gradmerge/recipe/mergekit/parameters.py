"""Resolve a parameter of a mergekit recipe: a value, a list over the layers, or cases by filter, at several levels."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from typing import Any

from ...rules.spec import Help
from ..schedules import is_glob
from .methods import REQUIRED, Parameter
from .yaml_values import YamlValue


def resolve(parameter: Parameter, levels: Sequence[YamlValue], limits: Help | None) -> Any:
    """Return the value of a parameter for a gradmerge recipe, or None if some tensors would have no value.

    A tensor takes the value of the first level that has one for it, else the default.

    Args:
        parameter: The parameter.
        levels: `parameters` of the recipe, from the highest precedence to the lowest.
        limits: Range of the option.
    """
    cases: list[dict[str, Any]] = []
    for level in levels:
        setting = level.get(parameter.name)
        for filter_, item in () if setting is None else _cases(setting):
            value = _convert(parameter, item, limits)
            if filter_ is None:
                return [*cases, {"value": value}] if cases else value
            if parameter.kind is not float:
                raise item.fail(f"{parameter.name}: filters are only supported for numbers")
            # A filter of mergekit is a substring, so glob characters are escaped.
            cases.append({"filter": f"*{glob.escape(filter_)}*" if is_glob(filter_) else filter_, "value": value})
    if parameter.default is REQUIRED:
        return None
    default = parameter.values.get(parameter.default, parameter.default)
    return [*cases, {"value": default}] if cases else default


def _cases(setting: YamlValue) -> Iterator[tuple[str | None, YamlValue]]:
    """Yield (filter, value); the filter is None for a value that applies to all tensors."""
    value = setting.value
    if value == []:
        return
    if isinstance(value, dict):
        items = [setting]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = list(setting)
    else:
        yield None, setting
        return
    for item in items:
        item.mapping()
        if item.get("value") is None or set(item.keys) - {"filter", "value"}:
            raise item.fail(f"{setting.name}: should have a `value` and a `filter`, but it is {item.shown}")
        filter_ = item.get("filter")
        yield None if filter_ is None or filter_.value in ("", "*") else filter_.text(), item.at("value")


def _convert(parameter: Parameter, setting: YamlValue, limits: Help | None) -> Any:
    """Return a value, or a list of values over the layers, in the type of the parameter."""
    if not isinstance(setting.value, list):
        return _convert_one(parameter, setting, limits)
    values = [_convert_one(parameter, item, limits) for item in setting.sequence()]
    if all(value == values[0] for value in values):
        return values[0]
    if parameter.kind is not float:
        raise setting.fail(f"{parameter.name}: a list over the layers is only supported for numbers")
    return values


def _convert_one(parameter: Parameter, setting: YamlValue, limits: Help | None) -> Any:
    if parameter.kind is bool:
        value: Any = setting.truth()
        return parameter.values.get(value, value)
    value = setting.whole() if parameter.kind is int else setting.number()
    if limits is not None:
        if (limits.ge is not None and value < limits.ge) or (limits.gt is not None and value <= limits.gt):
            raise setting.fail(f"{parameter.name}: {value:g} is too small for {parameter.option}")
        if limits.le is not None and value > limits.le:
            raise setting.fail(f"{parameter.name}: {value:g} is too large; the maximum is {limits.le:g}")
    return value
