"""Rows of a data set, whatever they were read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..display import OneLine
from ..errors import InputError

Row = Mapping[str, Any]


@dataclass(repr=False)
class Rows(OneLine):
    """A data set: rows by number, and what is known of its columns."""

    label: str
    """What messages call the data: as the user wrote it."""
    rows: Sequence[Row]
    columns: tuple[str, ...]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For columns of class numbers: the name of each class."""
    folder: Path = field(default_factory=Path)
    """Where relative paths inside the data start from."""
    stored: Sequence[int] | None = None
    """The number that each row has in the data, where some were left out."""
    whole_column: Callable[[str], Iterable[Any]] | None = None
    """Reads a whole column, where that is quicker than row by row."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of how the rows were understood."""

    def _line(self) -> list[str]:
        return [self.label, f"{len(self)} rows", f"columns {', '.join(self.columns)}"]

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        """The number of a row in messages; the first is 1."""
        return 1 + (index if self.stored is None else self.stored[index])

    def wrong(self, index: int, what: str) -> InputError:
        """An error that says which row it is about."""
        return InputError(f"{self.label}: row {self.number(index)}{what}")

    def cell(self, index: int, column: str) -> Any:
        try:
            return self.rows[index][column]
        except KeyError:
            raise self.wrong(index, f" has no {column!r}") from None

    def column(self, name: str) -> Iterable[Any]:
        if self.whole_column is not None and name in self.columns:
            return self.whole_column(name)
        return (self.cell(index, name) for index in range(len(self)))

    def text(self, index: int, columns: Sequence[str]) -> str:
        """The text of one column, or of several, each on lines of its own; a list of strings is its lines."""
        return "\n".join(self._words(index, column) for column in columns)

    def _words(self, index: int, column: str) -> str:
        value = self.cell(index, column)
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
            return "\n".join(value)
        raise self.wrong(index, f": {column!r} holds no text but {type(value).__name__}: {shown(value)}")

    def without(self, left_out: Sequence[int]) -> Rows:
        """The rows without ``left_out``."""
        gone = set(left_out)
        kept = [index for index in range(len(self)) if index not in gone]
        stored = [self.number(index) - 1 for index in kept]
        return Rows(self.label, [self.rows[i] for i in kept], self.columns, self.class_names, self.folder, stored)


def shown(value: Any) -> str:
    """A value in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
