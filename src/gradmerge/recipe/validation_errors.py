"""What is wrong with a recipe, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..text import nearest

#: More mistakes than this are only counted.
MOST_LINES = 20


def explain(error: ValidationError, where: str, model: type[BaseModel], rule: str = "") -> str:
    """Every mistake on a line of its own: where it is, what is wrong, and the nearest known key."""
    lines = []
    for item in error.errors():
        place = _place(item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            of_rule = f" of {rule}" if rule else ""
            key = str(item["loc"][-1])
            lines.append(f"{place}: unknown key{of_rule}{nearest(key, known)}; known are {', '.join(known) or 'none'}")
        elif item["type"] == "missing":
            lines.append(f"{place}: is missing")
        else:
            shown = _shown(item.get("input"))
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            lines.append(f"{place}: {message}, but it is {shown}")
    lines = list(dict.fromkeys(lines))
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    return f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n  " + "\n  ".join(lines)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) < 60 else text[:57] + "…"


def _place(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "Identity", "MeanTimes", "ModelToken") and not part.startswith(
            ("literal[", "function-")
        ):
            text += f".{part}" if text else part
    return text or "recipe"


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the part of a recipe that a place is in."""
    inside = [model]
    for part in loc:
        if part in model.model_fields:
            inside = list(_parts_of(model.model_fields[str(part)].annotation))
        named = [found for found in inside if found.__name__ == part]
        model = next(iter(named or inside), model)
    return list(model.model_fields)


def _parts_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The parts of recipes in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts_of(inner)
