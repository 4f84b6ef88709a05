"""From the cells of a label column to a tensor that fits the model's output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..words import listed
from .columns import Fields
from .rows import Rows, shown


class ClassNames:
    """The classes of a model, by number and by name."""

    def __init__(self, config: Any) -> None:
        self.count = int(config.num_labels)
        stated = getattr(config, "label2id", None) or {}
        try:
            self.by_name = {str(name).strip().lower(): int(number) for name, number in stated.items()}
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InputError(
                f"label2id of the model's config does not map names to numbers: {shown(stated)}"
            ) from error

    def number(self, name: str) -> int | None:
        return self.by_name.get(name.strip().lower())

    def __str__(self) -> str:
        return ", ".join(sorted(self.by_name, key=lambda name: self.by_name[name])[:20])


def read_labels(rows: Rows, fields: Fields, config: Any) -> Tensor:
    """Labels of all rows: classes as whole numbers, several labels as zeros and ones, numbers of a regression as they are."""
    columns = fields.get("labels") or fields["label"]
    names = ClassNames(config)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and names.count == 1):
        return _numbers(rows, columns, names)
    if len(columns) > 1:
        return _several_columns(rows, columns, names, problem)
    cells = list(rows.column(columns[0]))
    is_list = isinstance(cells[0], list | tuple)
    if problem == "multi_label_classification" and not is_list:
        raise InputError(
            f"{rows.label}: the model gives several labels to an example, but {columns[0]!r} holds {shown(cells[0])}. A list is "
            "needed, or several columns: --columns labels=a+b+c"
        )
    if is_list:
        _refuse_single_label(rows, columns, problem)
        return _lists(rows, columns[0], cells, names)
    return _classes(rows, columns[0], cells, names)


def _refuse_single_label(rows: Rows, columns: Sequence[str], problem: str | None) -> None:
    if problem == "single_label_classification":
        raise InputError(
            f"{rows.label}: the model gives one label to an example (its config says {problem}), but {'+'.join(columns)} "
            "holds several"
        )


def _classes(rows: Rows, column: str, cells: Sequence[Any], names: ClassNames) -> Tensor:
    place = _places(rows, column, names)
    return torch.tensor([_class(rows, n, column, cell, names, place) for n, cell in enumerate(cells)])


def _class(rows: Rows, index: int, column: str, cell: Any, names: ClassNames, places: Mapping[int, int]) -> int:
    where = f"{rows.label}: row {rows.number(index)}: {column!r}"
    number = _whole(cell)
    if isinstance(cell, str):
        named = names.number(cell)
        if named is None and number is None:
            raise InputError(
                f"{where} is {shown(cell)}, which is no class of the model.\n  Its classes are {names}.\n"
                f"  The data has {_some(rows, column)}."
            )
        number = named if named is not None else number
    if number is None:
        raise InputError(f"{where} is {shown(cell)}; a class is needed, as its number or its name")
    number = places.get(number, number)
    if not 0 <= number < names.count:
        hint = "; -1 usually marks rows that have no label" if number == -1 else ""
        raise InputError(
            f"{where} is {shown(cell)}, but the model has {names.count} classes, 0 to {names.count - 1}{hint}"
        )
    return number


def _some(rows: Rows, column: str, limit: int = 8) -> str:
    values = list(dict.fromkeys(str(cell)[:40] for cell in rows.column(column)))
    return ", ".join(values[:limit]) + (" …" if len(values) > limit else "")


def _whole(cell: Any) -> int | None:
    """The whole number that a cell holds, be it `1`, `1.0`, `true` or `"1"`."""
    if cell is None:
        return None
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
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
    places = {n: int(name) if all(map(str.isdecimal, own)) else n for n, name in enumerate(own)}
    shown_places = ", ".join(f"{name} = {places[n]}" for n, name in enumerate(own[:8]))
    rows.notes.append(
        f"the model has no classes by the names of the data's; their numbers are {shown_places}{', …' if len(own) > 8 else ''}"
    )
    return places


def _several_columns(rows: Rows, columns: Sequence[str], names: ClassNames, problem: str | None) -> Tensor:
    _refuse_single_label(rows, columns, problem)
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
            labels[index, place] = _bit(rows, index, column, cell)
    return labels


def _bit(rows: Rows, index: int, column: str, cell: Any) -> int:
    number = _whole(cell.lower() == "true" if isinstance(cell, str) and cell.lower() in ("true", "false") else cell)
    if number not in (0, 1):
        raise InputError(
            f"{rows.label}: row {rows.number(index)}: {column!r} is {shown(cell)}; labels of a multi-label model are 0 or 1"
        )
    return number


def _lists(rows: Rows, column: str, cells: Sequence[Any], names: ClassNames) -> Tensor:
    for index, cell in enumerate(cells):
        if not isinstance(cell, list | tuple):
            raise InputError(
                f"{rows.label}: row {rows.number(index)}: {column!r} is {shown(cell)} and no list of labels"
            )
    if all(len(cell) == names.count and all(_is_bit(value) for value in cell) for cell in cells):
        return torch.tensor([[float(value) for value in cell] for cell in cells])
    places = _places(rows, column, names)
    labels = torch.zeros(len(cells), names.count)
    for index, cell in enumerate(cells):
        for value in cell:
            labels[index, _class(rows, index, column, value, names, places)] = 1
    return labels


def _is_bit(value: Any) -> bool:
    return not isinstance(value, str) and value in (0, 1)


def _numbers(rows: Rows, columns: Sequence[str], names: ClassNames) -> Tensor:
    values = []
    for index in range(len(rows)):
        cells = [rows.cell(index, column) for column in columns]
        if len(cells) == 1 and isinstance(cells[0], list | tuple):
            cells = list(cells[0])
        if len(cells) != names.count:
            raise InputError(
                f"{rows.label}: row {rows.number(index)}: {len(cells)} numbers for a model with {names.count} outputs"
            )
        values.append([_number(rows, index, columns[0], cell) for cell in cells])
    labels = torch.tensor(values, dtype=torch.float32)
    return labels[:, 0] if names.count == 1 else labels


def _number(rows: Rows, index: int, column: str, cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"{rows.label}: row {rows.number(index)}: {column!r} is {shown(cell)}; the model is a regression and needs a number"
        )
    return number
