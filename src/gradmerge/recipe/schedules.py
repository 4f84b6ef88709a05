"""Numbers that may differ between the tensors of a model: over its layers, or by the names of its tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, PlainSerializer, WrapValidator

from .fields import RecipePart, WeightNumber

CASES = "[{filter: NAME, value: …}, …, {value: …}]"


class Case(RecipePart):
    """A value for the tensors that a filter fits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    filter: str | None = Field(
        None, description="A glob over tensor names, or a plain part of them; the last case has none."
    )
    value: Any = Field(description="A number, or a list over the layers.")

    def fits(self, name: str) -> bool:
        if self.filter is None:
            return True
        return fnmatch.fnmatchcase(name, self.filter) if is_glob(self.filter) else self.filter in name


def is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


Varying = float | tuple[float, ...] | tuple[Case, ...]
"""One number; some, spread over the layers from first to last; or cases, of which the first that fits a name counts."""


def varied(value: Any, check: Callable[[Any], Any]) -> Any:
    """A value that may be a list over the layers, or cases; ``check`` takes a single one."""
    if not isinstance(value, list | tuple):
        return check(value)
    if value and all(isinstance(item, dict | Case) for item in value):
        return tuple(_cases(value, check))
    if not value or any(isinstance(item, dict | Case | list | tuple) for item in value):
        raise ValueError(f"should be a number, a list of numbers over the layers, or cases {CASES}")
    return tuple(check(item) for item in value)


def _cases(items: Sequence[Any], check: Callable[[Any], Any]) -> Iterator[Case]:
    cases = [item if isinstance(item, Case) else Case.model_validate(item) for item in items]
    if any(case.filter is None for case in cases[:-1]):
        raise ValueError("a case without a filter takes all that is left, so that it is the last")
    if cases[-1].filter not in (None, "*"):
        raise ValueError("the last case should have no filter: its value is for the tensors that no filter fits")
    for case in cases:
        if isinstance(case.value, list | tuple) and any(isinstance(item, dict | Case) for item in case.value):
            raise ValueError(f"should be cases {CASES} with plain values, not with cases in them")
        yield Case(filter=case.filter, value=varied(case.value, check))


def leaves(value: Any) -> list[Any]:
    """Every single value in one that may vary."""
    if not isinstance(value, tuple):
        return [value]
    return [leaf for item in value for leaf in leaves(item.value if isinstance(item, Case) else item)]


def mapped(value: Any, change: Callable[[float], float]) -> Any:
    """A value with every single number in it changed."""
    if not isinstance(value, tuple):
        return change(value)
    each = ((item, mapped(item.value if isinstance(item, Case) else item, change)) for item in value)
    return tuple(Case(filter=item.filter, value=new) if isinstance(item, Case) else new for item, new in each)


def value_at(value: Any, name: str, position: float) -> Any:
    """What a tensor takes: of a list, what it has at a ``position`` from 0 (the first layer) to 1 (the last)."""
    if not isinstance(value, tuple):
        return value
    if isinstance(value[0], Case):
        return value_at(next(case.value for case in value if case.fits(name)), name, position)
    place = position * (len(value) - 1)
    first = int(place)
    part = place - first
    return (1 - part) * value[first] + part * value[min(first + 1, len(value) - 1)]


def spread_over_layers(value: Any) -> bool:
    """Whether a list over the layers is in a value."""
    if not isinstance(value, tuple):
        return False
    return any(spread_over_layers(item.value) if isinstance(item, Case) else True for item in value)


def in_words(value: Any) -> str:
    """A value as it is shown where there is room for a few words."""
    if isinstance(value, list):
        return " | ".join(map(in_words, value))
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if all(isinstance(item, str) for item in value):
        return " + ".join(value) or "nothing"
    if isinstance(value[0], Case):
        return "; ".join(f"{case.filter or 'else'}: {in_words(case.value)}" for case in value)
    return "(" + ", ".join(map(in_words, value)) + ") over the layers"


def plain(value: Any) -> Any:
    """As it is written in a recipe."""
    if isinstance(value, list):  # one for each model
        return list(map(plain, value))
    if not isinstance(value, tuple):
        return value
    cases = [item for item in value if isinstance(item, Case)]
    if not cases:
        return list(value)
    return [({"filter": c.filter} if c.filter is not None else {}) | {"value": plain(c.value)} for c in cases]


#: What makes a type of pydantic one that may vary over layers and by filters.
VARYING = (WrapValidator(varied), PlainSerializer(plain))

if TYPE_CHECKING:
    Weight = Varying
else:
    Weight = Annotated[WeightNumber, *VARYING]
