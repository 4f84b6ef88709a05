"""Markdown in which names from untrusted sources stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..text import one_line


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


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
