"""Refusing model configs that would fetch and run code, read weights from elsewhere, or build endless layers."""

from __future__ import annotations

from typing import Any

from ..errors import InputError

#: The implementations that transformers has itself. Any other name is a repository of the Hub, whose code it would run.
IMPLEMENTATIONS = {
    "attn_implementation": ["eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4))],
    "experts_implementation": ["eager", "batched_mm", "grouped_mm"],
}
#: More layers than any model has; building a million of them takes hours.
MOST_LAYERS = 1000


def refuse_hub_code(config: Any, where: object) -> None:
    """Refuse the JSON of a config if any part of it names Hub code or a file of weights, or has endless layers."""
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            kind = key.removeprefix("_").removesuffix("_internal")
            if kind in IMPLEMENTATIONS:
                check_implementation(kind, value, f"{where}: {key}")
            elif key == "transformers_weights" and value is not None:
                named = f"{where}: {key} names a file of weights, {str(value)[:80]!r}"
                raise InputError(f"{named}. Remove the key: weights are read from model.safetensors.")
            elif isinstance(value, int) and value > MOST_LAYERS and key.endswith(("layer", "layers", "depth")):
                raise InputError(f"{where}: {key} is above {MOST_LAYERS}; that is no model")
            else:
                parts.append(value)


def check_implementation(kind: str, value: Any, where: str) -> None:
    """A name that transformers knows itself, or a mapping of parts of the model to such names."""
    if isinstance(value, dict):
        for part in value.values():
            check_implementation(kind, part, where)
    elif value is not None and value not in IMPLEMENTATIONS[kind]:
        raise InputError(
            f"{where}: {str(value)[:80]!r} is none of {', '.join(IMPLEMENTATIONS[kind])}. Code from the Hub is not run."
        )
