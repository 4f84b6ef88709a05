"""The key `tokenizer` of a recipe: the vocabulary of the result, and the sources of single rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .fields import RecipePart, as_text

ZERO = "zero"
"""A row of zeros. A folder of that name is ./zero."""


class ModelToken(RecipePart):
    """The row of one token of one model."""

    kind: Literal["model_token"] = "model_token"
    model: str
    token: str | None = None
    token_id: Annotated[int, Field(ge=0)] | None = None


def _check_source(value: Any) -> Any:
    value = as_text(value)
    if value is None or isinstance(value, str | ModelToken):
        return value
    if isinstance(value, Mapping):
        if value == {"kind": ZERO}:
            return ZERO
        has_one = (value.get("token") is None) != (value.get("token_id") is None)
        if "model" in value and has_one and value.keys() <= {"kind", "model", "token", "token_id"}:
            return value
    raise ValueError("should be a model of the recipe, zero, {model: M, token: T} or {model: M, token_id: N}")


class TokenRule(RecipePart):
    """The source of the row of one token."""

    source: Annotated[str | ModelToken | None, BeforeValidator(_check_source)] = Field(
        None, description="A model, `zero`, or a token of a model. Used for every model that lacks the token."
    )
    force: bool = Field(False, description="Also use it for models that have the token.")


def _source_as_rule(value: Any) -> Any:
    is_rule = isinstance(value, TokenRule) or (isinstance(value, Mapping) and value.keys() <= {"source", "force"})
    return value if is_rule else {"source": value}


class TokenizerChoice(RecipePart):
    """The vocabulary of the result."""

    source: str = Field("union", description="`base`, `union`, or a model of the recipe.")
    tokens: dict[str, Annotated[TokenRule, BeforeValidator(_source_as_rule)]] = Field(
        {},
        description="Token → source of its row: a model, `zero`, or `{model: M, token: T}`. Used for models that lack "
        "the token, and with `force: true` for all models. Tokens that the vocabulary lacks are added.",
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None, description="Add rows until their number is a multiple of this."
    )


def _source_as_choice(value: Any) -> Any:
    value = as_text(value)
    if isinstance(value, str):
        return {"source": value}
    if value is not None and not isinstance(value, Mapping | TokenizerChoice):
        raise ValueError("should be base, union, a model, or {source: …, tokens: {TOKEN: …}, pad_to_multiple_of: N}")
    return value


Tokenizer = Annotated[TokenizerChoice, BeforeValidator(_source_as_choice)]
"""A choice, or only its source."""
