"""Refuse model configs that run code from the Hub, read other weight files, or build too many layers."""

from __future__ import annotations

from typing import Any

from ..errors import InputError

#: The implementations in transformers. It takes any other name for a Hub repository and runs its code.
IMPLEMENTATIONS = {
    "attn_implementation": ["eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4))],
    "experts_implementation": ["eager", "batched_mm", "grouped_mm"],
}
#: Building a million layers takes hours.
MAX_LAYERS = 1000


def refuse_hub_code(config: Any, where: object) -> None:
    """Raise if any part of a config names Hub code or a weight file, or has too many layers."""
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
                raise InputError(
                    f"{where}: {key} names the weight file {str(value)[:80]!r}. Remove the key: gradmerge reads "
                    "model.safetensors."
                )
            elif isinstance(value, int) and value > MAX_LAYERS and key.endswith(("layer", "layers", "depth")):
                raise InputError(f"{where}: {key} is above the limit of {MAX_LAYERS}")
            else:
                parts.append(value)


def check_implementation(kind: str, value: Any, where: str) -> None:
    """Raise unless a value, or each value of a mapping, is an implementation in transformers."""
    if isinstance(value, dict):
        for part in value.values():
            check_implementation(kind, part, where)
    elif value is not None and value not in IMPLEMENTATIONS[kind]:
        raise InputError(
            f"{where}: {str(value)[:80]!r} is not one of {', '.join(IMPLEMENTATIONS[kind])}. gradmerge does not run "
            "code from the Hub."
        )
