"""Chat templates: read them from a model's folder, compare them, and write them to the result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError
from ..io.reader import is_plain_name
from ..io.small_files import MAX_CONFIG, lies_within, read_bounded, read_json, readable_json
from ..text import to_json
from .checkpoint import Checkpoint, folders_of

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
#: Files that hold only templates. Processors of older versions have the second; the first replaces it.
TEMPLATE_PATTERNS = (TEMPLATE_FILE, "chat_template.json", f"{TEMPLATE_FOLDER}/*.jinja")
DEFAULT = "default"
"""Name of the template that transformers uses if the caller names none."""

Templates = dict[str, str]
"""Name → Jinja template."""


def chat_templates(folder: Path) -> Templates | None:
    """Read the chat templates of a folder: {} if its tokenizer has none, None if it has no tokenizer.

    As in transformers, template files come before tokenizer_config.json.
    """
    files = {DEFAULT: folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    templates = {
        name: read_bounded(path, MAX_CONFIG).decode(errors="replace")
        for name, path in files.items()
        if path.is_file() and lies_within(path, folder)
    }
    config = readable_json(folder / "tokenizer_config.json")
    if templates or config is None:
        return templates or None
    stored = config.get("chat_template")
    if isinstance(stored, str):
        return {DEFAULT: stored} if stored.strip() else {}
    return {
        str(entry["name"]): str(entry["template"])
        for entry in (stored if isinstance(stored, list) else [])
        if isinstance(entry, Mapping) and "template" in entry and is_plain_name(str(entry.get("name")))
    }


def templates_of(checkpoint: Checkpoint) -> Templates | None:
    """Read the chat templates of a model; for an adapter without templates, those of its base."""
    stored = [templates for folder in folders_of(checkpoint) if (templates := chat_templates(folder)) is not None]
    return next((templates for templates in stored if templates), stored[0] if stored else None)


def template_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that :func:`templates_of` depends on."""
    patterns = (*TEMPLATE_PATTERNS, "tokenizer_config.json")
    paths = (path for folder in folders_of(checkpoint) for pattern in patterns for path in sorted(folder.glob(pattern)))
    return [path for path in paths if path.is_file()]


def alike(first: Templates, other: Templates) -> bool:
    """Compare the templates of two models; blank lines around them do not count."""
    return {name: text.strip() for name, text in first.items()} == {name: text.strip() for name, text in other.items()}


def template_notes(first: Checkpoint, other: Checkpoint) -> list[str]:
    """Return a note if the chat templates of two models differ."""
    templates, other_templates = templates_of(first), templates_of(other)
    if templates is None or other_templates is None or alike(templates, other_templates):
        return []
    difference = "differs from" if other_templates else "is missing, unlike"
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


def read_template_file(path: Path) -> Templates:
    """Read the template in a file that a recipe names."""
    try:
        text = read_bounded(path, MAX_CONFIG).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a chat template must be UTF-8 text") from error
    return {DEFAULT: parse_template(text, str(path))}


def write_templates(folder: Path, templates: Templates) -> None:
    """Replace the templates in a folder. They go to .jinja files, as in transformers, and not to the config."""
    for pattern in TEMPLATE_PATTERNS:
        for path in folder.glob(pattern):
            path.unlink()
    for name, text in templates.items():
        path = folder / (TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        config = read_json(config_path)
        if config.pop("chat_template", None) is not None:
            config_path.write_text(to_json(config) + "\n", "utf-8")
