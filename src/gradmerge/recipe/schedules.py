"""Numbers that differ between the tensors of a model: over its layers, or by tensor name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, PlainSerializer, WrapValidator

from .fields import RecipePart, WeightNumber

CASES = "[{filter: NAME, value: …}, …, {value: …}]"


class Case(RecipePart):
    """A value for the tensors that match a filter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    filter: str | None = Field(None, description="A glob or a substring of tensor names; the last case has no filter.")
    value: Any = Field(description="A number, or a list over the layers.")

    def fits(self, name: str) -> bool:
        """Return whether a tensor matches the filter."""
        if self.filter is None:
            return True
        return fnmatch.fnmatchcase(name, self.filter) if is_glob(self.filter) else self.filter in name


def is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


Varying = float | tuple[float, ...] | tuple[Case, ...]
"""A number; a list interpolated over the layers; or cases, of which the first that matches a tensor applies."""


def varied(value: Any, check: Callable[[Any], Any]) -> Any:
    """Validate a value that may be a list over the layers or cases; ``check`` validates a single number."""
    if not isinstance(value, list | tuple):
        return check(value)
    if not value or not all(isinstance(item, dict | Case) for item in value):
        if not value or any(isinstance(item, dict | Case | list | tuple) for item in value):
            raise ValueError(f"should be a number, a list of numbers over the layers, or cases {CASES}")
        return tuple(check(item) for item in value)
    cases = [item if isinstance(item, Case) else Case.model_validate(item) for item in value]
    if any(case.filter is None for case in cases[:-1]):
        raise ValueError("a case without a filter matches all tensors, so it must be the last")
    if cases[-1].filter not in (None, "*"):
        raise ValueError("the last case must have no filter: its value applies to the tensors that no filter matches")
    for case in cases:
        if isinstance(case.value, list | tuple) and any(isinstance(item, dict | Case) for item in case.value):
            raise ValueError(f"should be cases {CASES} with numbers or lists as values, not with other cases")
    return tuple(Case(filter=case.filter, value=varied(case.value, check)) for case in cases)


def leaves(value: Any) -> list[Any]:
    """Return every single number in a value."""
    if not isinstance(value, tuple):
        return [value]
    return [leaf for item in value for leaf in leaves(item.value if isinstance(item, Case) else item)]


def mapped(value: Any, change: Callable[[float], float]) -> Any:
    """Return a value with ``change`` applied to every single number."""
    if not isinstance(value, tuple):
        return change(value)
    return tuple(
        Case(filter=item.filter, value=mapped(item.value, change)) if isinstance(item, Case) else mapped(item, change)
        for item in value
    )


def value_at(value: Any, name: str, position: float) -> Any:
    """Return the number for a tensor at a ``position`` from 0 (first layer) to 1 (last layer)."""
    if not isinstance(value, tuple):
        return value
    if isinstance(value[0], Case):
        return value_at(next(case.value for case in value if case.fits(name)), name, position)
    exact = position * (len(value) - 1)
    first = int(exact)
    fraction = exact - first
    return (1 - fraction) * value[first] + fraction * value[min(first + 1, len(value) - 1)]


def in_words(value: Any) -> str:
    """Return a value as short text for tables and notes."""
    if isinstance(value, list):
        return " | ".join(map(in_words, value))
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if all(isinstance(item, str) for item in value):
        return " + ".join(value) or "nothing"
    if isinstance(value[0], Case):
        return "; ".join(f"{case.filter or 'else'}: {in_words(case.value)}" for case in value)
    return "(" + ", ".join(map(in_words, value)) + ") over the layers"


def plain(value: Any) -> Any:
    """Return a value as lists and mappings, as a recipe file has it."""
    if isinstance(value, Case):
        return ({} if value.filter is None else {"filter": value.filter}) | {"value": plain(value.value)}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


#: Annotations that let a number vary over layers and by filters.
VARYING = (WrapValidator(varied), PlainSerializer(plain))

if TYPE_CHECKING:
    Weight = Varying
else:
    Weight = Annotated[WeightNumber, *VARYING]
