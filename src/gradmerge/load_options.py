"""How models and data are loaded: the options of every function and command that does so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from .errors import InputError


class LoadOptions(TypedDict, total=False):
    """How a model and its data are loaded: keywords of every function that does so, options of every such command."""

    task: Literal["auto", "classify", "causal-lm", "seq2seq", "image", "embedding"]
    """``auto`` is the task of the model's architecture."""
    columns: Mapping[str, str] | None
    """The columns of the data if their names are not common ones, such as `text=review,label=stars`. Keys: text,
    text2, label, prompt, completion, messages, source, target, image, anchor, positive, negative, score.
    Several columns are joined by +."""
    limit: int | None
    """The maximum number of rows of each data source."""
    batch_size: int
    """Rows per batch. It changes rounding only, except in `distill`."""
    max_length: int | None
    """Tokens after which a text is cut; by default what the model allows, at most 1024."""
    device: str
    """``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` is a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"]
    """Data type of the weights. ``auto``: as stored, but float32 for float16 on a CPU."""
    model_args: Mapping[str, Any] | None
    """How transformers loads the model: `attn_implementation=sdpa` (or eager, flash_attention_2, …) and
    `tokenizer=PATH`, a folder or Hub id, if it is not the model's. Estimates of curvature and `evaluate` also take:
    `device_map=auto`, which spreads layers over all GPUs, the CPU and the disk; `load_in_4bit=true` and
    `load_in_8bit=true`, which quantize the base of an adapter with bitsandbytes; and `gradient_checkpointing=true`."""


DEFAULTS = LoadOptions(
    task="auto",
    columns=None,
    limit=None,
    batch_size=8,
    max_length=None,
    device="auto",
    dtype="auto",
    model_args=None,
)


def parse_pairs(name: str, text: str) -> dict[str, Any]:
    """Parse `KEY=VALUE,…` from the command line. `true` and `false` become booleans. ``name`` is the option's."""
    result: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or not value:
            raise InputError(f"{name}: {text!r} is not KEY=VALUE,KEY=VALUE")
        if key in result:
            raise InputError(f"{name}: {key} is repeated in {text!r}")
        result[key] = {"true": True, "false": False}.get(value.lower(), value)
    return result
