"""Convert the cells of a label column to a tensor that fits the model's output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...text import listed
from .read import Rows, shorten


def read_labels(rows: Rows, column: str, config: Any) -> Tensor:
    """Return the labels of all rows: class numbers, 0 and 1 per label, or the numbers of a regression."""
    count, classes = _model_classes(config)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and count == 1):
        return _read_regression(rows, column, count)
    cells = list(rows.column(column))
    several = isinstance(cells[0], list | tuple)
    if problem is not None and several != (problem == "multi_label_classification"):
        found, needed = (
            ("lists of labels", "one label per row") if several else ("one label per row", "lists of labels")
        )
        raise InputError(f"{rows.label}: {column!r} has {found}, but the model's config says {problem}: {needed}")
    if not several:
        return torch.tensor(_class_numbers(rows, column, list(enumerate(cells)), count, classes))
    for index, cell in enumerate(cells):
        if not isinstance(cell, list | tuple):
            raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be a list of labels")
    bits = (not isinstance(value, str) and value in (0, 1) for cell in cells for value in cell)
    if all(len(cell) == count for cell in cells) and all(bits):
        return torch.tensor([[float(value) for value in cell] for cell in cells])
    values = [(index, value) for index, cell in enumerate(cells) for value in cell]
    labels = torch.zeros(len(cells), count)
    for (index, _), number in zip(values, _class_numbers(rows, column, values, count, classes), strict=True):
        labels[index, number] = 1
    return labels


def to_float(cell: Any) -> float:
    """Return the number in a cell, or NaN."""
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _model_classes(config: Any) -> tuple[int, dict[str, int]]:
    """Return the model's number of classes, and their numbers by normalized name."""
    try:
        classes = {_normalize(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
        for number, name in (getattr(config, "id2label", None) or {}).items():
            if classes.setdefault(_normalize(name), int(number)) != int(number):
                raise ValueError(f"id2label and label2id contradict each other for class {name!r}")
        return int(config.num_labels), classes
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"the model's config: num_labels, id2label or label2id is invalid: {error}") from error


def _normalize(cell: Any) -> str:
    """Return the same text for a label in every format: `1`, `1.0` and `"1"` become "1", `true` and `"True"` "true"."""
    if not isinstance(cell, bool) and (number := to_float(cell)).is_integer():
        return str(int(number))
    return str(cell).strip().lower() if isinstance(cell, str | bool) else ""


def _is_number(label: str) -> bool:
    return len(label) < 400 and label.removeprefix("-").isdecimal()  # beyond 308 digits there is no float


def _class_numbers(
    rows: Rows, column: str, cells: Sequence[tuple[int, Any]], count: int, classes: Mapping[str, int]
) -> list[int]:
    """Return the class number of each cell. Cells come with the index of their row."""
    from_data = _match_classes(rows, column, classes)
    # Of classes such as stars from 1 to 5, numbers are names. Otherwise they count from 0.
    numbers_are_names = column not in rows.class_names and any(
        _is_number(name) and int(name) != number for name, number in classes.items()
    )
    numbers = []
    for index, cell in cells:
        label = _normalize(cell)
        number = int(label) if _is_number(label) and not numbers_are_names else classes.get(label)
        if number is None:
            number = {"true": 1, "false": 0}.get(label, -1)
        number = from_data.get(number, number)
        if not 0 <= number < count:
            raise rows.error(
                index,
                f"{column!r} is {shorten(cell)}, not one of the {count} classes of the model.\n"
                f"  Its classes are {', '.join(sorted(classes, key=lambda name: classes[name])[:20])}.\n"
                f"  The data has {', '.join(list(dict.fromkeys(str(value)[:40] for _, value in cells))[:8])}.",
            )
        numbers.append(number)
    return numbers


def _match_classes(rows: Rows, column: str, classes: Mapping[str, int]) -> dict[int, int]:
    """If the data has class names: its class number → the model's, by name, or in order if all names differ."""
    names = rows.class_names.get(column, ())
    known = {n: classes[_normalize(name)] for n, name in enumerate(names) if _normalize(name) in classes}
    if len(known) == len(names):
        return known  # also if the data has no class names
    if known:
        unknown = [name for n, name in enumerate(names) if n not in known]
        raise InputError(f"{rows.label}: the model has some classes of the data, but not these:\n{listed(unknown)}")
    numeric = all(name.isdecimal() and len(name) < 19 for name in names)  # folders 1, 10 and 2 are in this order
    matched = {n: int(name) if numeric else n for n, name in enumerate(names)}
    pairs = ", ".join(f"{name} = {matched[n]}" for n, name in enumerate(names[:8])) + (", …" if len(names) > 8 else "")
    rows.notes.append(f"the model has none of the data's class names, so classes are matched by number: {pairs}")
    return matched


def _read_regression(rows: Rows, column: str, outputs: int) -> Tensor:
    values = []
    for index, cell in enumerate(rows.column(column)):
        numbers = [to_float(value) for value in (cell if isinstance(cell, list | tuple) else [cell])]
        if len(numbers) != outputs or not all(map(math.isfinite, numbers)):
            needed = "a finite number" if outputs == 1 else f"a list of {outputs} finite numbers"
            raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be {needed}")
        values.append(numbers)
    labels = torch.tensor(values, dtype=torch.float32)
    return labels[:, 0] if outputs == 1 else labels
