"""Numbers and names as a reader sees them: four significant digits, names that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

NONE = "–"
#: Outside of these, a number is easier to read with an exponent.
_SMALL, _LARGE = 1e-4, 1e7


def finite(value: float | None) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    """Four significant digits without zeros at the end, thousands with commas; whole numbers in full."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    value = float(value)  # of a measured one without its error
    if value and not _SMALL <= abs(value) < _LARGE:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_stripped(mantissa)}e{int(exponent)}".replace("-", "−")
    return _signed(_stripped(f"{value:,.{decimals_of(value, digits)}f}"))


def decimals_of(value: float, digits: int = 4) -> int:
    """Decimals that give a number ``digits`` significant digits."""
    if not value:
        return 0
    # Rounded first: 9.9996 has one digit more before its point than it seems.
    return max(0, digits - 1 - int(f"{value:.{digits - 1}e}".split("e")[1]))


def column(values: Sequence[float | int | None]) -> list[str]:
    """Numbers one below the other: zeros fill up to the decimals of their neighbours, never beyond four digits."""
    texts = [number(value) for value in values]
    most = max((len(text.partition(".")[2]) for text in texts if "e" not in text), default=0)

    def filled(value: float | int | None, text: str) -> str:
        if not finite(value) or isinstance(value, int) or "e" in text:
            return text
        return _signed(f"{value:,.{min(most, decimals_of(value))}f}")

    return list(map(filled, values, texts))


def in_plain_words(name: str) -> str:
    """The name of a metric for people: loss per token."""
    return name.replace("_", " ")


def shorten(text: str, most: int) -> str:
    """A long name without its middle: both ends tell names apart."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def _stripped(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _signed(text: str) -> str:
    """A minus sign in place of a hyphen, and none before a zero."""
    return text.replace("-", "−") if text.strip("-0.,") else text.lstrip("-")
