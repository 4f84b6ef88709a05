"""The values that a recipe is made of: numbers, sizes, curvature, and how it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from ..text import parse_size

#: Bounds of weights, damping and options other than 0: their products with any curvature and model then fit float64.
SMALLEST, LARGEST = 1e-30, 1e30


def _check_weight(value: float) -> float:
    if value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        raise ValueError(f"a weight is a finite number: 0, or from {SMALLEST:g} to {LARGEST:g} in size")
    return value


def _check_number(value: float) -> float:
    if not abs(value) <= LARGEST:
        raise ValueError(f"should be a finite number, at most {LARGEST:g} in size")
    return value


def number_or(word: str, low: float, high: float | None = None) -> PlainValidator:
    """A number in a range, or one word: said in one message, where a union of types would make two."""
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
    model_config = ConfigDict(extra="forbid", validate_default=True)


class Identity(RecipePart):
    """Curvature that is the same number for every entry: c · I."""

    identity: Annotated[Number, Field(ge=0, description="The number c; not divided by any count.")]


class MeanTimes(RecipePart):
    """Curvature files as N times the mean over their examples."""

    mean_times: Annotated[Number, Field(ge=SMALLEST, description="The number N that every mean is multiplied by.")]

    def __str__(self) -> str:
        return f"{self.mean_times:g} · mean"


def _check_reduction(value: Any) -> Any:
    if not isinstance(value, Mapping | MeanTimes) and value not in ("sum", "mean"):
        raise ValueError("should be sum, mean or {mean_times: N}")
    return value


Reduction = Annotated[Literal["sum", "mean"] | MeanTimes, BeforeValidator(_check_reduction)]


def reduction_factor(reduction: str | MeanTimes, examples: int) -> float:
    """What a sum over examples is multiplied by: 1, 1/examples for the mean, or N/examples."""
    if reduction == "sum":
        return 1.0
    return (reduction.mean_times if isinstance(reduction, MeanTimes) else 1.0) / examples


def as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _or_none(value: Any) -> Any:
    return NONE if isinstance(value, str) and value.lower() == NONE else value


#: Stands for no penalty; a folder of that name is ./none.
NONE = "none"
Reference = Annotated[str, BeforeValidator(as_text)]
CurvatureSource = Reference | Identity
PenaltySource = Annotated[CurvatureSource, BeforeValidator(_or_none)]
