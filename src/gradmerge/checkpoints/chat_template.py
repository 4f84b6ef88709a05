"""Chat templates: read them from a model's folder, compare them, and write them to the result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError
from ..io.small_files import MAX_CONFIG, lies_within, read_bounded, read_json, readable_json
from ..text import to_json
from .checkpoint import Checkpoint, folders_of

TEMPLATE_FILE = "chat_template.jinja"
#: Files that hold only templates. Processors of older versions have the second; the first replaces it.
TEMPLATE_PATTERNS = (TEMPLATE_FILE, "chat_template.json", "additional_chat_templates/*.jinja")


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder: "" if its tokenizer has none, None if it has no tokenizer.

    As in transformers, the template file comes before tokenizer_config.json. Of several templates it is the default.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file() and lies_within(path, folder):
        return read_bounded(path, MAX_CONFIG).decode(errors="replace")
    config = readable_json(folder / "tokenizer_config.json")
    if config is None:
        return None
    stored = config.get("chat_template")
    for entry in stored if isinstance(stored, list) else ():
        if isinstance(entry, Mapping) and entry.get("name") == "default":
            stored = entry.get("template")
    return stored if isinstance(stored, str) and stored.strip() else ""


def chat_template_of(checkpoint: Checkpoint) -> str | None:
    """Return the chat template of a model; for an adapter without one, that of its base."""
    stored = [text for folder in folders_of(checkpoint) if (text := read_chat_template(folder)) is not None]
    return next(filter(None, stored), stored[0] if stored else None)


def template_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that :func:`chat_template_of` depends on."""
    paths = (folder / name for folder in folders_of(checkpoint) for name in (TEMPLATE_FILE, "tokenizer_config.json"))
    return [path for path in paths if path.is_file()]


def template_notes(first: Checkpoint, other: Checkpoint) -> list[str]:
    """Return a note if the chat templates of two models differ."""
    ours, theirs = chat_template_of(first), chat_template_of(other)
    if ours is None or theirs is None or ours.strip() == theirs.strip():
        return []
    difference = "differs from" if theirs else "is missing, unlike"
    return [
        f"{other.label}: its chat template {difference} that of {first.label}. The result has the base's, unless "
        "`chat_template` or `tokenizer` in the recipe selects another"
    ]


def parse_template(text: str, where: str) -> str:
    """Return a template after checking its Jinja syntax."""
    from jinja2 import Environment, TemplateSyntaxError

    if not text.strip():
        raise InputError(f"{where}: the chat template is empty")
    # transformers adds this tag to Jinja; it marks the text of the assistant.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
    except (TemplateSyntaxError, RecursionError) as error:
        raise InputError(f"{where}: the chat template is not valid Jinja: {error}") from error
    return text


def read_template_file(path: Path) -> str:
    """Read the template in a file that a recipe names."""
    try:
        text = read_bounded(path, MAX_CONFIG).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a chat template must be UTF-8 text") from error
    return parse_template(text, str(path))


def write_template(folder: Path, text: str) -> None:
    """Replace the templates in a folder. The new one goes to a .jinja file, as in transformers, not to the config."""
    for path in [path for pattern in TEMPLATE_PATTERNS for path in folder.glob(pattern)]:
        path.unlink()
    if text:
        (folder / TEMPLATE_FILE).write_text(text, "utf-8")
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        config = read_json(config_path)
        if config.pop("chat_template", None) is not None:
            config_path.write_text(to_json(config) + "\n", "utf-8")
