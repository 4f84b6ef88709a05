"""Markdown and YAML in which names from untrusted sources stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from .text import one_line, printable


def as_code(text: str) -> str:
    """Return a name as inline code that fits a cell of a table."""
    text = one_line(text).replace("|", "\\|")
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}"


def as_text(text: str) -> str:
    """Return a name as plain text: no character in it is markup."""
    return re.sub(r"([\\`*\[\]<>&!|~$])", r"\\\1", one_line(text))


def as_block(language: str, text: str) -> str:
    """Return a block of code whose fence is longer than any in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML without aliases, and with lists of numbers on one line. Control characters are escaped."""
    text = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text if printable(text) == text else yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(list, _represent_list)
