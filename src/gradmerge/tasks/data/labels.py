"""Convert the cells of label columns to a tensor that fits the model's output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...text import listed
from .columns import Fields
from .read import Rows, shorten

BITS = {"1": 1, "true": 1, "0": 0, "false": 0}


def read_labels(rows: Rows, fields: Fields, config: Any) -> Tensor:
    """Return the labels of all rows: class numbers, 0 and 1 per label, or the numbers of a regression."""
    columns = fields.get("labels") or fields["label"]
    classes = ModelClasses(config)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and classes.count == 1):
        return _read_regression(rows, columns, classes.count)
    cells = list(rows.column(columns[0])) if len(columns) == 1 else []
    several = not cells or isinstance(cells[0], list | tuple)
    wanted = {"single_label_classification": False, "multi_label_classification": True}.get(problem or "", several)
    if several is not wanted:
        count = ("one label", "a list of labels, or several label columns (columns labels=a+b+c)")
        raise InputError(
            f"{rows.label}: {'+'.join(columns)} has {count[several]} per row, but the model's config says {problem}, "
            f"which needs {count[wanted]}"
        )
    if not cells:
        return _read_label_columns(rows, columns, classes)
    if several:
        return _read_lists(rows, columns[0], cells, classes)
    return torch.tensor(_class_numbers(rows, columns[0], list(enumerate(cells)), classes))


class ModelClasses:
    """The classes of a model, by number and by name."""

    def __init__(self, config: Any) -> None:
        self.by_name: dict[str, int] = {}
        self.ambiguous: set[str] = set()
        try:
            self.count = int(config.num_labels)
            pairs = [(name, number) for number, name in (getattr(config, "id2label", None) or {}).items()]
            for name, number in [*pairs, *(getattr(config, "label2id", None) or {}).items()]:
                key = normalize_label(str(name)) or ""
                if self.by_name.setdefault(key, int(number)) != int(number):
                    self.ambiguous.add(key)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the model's config: num_labels, id2label or label2id is invalid: {error}") from error

    def number(self, name: str) -> int | None:
        key = normalize_label(name) or ""
        if key in self.ambiguous:
            raise InputError(f"the model's config: id2label and label2id contradict each other for class {name!r}")
        return self.by_name.get(key)

    def __str__(self) -> str:
        return ", ".join(sorted(self.by_name, key=lambda name: self.by_name[name])[:20])


def normalize_label(cell: Any) -> str | None:
    """Return the same text for a label in every format: `1`, `1.0` and `"1"` become "1", `true` and `"True"` "true"."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if (number := to_float(cell)).is_integer():
        return str(int(number))
    return cell.strip().lower() if isinstance(cell, str) else None


def to_float(cell: Any) -> float:
    """Return the number in a cell, or NaN."""
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_number(label: str) -> bool:
    return len(label) < 400 and label.removeprefix("-").isdecimal()  # beyond 308 digits there is no float


def _class_numbers(rows: Rows, column: str, cells: Sequence[tuple[int, Any]], classes: ModelClasses) -> list[int]:
    """Return the class number of each cell. Cells come with the index of their row."""
    labels = [normalize_label(cell) for _, cell in cells]
    by_name = column not in rows.class_names and _numbers_are_names(rows, column, labels, classes)
    from_data = _match_classes(rows, column, classes)
    numbers = []
    for (index, cell), label in zip(cells, labels, strict=True):
        if label is None:
            raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be the number or name of a class")
        number = int(label) if _is_number(label) and not by_name else classes.number(label)
        if number is None:
            number = {"true": 1, "false": 0}.get(label)
        if number is not None:
            number = from_data.get(number, number)
        if number is None or not 0 <= number < classes.count:
            hint = "\n  -1 usually marks rows without a label." if number == -1 else ""
            values = ", ".join(list(dict.fromkeys(str(cell)[:40] for _, cell in cells))[:8])
            raise rows.error(
                index,
                f"{column!r} is {shorten(cell)}, not one of the {classes.count} classes of the model.\n"
                f"  Its classes are {classes}.\n  The data has {values}.{hint}",
            )
        numbers.append(number)
    return numbers


def _numbers_are_names(rows: Rows, column: str, labels: Sequence[str | None], classes: ModelClasses) -> bool:
    """Whether numbers in the data are names of classes, such as stars from 1 to 5, instead of counts from 0.

    They are names if all of them are, whatever type the format of the data gives them. A note says what was decided.
    """
    numbered = {name: number for name, number in classes.by_name.items() if _is_number(name)}
    numbers = {label for label in labels if label is not None and _is_number(label)}
    if not numbers or all(int(name) == number for name, number in numbered.items()):
        return False
    by_name = numbers <= numbered.keys() or not numbers <= {str(n) for n in range(classes.count)}
    pairs = sorted(numbered.items(), key=lambda pair: pair[1])[:8]
    meaning = ", ".join(
        f"{name} is class {number}" if by_name else f"{number} is class {name}" for name, number in pairs
    )
    rows.notes.append(
        f"the model's classes have numbers as names. {column!r} is read as {'names' if by_name else 'numbers from 0'}: "
        f"{meaning}"
    )
    return by_name


def _match_classes(rows: Rows, column: str, classes: ModelClasses) -> dict[int, int]:
    """If the data has class names: its class number → the model's, by name, or in order if all names differ."""
    names = rows.class_names.get(column)
    if names is None:
        return {}
    numbers = [classes.number(name) for name in names]
    known = {n: number for n, number in enumerate(numbers) if number is not None}
    if len(known) == len(names):
        return known
    if known:
        unknown = [name for name, number in zip(names, numbers, strict=True) if number is None]
        raise InputError(
            f"{rows.label}: the model has some classes of the data, but not these:\n{listed(unknown)}\n"
            f"  The model's classes are {classes}."
        )
    numeric = all(name.isdecimal() and len(name) < 19 for name in names)
    matched = {n: int(name) if numeric else n for n, name in enumerate(names)}
    pairs = ", ".join(f"{name} = {matched[n]}" for n, name in enumerate(names[:8])) + (", …" if len(names) > 8 else "")
    rows.notes.append(f"the model has none of the data's class names, so classes are matched by number: {pairs}")
    return matched


def _read_label_columns(rows: Rows, columns: Sequence[str], classes: ModelClasses) -> Tensor:
    """Read one column of zeros and ones per label, matched by name if the names are the model's."""
    if len(columns) != classes.count:
        raise InputError(
            f"{rows.label}: {len(columns)} label columns ({', '.join(columns)}) for {classes.count} labels"
        )
    order = [classes.number(column) for column in columns]
    if set(order) != set(range(classes.count)):
        order = list(range(classes.count))
    labels = torch.zeros(len(rows), classes.count)
    for column, number in zip(columns, order, strict=True):
        for index, cell in enumerate(rows.column(column)):
            bit = BITS.get(normalize_label(cell) or "")
            if bit is None:
                raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be 0 or 1")
            labels[index, number] = bit
    return labels


def _read_lists(rows: Rows, column: str, cells: Sequence[Any], classes: ModelClasses) -> Tensor:
    """Read lists of zeros and ones, one per label, or of the classes that apply."""
    for index, cell in enumerate(cells):
        if not isinstance(cell, list | tuple):
            raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be a list of labels")
    bits = (not isinstance(value, str) and value in (0, 1) for cell in cells for value in cell)
    if all(len(cell) == classes.count for cell in cells) and all(bits):
        return torch.tensor([[float(value) for value in cell] for cell in cells])
    values = [(index, value) for index, cell in enumerate(cells) for value in cell]
    labels = torch.zeros(len(cells), classes.count)
    for (index, _), number in zip(values, _class_numbers(rows, column, values, classes), strict=True):
        labels[index, number] = 1
    return labels


def _read_regression(rows: Rows, columns: Sequence[str], outputs: int) -> Tensor:
    values = []
    for index in range(len(rows)):
        cells = [rows.cell(index, column) for column in columns]
        if len(cells) == 1 and isinstance(cells[0], list | tuple):
            cells = list(cells[0])
        if len(cells) != outputs:
            raise rows.error(index, f"{len(cells)} numbers for a model with {outputs} outputs")
        numbers = [to_float(cell) for cell in cells]
        if not all(map(math.isfinite, numbers)):
            value = cells[0] if outputs == 1 else cells
            raise rows.error(index, f"{'+'.join(columns)!r} is {shorten(value)}, but must be a finite number")
        values.append(numbers)
    labels = torch.tensor(values, dtype=torch.float32)
    return labels[:, 0] if outputs == 1 else labels
