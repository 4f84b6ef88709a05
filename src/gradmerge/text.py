"""Format text, lists, sizes and numbers for messages, and write JSON."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Characters that change how a terminal shows text: control characters except the line feed, marks of text direction,
#: line separators, and surrogates.
_UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return untrusted text with escapes such as \\x1b for characters that would change how a terminal shows it."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return an untrusted name in one line, so that it does not look like a message of gradmerge."""
    return printable(text).replace("\n", "\\n")


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return JSON that can be encoded and printed. Infinity and NaN become null."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Measured(float):
    """A float with a standard error, formatted as `0.7917 ± 0.037`."""

    error: float | None

    def __new__(cls, value: float, error: float | None = None) -> Measured:
        made = super().__new__(cls, value)
        made.error = error if error is not None and math.isfinite(error) else None
        return made

    def __format__(self, spec: str) -> str:
        return plus_minus(super().__format__(spec), self)


def plus_minus(text: str, value: object) -> str:
    """Return the text of a number with its standard error in two digits, if it has one."""
    error = getattr(value, "error", None)
    if error is None:
        return text
    return f"{text} ± {error:.0f}" if 10 <= error < 1e7 else f"{text} ± {error:#.2g}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'weight'?``, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, shortened."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300].rstrip(". ")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key for dotted names that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in name.split(".")]


def listed(items: Iterable[str], limit: int = 8) -> str:
    """Return at most ``limit`` items, one per indented line, and the number of the others."""
    items = list(items)
    shown = [one_line(item[:301]) for item in items[:limit]]
    lines = [f"  {item if len(item) <= 300 else item[:299] + '…'}" for item in shown]
    if len(items) > limit:
        lines.append(f"  … and {len(items) - limit} more")
    return "\n".join(lines)


def some(items: Sequence[str], limit: int = 4) -> str:
    """Return the first items in one line, and the number of the others."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def counted(items: Sequence[Any], word: str) -> str:
    """Return the number of items: 1 token, 2 tokens."""
    return f"{len(items)} {word}{'' if len(items) == 1 else 's'}"


def size(nbytes: float) -> str:
    """Return bytes in decimal units, as the Hub does."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def count(number: int) -> str:
    """Return a number of parameters: 1.10 B, 22.7 M, 768."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def parse_size(value: Any) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB; raise ValueError for anything else."""
    size = value
    if isinstance(value, bool) or not isinstance(value, int):
        match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
        if not match or match[1].count(".") > 1 or match[1] == ".":
            raise ValueError("not a size such as 5GB, 500MB or 2GiB")
        unit = 1024 if match[3] else 1000
        size = int(min(float(match[1]), 1e100) * unit ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise ValueError("a size must be above 0")
    return int(size)
