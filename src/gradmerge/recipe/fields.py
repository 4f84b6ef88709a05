"""Types of recipe values (numbers, sizes, curvature), and messages for invalid ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from ..text import nearest, parse_size

SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of weights, damping and options: products with curvature and weights then fit float64."""

NONE = "none"
"""The word for no penalty; a folder of that name is ./none."""


def _check_weight(value: float) -> float:
    if value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        raise ValueError(f"a weight must be 0 or a finite number from {SMALLEST:g} to {LARGEST:g} in size")
    return value


def _check_number(value: float) -> float:
    if not abs(value) <= LARGEST:
        raise ValueError(f"should be a finite number, at most {LARGEST:g} in size")
    return value


def number_or(word: str, low: float, high: float | None = None) -> PlainValidator:
    """Validate a number in a range or one word, with one message for both."""
    most = LARGEST if high is None else high

    def validate(value: Any) -> Any:
        if value == word:
            return word
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not low <= number <= most:
            raise ValueError(f"should be a finite number from {low:g} to {most:g}, or {word}")
        return number

    return PlainValidator(validate, json_schema_input_type=float | Literal[word])


WeightNumber = Annotated[float, AfterValidator(_check_weight)]
Number = Annotated[float, AfterValidator(_check_number)]
Size = Annotated[int, BeforeValidator(parse_size)]


class RecipePart(BaseModel):
    """A mapping of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class Identity(RecipePart):
    """Curvature c · I."""

    identity: Annotated[Number, Field(ge=0, description="The number c; `reduction` does not change it.")]


class MeanTimes(RecipePart):
    """Read curvature files as N times the mean over their examples."""

    mean_times: Annotated[Number, Field(ge=SMALLEST, description="The number N.")]

    def __str__(self) -> str:
        return f"{self.mean_times:g} · mean"


def _check_reduction(value: Any) -> Any:
    if not isinstance(value, Mapping | MeanTimes) and value not in ("sum", "mean"):
        raise ValueError("should be sum, mean or {mean_times: N}")
    return value


Reduction = Annotated[Literal["sum", "mean"] | MeanTimes, BeforeValidator(_check_reduction)]


def reduction_factor(reduction: str | MeanTimes, examples: int) -> float:
    """Return the factor of a sum over examples: 1, 1/examples for the mean, or N/examples."""
    if reduction == "sum":
        return 1.0
    return (reduction.mean_times if isinstance(reduction, MeanTimes) else 1.0) / examples


def as_text(value: Any) -> Any:
    """Return a path as text, and anything else unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _lower_none(value: Any) -> Any:
    return NONE if isinstance(value, str) and value.lower() == NONE else value


Reference = Annotated[str, BeforeValidator(as_text)]
CurvatureSource = Reference | Identity
PenaltySource = Annotated[CurvatureSource, BeforeValidator(_lower_none)]


#: Types of values that pydantic adds to the key of a mistake.
TYPES = ("str", "Identity", "MeanTimes", "ModelToken")


def explain(error: ValidationError, where: str, model: type[BaseModel], rule: str = "") -> str:
    """Return a message with every mistake on its own line: key, problem, and the nearest known key."""
    lines = []
    for item in error.errors():
        key = _dotted(item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            of_rule = f" of {rule}" if rule else ""
            near = nearest(str(item["loc"][-1]), known)
            lines.append(f"{key}: unknown key{of_rule}{near}; known are {', '.join(known) or 'none'}")
        elif item["type"] == "missing":
            lines.append(f"{key}: is missing")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            value = repr(item.get("input"))
            lines.append(f"{key}: {message}, but it is {value if len(value) < 60 else value[:57] + '…'}")
    lines = list(dict.fromkeys(lines))
    return f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n  " + "\n  ".join(lines)


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return the key of a mistake, such as `models[0].weight`, without the type names that pydantic adds."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in TYPES and not part.startswith(("literal[", "function-")):
            text += f".{part}" if text else part
    return text or "recipe"


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the mapping at a location in a recipe."""
    inside = [model]
    for part in loc:
        if part in model.model_fields:
            inside = list(_models_in(model.model_fields[str(part)].annotation))
        named = [candidate for candidate in inside if candidate.__name__ == part]
        model = next(iter(named or inside), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
