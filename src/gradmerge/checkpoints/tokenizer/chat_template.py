"""Chat templates: where models keep them, and which one a result gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...io.reader import is_plain_name
from ...io.small_files import MAX_CONFIG, lies_within, read_bounded, readable_json

PLAIN_FILE = "chat_template.jinja"
FURTHER = "additional_chat_templates"
#: Files that hold templates and nothing else; processors of older versions have the second.
TEMPLATE_FILES = (PLAIN_FILE, "chat_template.json", f"{FURTHER}/*.jinja")
#: The name of the template that is used when none is asked for.
DEFAULT = "default"

Templates = dict[str, str]
"""Name → template."""


def chat_templates(folder: Path) -> Templates | None:
    """The chat templates of a folder, empty where its tokenizer has none; None where there is no tokenizer.

    As transformers has it, a file of their own comes before tokenizer_config.json.
    """
    plain = folder / PLAIN_FILE
    further = sorted((folder / FURTHER).glob("*.jinja")) if (folder / FURTHER).is_dir() else []
    found = {path.stem: _text(path) for path in further if path.is_file() and lies_within(path, folder)}
    if plain.is_file() and lies_within(plain, folder):
        return {DEFAULT: _text(plain)} | found
    config = readable_json(folder / "tokenizer_config.json")
    if config is None and not found:
        return None
    return found or _stated((config or {}).get("chat_template"))


def _text(path: Path) -> str:
    return read_bounded(path, MAX_CONFIG).decode(errors="replace")


def _stated(value: Any) -> Templates:
    """Templates as tokenizer_config.json has them: one text, or a list of names and texts."""
    if isinstance(value, str):
        return {DEFAULT: value} if value.strip() else {}
    entries = value if isinstance(value, list) else []
    entries = [{"name": k, "template": v} for k, v in value.items()] if isinstance(value, Mapping) else entries
    return {
        str(entry["name"]): str(entry["template"])
        for entry in entries
        if isinstance(entry, Mapping) and is_plain_name(str(entry.get("name"))) and "template" in entry
    }


def alike(one: Templates, other: Templates) -> bool:
    """Whether two models have the same templates, up to blank lines around them."""
    return {name: text.strip() for name, text in one.items()} == {name: text.strip() for name, text in other.items()}


def parsed(text: str, where: str) -> str:
    """A template, after a look at whether Jinja can read it."""
    from jinja2 import Environment, TemplateSyntaxError

    if not text.strip():
        raise InputError(f"{where}: the chat template is empty")
    # A tag of transformers' own, which marks what the model says.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(plain)
    except (TemplateSyntaxError, RecursionError) as error:
        raise InputError(f"{where}: not a chat template that Jinja can read: {error}") from error
    return text


def template_in_file(path: Path) -> Templates:
    """The template in a file of a user's."""
    try:
        text = read_bounded(path, MAX_CONFIG).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a chat template is text in UTF-8") from error
    return {DEFAULT: parsed(text, str(path))}
