"""What lies beside the weights: notes where tokenizers, chat templates or defaults for generation differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.smallfile import MAX_CONFIG, MAX_TOKENIZER, read_bounded, read_json
from .configs import shown
from .model import Checkpoint

#: Keys of generation_config.json that say where it comes from.
PROVENANCE = {"transformers_version", "_from_model_config"}


def notes_on_files(first: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """Differences in the files of two models; the result gets those of the first."""
    if first.folder is None or other.folder is None or first.folder == other.folder:
        return
    ours, theirs = first.folder, other.folder
    if _other_rows(ours / "tokenizer.json", theirs / "tokenizer.json"):
        found = f"{other.label}: its tokenizer maps words to other rows than that of {first.label}"
        yield f"{found}; unless you know why, the merged embeddings will be garbage"
    here, there = _chat_template(ours), _chat_template(theirs)
    if here != there and None not in (here, there):
        what = "its chat template is not that of" if here and there else "it has a chat template, unlike"
        pair = (other, first) if there else (first, other)
        none = "" if here else ": none"
        yield f"{pair[0].label}: {what} {pair[1].label}; the result has that of {first.label}{none}"
    keys = _other_defaults(ours / "generation_config.json", theirs / "generation_config.json")
    if keys:
        some = ", ".join(keys[:6]) + (" …" if len(keys) > 6 else "")
        differ = f"{other.label}: its defaults for generation differ from those of {first.label}"
        yield f"{differ}, which the result has: {some}"


def _other_rows(ours: Path, theirs: Path) -> bool:
    """Whether both have a tokenizer and give some token different ids: merged embeddings would be garbage."""
    if not (ours.is_file() and theirs.is_file()):
        return False
    here, there = (read_bounded(path, MAX_TOKENIZER) for path in (ours, theirs))
    return here != there and _vocabulary(here) != _vocabulary(there)


def _vocabulary(tokenizer: bytes) -> object:
    try:
        return json.loads(tokenizer)["model"]["vocab"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _chat_template(folder: Path) -> str | None:
    """The chat template of a folder, as text: empty where its tokenizer has none, None where there is no tokenizer."""
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return read_bounded(plain, MAX_CONFIG).decode(errors="replace").strip()
    config = _json(folder / "tokenizer_config.json")
    if config is None:
        return None
    template = config.get("chat_template")
    return template.strip() if isinstance(template, str) else json.dumps(template) if template else ""


def _other_defaults(ours: Path, theirs: Path) -> list[str]:
    """The keys in which two generation configs differ, with both values."""
    here, there = _json(ours), _json(theirs)
    if here is None or there is None:
        return []
    keys = sorted((here.keys() | there.keys()) - PROVENANCE)
    keys = [key for key in keys if here.get(key) != there.get(key)]
    return [f"{key} {shown(here.get(key))} and {shown(there.get(key))}" for key in keys]


def _json(path: Path) -> dict[str, Any] | None:
    """A small JSON object; None where there is none, or it cannot be read."""
    try:
        return read_json(path) if path.is_file() else None
    except InputError:
        return None
