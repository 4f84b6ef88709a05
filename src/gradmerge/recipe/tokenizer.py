"""The vocabulary of a result: whose it is, and where the rows of single tokens come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .fields import RecipePart, as_text

#: Stands for a row of zeros; a folder of that name is ./zero.
ZERO = "zero"


class ModelToken(RecipePart):
    """The row of one token of one model."""

    kind: Literal["model_token"] = "model_token"
    model: str
    token: str | None = None
    token_id: Annotated[int, Field(ge=0)] | None = None


def _source(value: Any) -> Any:
    value = as_text(value)
    if value is None or isinstance(value, str | ModelToken):
        return value
    if isinstance(value, Mapping):
        if value.get("kind") == ZERO and len(value) == 1:
            return ZERO
        one = [key for key in ("token", "token_id") if value.get(key) is not None]
        if "model" in value and len(one) == 1 and value.keys() <= {"kind", "model", "token", "token_id"}:
            return value
    raise ValueError("should be a model of the recipe, zero, or a model's token as {model: M, token: T} or token_id")


class TokenRule(RecipePart):
    """Where the rows of one token come from."""

    source: Annotated[str | ModelToken | None, BeforeValidator(_source)] = Field(
        None, description="A model, `zero`, or one token of a model: for every model that does not have the token."
    )
    force: bool = Field(False, description="Also for models that have the token.")


def _rule(value: Any) -> Any:
    """A source alone is short for a rule."""
    is_rule = isinstance(value, Mapping) and (value.keys() <= {"source", "force"})
    return value if is_rule or isinstance(value, TokenRule) else {"source": value}


class TokenizerChoice(RecipePart):
    """The vocabulary of the result."""

    source: str = Field("union", description="`base`, `union`, or a model of the recipe.")
    tokens: dict[str, Annotated[TokenRule, BeforeValidator(_rule)]] = Field(
        {},
        description="Tokens, each with where its rows come from, for models that do not have it (all of them with "
        "`force: true`): a model, `zero`, or `{model: M, token: T}`. Tokens that the vocabulary lacks are added.",
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None, description="Rows are added until their number is a multiple of this."
    )


def _choice(value: Any) -> Any:
    value = as_text(value)
    if isinstance(value, str):
        return {"source": value}
    if value is not None and not isinstance(value, Mapping | TokenizerChoice):
        raise ValueError("should be base, union, a model, or {source: …, tokens: {TOKEN: …}, pad_to_multiple_of: N}")
    return value


#: A source alone is short for a choice.
Tokenizer = Annotated[TokenizerChoice, BeforeValidator(_choice)]
