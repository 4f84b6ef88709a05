"""From the cells of a label column to a tensor that fits the model's output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..text import listed
from .columns import Fields
from .rows import Rows, shown


class ClassNames:
    """The classes of a model, by number and by name."""

    def __init__(self, config: Any) -> None:
        numbers: dict[str, set[int]] = {}
        try:
            self.count = int(config.num_labels)
            pairs = [(name, number) for number, name in (getattr(config, "id2label", None) or {}).items()]
            for name, number in [*pairs, *(getattr(config, "label2id", None) or {}).items()]:
                numbers.setdefault(_key(str(name)) or "", set()).add(int(number))
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the model's config: num_labels, id2label or label2id cannot be read: {error}") from error
        self.by_name = {name: min(found) for name, found in numbers.items()}
        self._unclear = {name for name, found in numbers.items() if len(found) > 1}
        self.numbered = {name: number for name, number in self.by_name.items() if _is_number(name)}
        """The classes whose names are numbers."""

    def number(self, name: str) -> int | None:
        key = _key(name) or ""
        if key in self._unclear:
            several = f"gives the class {name!r} more than one number (id2label, label2id)"
            raise InputError(f"the model's config {several}: put it right first")
        return self.by_name.get(key)

    def __str__(self) -> str:
        return ", ".join(sorted(self.by_name, key=lambda name: self.by_name[name])[:20])


def _key(cell: Any) -> str | None:
    """What a cell says, the same from every format: `1`, `1.0` and `"1"` are "1"; `true` and `"True"` are "true"."""
    if isinstance(cell, bool):
        return str(cell).lower()
    number = _whole(cell)
    if number is not None:
        return str(number)
    return cell.strip().lower() if isinstance(cell, str) else None


def _is_number(key: str) -> bool:
    return len(key) < 400 and key.removeprefix("-").isdecimal()  # beyond 308 digits there is no float


def read_labels(rows: Rows, fields: Fields, config: Any) -> Tensor:
    """Labels of all rows: classes as whole numbers, several labels as 0 and 1, numbers of a regression as they are."""
    columns = fields.get("labels") or fields["label"]
    names = ClassNames(config)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and names.count == 1):
        return _numbers(rows, columns, names)
    cells = list(rows.column(columns[0])) if len(columns) == 1 else []
    several = not cells or isinstance(cells[0], list | tuple)
    if several and problem == "single_label_classification":
        one = f"the model gives one label to an example (its config says {problem})"
        raise InputError(f"{rows.label}: {one}, but {'+'.join(columns)} holds several")
    if not several and problem == "multi_label_classification":
        raise InputError(
            f"{rows.label}: the model gives several labels to an example, but {columns[0]!r} holds {shown(cells[0])}. "
            "A list is needed, or several columns: --columns labels=a+b+c"
        )
    if not cells:
        return _several_columns(rows, columns, names)
    if several:
        return _lists(rows, columns[0], cells, names)
    read = _Reader(rows, columns[0], cells, names)
    return torch.tensor([read(n, cell) for n, cell in enumerate(cells)])


class _Reader:
    """From a cell to the number of its class.

    Where classes have numbers for names, such as stars from 1 to 5, a number in the data may be a name or a count from
    0. It is a name if all numbers of the column are names, else a count, whatever type the data's format gives it.
    """

    def __init__(self, rows: Rows, column: str, cells: Iterable[Any], names: ClassNames) -> None:
        self.rows, self.column, self.names = rows, column, names
        self.places = _places(rows, column, names)
        self.by_name = False
        if column in rows.class_names or all(int(name) == number for name, number in names.numbered.items()):
            return
        found = {key for cell in cells if (key := _key(cell)) is not None and _is_number(key)}
        self.by_name = found <= names.numbered.keys() or not found <= {str(n) for n in range(names.count)}
        if found:
            pairs = sorted(names.numbered.items(), key=lambda pair: pair[1])[:8]
            if self.by_name:
                how, each = "these names", [f"{name} is class {n}" for name, n in pairs]
            else:
                how, each = "the classes' numbers from 0", [f"{n} is the class named {name}" for name, n in pairs]
            told = f"{how}: {', '.join(each)}"
            rows.notes.append(f"the model's classes have numbers for names, and those in {column!r} are read as {told}")

    def __call__(self, index: int, cell: Any) -> int:
        said = f": {self.column!r} is {shown(cell)}"
        key = _key(cell)
        if key is None:
            raise self.rows.wrong(index, f"{said}; a class is needed, as its number or its name")
        number = int(key) if _is_number(key) and not self.by_name else self.names.number(key)
        if number is None:
            number = {"true": 1, "false": 0}.get(key)
        if number is None:
            values = list(dict.fromkeys(str(cell)[:40] for cell in self.rows.column(self.column)))
            some = ", ".join(values[:8]) + (" …" if len(values) > 8 else "")
            classes = f"  Its classes are {self.names}.\n  The data has {some}."
            raise self.rows.wrong(index, f"{said}, which is no class of the model.\n{classes}")
        number = self.places.get(number, number)
        if not 0 <= number < self.names.count:
            hint = "; -1 usually marks rows that have no label" if number == -1 else ""
            count = self.names.count
            raise self.rows.wrong(index, f"{said}, but the model has {count} classes, 0 to {count - 1}{hint}")
        return number


def _whole(cell: Any) -> int | None:
    """The whole number that a cell holds, be it `1`, `1.0` or `"1"`."""
    number = _float(cell)
    return int(number) if number.is_integer() else None


def _places(rows: Rows, column: str, names: ClassNames) -> Mapping[int, int]:
    """Where the data's classes have names: its number of a class → the model's.

    By name when the model has the same names; else both count in the same order, and names that are numbers are
    the classes' numbers.
    """
    own = rows.class_names.get(column)
    if own is None:
        return {}
    numbers = [names.number(name) for name in own]
    if all(number is not None for number in numbers):
        return {n: number for n, number in enumerate(numbers) if number is not None}
    if any(number is not None for number in numbers):
        unknown = [name for name, number in zip(own, numbers, strict=True) if number is None]
        raise InputError(
            f"{rows.label}: some classes of the data are classes of the model, and some are not:\n{listed(unknown)}\n"
            f"  The model's classes are {names}."
        )
    numbers_for_names = all(name.isdecimal() and len(name) < 19 for name in own)
    places = {n: int(name) if numbers_for_names else n for n, name in enumerate(own)}
    some = ", ".join(f"{name} = {places[n]}" for n, name in enumerate(own[:8])) + (", …" if len(own) > 8 else "")
    rows.notes.append(f"the model has no classes by the names of the data's; their numbers are {some}")
    return places


def _several_columns(rows: Rows, columns: Sequence[str], names: ClassNames) -> Tensor:
    if len(columns) != names.count:
        raise InputError(
            f"{rows.label}: {len(columns)} label columns ({', '.join(columns)}) for a model with {names.count} labels"
        )
    order = [names.number(column) for column in columns]
    if set(order) != set(range(names.count)):
        order = list(range(names.count))
    labels = torch.zeros(len(rows), names.count)
    for column, place in zip(columns, order, strict=True):
        assert place is not None
        for index, cell in enumerate(rows.column(column)):
            number = {"true": 1, "false": 0}.get(cell.lower()) if isinstance(cell, str) else None
            number = _whole(cell) if number is None else number
            if number not in (0, 1):
                raise rows.wrong(index, f": {column!r} is {shown(cell)}; labels of a multi-label model are 0 or 1")
            labels[index, place] = number
    return labels


def _lists(rows: Rows, column: str, cells: Sequence[Any], names: ClassNames) -> Tensor:
    for index, cell in enumerate(cells):
        if not isinstance(cell, list | tuple):
            raise rows.wrong(index, f": {column!r} is {shown(cell)} and no list of labels")
    bits = (not isinstance(value, str) and value in (0, 1) for cell in cells for value in cell)
    if all(len(cell) == names.count for cell in cells) and all(bits):
        return torch.tensor([[float(value) for value in cell] for cell in cells])
    read = _Reader(rows, column, [value for cell in cells for value in cell], names)
    labels = torch.zeros(len(cells), names.count)
    for index, cell in enumerate(cells):
        for value in cell:
            labels[index, read(index, value)] = 1
    return labels


def _numbers(rows: Rows, columns: Sequence[str], names: ClassNames) -> Tensor:
    values = []
    for index in range(len(rows)):
        cells = [rows.cell(index, column) for column in columns]
        if len(cells) == 1 and isinstance(cells[0], list | tuple):
            cells = list(cells[0])
        if len(cells) != names.count:
            raise rows.wrong(index, f": {len(cells)} numbers for a model with {names.count} outputs")
        values.append([_float(cell) for cell in cells])
        for cell, value in zip(cells, values[-1], strict=True):
            if not math.isfinite(value):
                wrong = f": {columns[0]!r} is {shown(cell)}; the model is a regression and needs a number"
                raise rows.wrong(index, wrong)
    labels = torch.tensor(values, dtype=torch.float32)
    return labels[:, 0] if names.count == 1 else labels


def _float(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan
