"""Notes on models whose chat templates or generation defaults differ."""

from __future__ import annotations

from collections.abc import Iterator

from ..io.small_files import readable_json
from .checkpoint import Checkpoint
from .compat.config_diff import abbreviate
from .tokenizer.chat_template import template_note

#: Keys of generation_config.json that do not change what is generated.
IRRELEVANT = {"transformers_version", "_from_model_config"}


def generation_notes(first: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """Yield a note for each difference."""
    if first.folder is None or other.folder is None or first.folder == other.folder:
        return
    if (note := template_note(first, other)) is not None:
        yield note
    defaults = readable_json(first.folder / "generation_config.json")
    other_defaults = readable_json(other.folder / "generation_config.json")
    if defaults is None or other_defaults is None:
        return
    keys = sorted((defaults.keys() | other_defaults.keys()) - IRRELEVANT)
    differences = [
        f"{key} {abbreviate(defaults.get(key))} and {abbreviate(other_defaults.get(key))}"
        for key in keys
        if defaults.get(key) != other_defaults.get(key)
    ]
    if differences:
        listed = ", ".join(differences[:6]) + (" …" if len(differences) > 6 else "")
        yield f"the generation defaults of {first.label} and {other.label} differ ({listed}); the result has the former"
