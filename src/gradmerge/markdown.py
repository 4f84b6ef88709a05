"""Text of model cards: YAML and Markdown in which names from elsewhere are text and nothing more."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import yaml

from .errors import InputError
from .safe_yaml import parse_yaml
from .text import one_line, printable

_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.M | re.S)
_KEY = re.compile(r"([A-Za-z_][\w-]*)[ \t]*:(?=\s|$)")


def to_yaml(value: Mapping[str, Any]) -> str:
    """YAML for files and people: what would act on a terminal, or cannot be encoded, is escaped."""
    text = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text if printable(text) == text else yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers, such as weights over the layers, are on one line, and nothing is an alias of another."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(list, _list)


def as_card(front: Mapping[str, Any], body: str) -> str:
    """A card: front matter, and Markdown below."""
    return f"---\n{to_yaml(front)}---\n\n{body.strip()}\n"


def front_of(text: str, keys: Container[str]) -> str:
    """The lines of a card's front matter that belong to these keys; cards of others may hold endless results."""
    found, kept, lines = _FRONT.match(text), True, []
    for line in found[1].splitlines() if found is not None else ():
        if key := _KEY.match(line):
            kept = key[1] in keys
        elif line[:1] not in ("", " ", "\t", "-", "#"):  # no plain key: for YAML to judge
            kept = True
        lines += [line] if kept else []
    return "\n".join(lines)


def split_card(text: str, where: str) -> tuple[dict[str, Any], str]:
    """The front matter of a card, empty where there is none, and what is below it."""
    found = _FRONT.match(text)
    if found is None:
        return {}, text
    front = parse_yaml(found[1], where) if found[1].strip() else {}
    if not isinstance(front, dict):
        raise InputError(f"{where}: its front matter, between the lines ---, is no mapping")
    return front, text[found.end() :]


def as_code(text: str) -> str:
    """A name as code in a cell of a table: nothing in it is markup, nor does it end the cell."""
    text = one_line(text).replace("|", "\\|")
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}"


def as_text(text: str) -> str:
    """A name as text of Markdown: nothing in it is a link, an image, code or HTML."""
    return re.sub(r"([\\`*\[\]<>&!|~$])", r"\\\1", one_line(text))


def as_block(language: str, text: str) -> str:
    """Lines of code that nothing in them can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def as_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first cell of a row is a name, as code."""
    lines = [columns, ["---"] * len(columns), *([as_code(row[0]), *row[1:]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
