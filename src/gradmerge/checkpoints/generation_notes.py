"""What lies beside the weights: notes where chat templates or defaults for generation differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..io.small_files import readable_json
from .checkpoint import Checkpoint
from .compat.config_diff import shown
from .tokenizer.chat_template import chat_templates, template_note

#: Keys of generation_config.json that say where it comes from.
PROVENANCE = {"transformers_version", "_from_model_config"}


def notes_on_files(first: Checkpoint, other: Checkpoint, settled: Sequence[str] = ()) -> Iterator[str]:
    """Differences in the files of two models, but for ``settled`` keys of the recipe; the result gets the first's."""
    if first.folder is None or other.folder is None or first.folder == other.folder:
        return
    ours, theirs = first.folder, other.folder
    note = template_note(other.label, chat_templates(theirs), first.label, chat_templates(ours))
    if "chat_template" not in settled and note is not None:
        yield note
    keys = _other_defaults(ours / "generation_config.json", theirs / "generation_config.json")
    if keys:
        some = ", ".join(keys[:6]) + (" …" if len(keys) > 6 else "")
        differ = f"{other.label}: its defaults for generation differ from those of {first.label}"
        yield f"{differ}, which the result has: {some}"


def _other_defaults(ours: Path, theirs: Path) -> list[str]:
    """The keys in which two generation configs differ, with both values."""
    here, there = readable_json(ours), readable_json(theirs)
    if here is None or there is None:
        return []
    keys = sorted((here.keys() | there.keys()) - PROVENANCE)
    keys = [key for key in keys if here.get(key) != there.get(key)]
    return [f"{key} {shown(here.get(key))} and {shown(there.get(key))}" for key in keys]
