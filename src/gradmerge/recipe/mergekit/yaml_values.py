"""Values of a YAML file that know their line, for mergekit recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...errors import InputError
from ...text import one_line
from ...yaml import Lines

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class YamlValue:
    """A value of a file and its position."""

    def __init__(self, value: Any, lines: Lines, where: str, path: tuple[str | int, ...] = ()) -> None:
        self.value, self.path = value, path
        self._lines, self._where = lines, where

    @property
    def line(self) -> int:
        """The line of the value; for a value from a merge key (`<<`), that of the mapping around it."""
        path = self.path
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    @property
    def name(self) -> str:
        """The name of the value in messages: its key."""
        return str(next((part for part in reversed(self.path) if isinstance(part, str)), "the recipe"))

    @property
    def where(self) -> str:
        """The file, with the line if lines are known."""
        return f"{self._where}, line {self.line}" if self._lines else self._where

    @property
    def shown(self) -> str:
        """The value as short text."""
        text = one_line(repr(self.value)[:60])
        return text if len(text) < 60 else f"{text[:57]}…"

    def fail(self, text: str) -> InputError:
        """Return an error that names the file and the line."""
        return InputError(f"{self.where}: {text}")

    def at(self, key: str | int) -> YamlValue:
        """Return the value of a key or list position."""
        return YamlValue(self.value[key], self._lines, self._where, (*self.path, key))

    def get(self, key: str) -> YamlValue | None:
        """Return the value of a key; None if it is missing or empty."""
        return self.at(key) if self.value.get(key) is not None else None

    def __iter__(self) -> Iterator[YamlValue]:
        return (self.at(position) for position in range(len(self.value)))

    @property
    def keys(self) -> list[Any]:
        return list(self.value)

    def mapping(self) -> YamlValue:
        """Return the value itself; raise unless it is a mapping."""
        return self._checked(isinstance(self.value, dict), "a mapping")

    def sequence(self) -> YamlValue:
        """Return the value itself; raise unless it is a list that is not empty."""
        return self._checked(isinstance(self.value, list) and bool(self.value), "a list")

    def text(self) -> str:
        self._checked(isinstance(self.value, str) and bool(self.value), "a text")
        return str(self.value)

    def number(self) -> float:
        """Return a finite number; YAML reads 1e-5, without a dot, as text."""
        try:
            number = float(self.value) if isinstance(self.value, int | float | str) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        self._checked(math.isfinite(number), "a number")
        return number

    def whole(self) -> int:
        number = self.number()
        self._checked(number.is_integer(), "a whole number")
        return int(number)

    def truth(self) -> bool:
        word = str(self.value).lower().removesuffix(".0")
        self._checked(word in (*TRUE, *FALSE), "true or false")
        return word in TRUE

    def _checked(self, fits: bool, expected: str) -> YamlValue:
        if not fits:
            raise self.fail(f"{self.name}: should be {expected}, but it is {self.shown}")
        return self
