"""Numbers and names as a reader sees them: four significant digits, round ticks, names that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeGuard

NONE = "–"
#: Outside of these, a number is easier to read with an exponent.
_SMALL, _LARGE = 1e-4, 1e7
#: Below this, arithmetic with scales loses its digits, and above its inverse it overflows.
TINY, HUGE = 1e-290, 1e290


def finite(value: float | None) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def clipped(value: float) -> float:
    """A number that scales can compute with; a chart of others is a curiosity, but still a chart."""
    return max(-HUGE, min(HUGE, value))


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


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers, about ``most`` of them at most."""
    step = tick_step(low, high, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Rounded, to lose the dust of a multiplication: 3 · 0.1 reads 0.3.
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, decimals) + 0.0 for i in range(first, last + 1)]


def tick_step(low: float, high: float, most: int = 6) -> float:
    raw = (high - low) / max(1, most - 1)
    if not raw > 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if raw <= m * power * (1 + 1e-9))


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten; with 2 and 5 in between where there are few, and some left out where there are many."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    steps = (1, 2, 5) if last - first <= 1 else (1,)
    every = max(1, math.ceil((last - first) / max(1, most - 1)))
    found = [m * 10.0**e for e in range(first, last + 1, every) for m in steps]
    return [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """All with the decimals that the step between them needs."""
    if len(values) < 2 or max(map(abs, values)) >= _LARGE:
        return [number(float(v)) for v in values]
    step = min(b - a for a, b in pairwise(values))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4:
        return [number(float(v), 6) for v in values]
    return [_signed(f"{v:,.{decimals}f}") for v in values]


def spread(values: Iterable[float | None], pad: float = 0.06) -> tuple[float, float]:
    """A range with air around what can be drawn; never empty."""
    known = [v for v in values if finite(v)]
    if not known:
        return 0.0, 1.0
    low, high = clipped(min(known)), clipped(max(known))
    if high - low <= max(1e-9 * max(abs(low), abs(high)), TINY):
        half = abs(low) * 0.1 if abs(low) > 10 * TINY else 1.0
        return low - half, high + half
    air = pad * (high - low)
    return low - air, high + air


def shorten(text: str, most: int) -> str:
    """A long name without its middle: both ends tell names apart."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a sans-serif face; fonts differ, so slightly more than most."""
    return size * sum(_advance(c) for c in text)


def fit(text: str, width: float, size: float) -> str:
    """A name shortened until it is no wider than that."""
    most = len(text)
    while most > 3 and text_width(shorten(text, most), size) > width:
        most -= 1
    return shorten(text, most)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Lines of whole words no wider than that."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [fit(line, width, size) for line in lines]


def _advance(character: str) -> float:
    if character in "iljI.,:;|!'· ":
        return 0.33
    if character in "tfr()[]-/":
        return 0.42
    if character in "mwMW@%…—" or ord(character) > 0x2E80:
        return 1.0
    return 0.72 if character.isupper() else 0.63


def _stripped(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _signed(text: str) -> str:
    """A minus sign in place of a hyphen, and none before a zero."""
    return text.replace("-", "−") if text.strip("-0.,") else text.lstrip("-")
