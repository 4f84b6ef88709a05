"""Values of a YAML file that know the line they stand on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..errors import InputError
from ..text import one_line
from ..yaml import Lines

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class YamlValue:
    """A value of a file, and where it stands."""

    def __init__(self, value: Any, lines: Lines, where: str, path: tuple[str | int, ...] = ()) -> None:
        self.value, self.path = value, path
        self._lines, self._where = lines, where

    @property
    def line(self) -> int:
        """The line of the value, or of what it is in where a merge key brought it there."""
        path = self.path
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    @property
    def name(self) -> str:
        """How the value is called in messages: its key."""
        return str(next((part for part in reversed(self.path) if isinstance(part, str)), "the recipe"))

    @property
    def where(self) -> str:
        """The file, and the line if it has lines."""
        return f"{self._where}, line {self.line}" if self._lines else self._where

    def fail(self, text: str) -> InputError:
        return InputError(f"{self.where}: {text}")

    def at(self, key: str | int) -> YamlValue:
        return YamlValue(self.value[key], self._lines, self._where, (*self.path, key))

    def get(self, key: str) -> YamlValue | None:
        """The value of a key; None where it is not there, or empty."""
        return self.at(key) if self.value.get(key) is not None else None

    def __iter__(self) -> Iterator[YamlValue]:
        return (self.at(place) for place in range(len(self.value)))

    @property
    def keys(self) -> list[Any]:
        return list(self.value)

    def mapping(self) -> YamlValue:
        """Itself, if it is a mapping."""
        if not isinstance(self.value, dict):
            raise self.fail(f"{self.name}: should be a mapping, but it is {self.shown}")
        return self

    def sequence(self) -> YamlValue:
        """Itself, if it is a list with something in it."""
        if not isinstance(self.value, list) or not self.value:
            raise self.fail(f"{self.name}: should be a list, but it is {self.shown}")
        return self

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.fail(f"{self.name}: should be a text, but it is {self.shown}")
        return self.value

    def number(self) -> float:
        """A number; YAML takes such as 1e-5, without a dot, for a text."""
        try:
            if not isinstance(self.value, int | float | str) or not math.isfinite(number := float(self.value)):
                raise ValueError
            return number
        except (ValueError, OverflowError):
            raise self.fail(f"{self.name}: should be a number, but it is {self.shown}") from None

    def whole(self) -> int:
        number = self.number()
        if not number.is_integer():
            raise self.fail(f"{self.name}: should be a whole number, but it is {self.shown}")
        return int(number)

    def truth(self) -> bool:
        word = str(self.value).lower().removesuffix(".0")
        if word not in (*TRUE, *FALSE):
            raise self.fail(f"{self.name}: should be true or false, but it is {self.shown}")
        return word in TRUE

    @property
    def shown(self) -> str:
        shown = one_line(repr(self.value)[:60])
        return shown if len(shown) < 60 else f"{shown[:57]}…"
