"""Which column of the data has which role, and labels that fit the model's output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_known
from ..errors import InputError
from ..text import listed, nearest
from .data import Rows, shorten

# Common names. The first one that the data has is used.
TEXT = ("text", "sentence", "review", "content", "comment", "document", "tweet", "query", "question", "title", "input")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("query", "passage"),
)
#: Anchor and positive. PAIRS are tried next.
ANCHORS = (("anchor", "positive"), ("query", "positive"), ("query", "answer"), ("question", "answer"))
LABEL = ("label", "labels", "fine_label", "target", "class", "stars", "score", "rating", "sentiment", "category", "y")
NEGATIVE = ("negative", "negative_1", "negative_2", "negative_3", "negative_4", "negative_5")
SCORE = ("score", "similarity", "similarity_score", "label", "labels")
PROMPT = ("prompt", "instruction", "input", "question")
COMPLETION = ("completion", "response", "output", "answer")
SOURCE = ("source", "input", "text", "document", "article", "dialogue", "question", "prompt", "instruction")
TARGET = ("target", "output", "summary", "highlights", "response", "answer", "completion", "labels", "label")
IMAGE = ("image", "img", "image_path", "path", "filename", "file_name")

#: Task → the sets of input roles that it can read, each with its common names. The first complete one is used.
INPUTS: Mapping[str, Sequence[Mapping[str, Sequence[str]]]] = {
    "classify": [*({"text": (a,), "text2": (b,)} for a, b in PAIRS), {"text": TEXT}],
    "causal-lm": [
        {"messages": ("messages",)},
        {"text": ("text",)},
        {"prompt": PROMPT, "completion": COMPLETION},
        {"text": TEXT},
    ],
    "seq2seq": [{"source": SOURCE, "target": TARGET}],
    "image": [{"image": IMAGE}],
    "embedding": [{"anchor": (a,), "positive": (b,)} for a, b in (*ANCHORS, *PAIRS)],
}
#: Task → the roles of labels.
LABELS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "classify": {"label": LABEL},
    "image": {"label": LABEL},
    "embedding": {"negative": NEGATIVE, "score": SCORE},
}

Fields = dict[str, tuple[str, ...]]
"""Role → its columns. Several columns are joined."""


def choose_columns(task: str, rows: Rows, columns: Mapping[str, str] | None, *, labeled: bool = True) -> Fields:
    """Return the columns of each role that the task reads. Without ``labeled``, the roles of its inputs only."""
    inputs, labels = INPUTS[task], LABELS.get(task, {})
    if task == "embedding" and not labeled:
        inputs = [{"anchor": (*(anchor for anchor, _ in ANCHORS), *TEXT)}]
    chosen = _parse_choices(task, rows, columns or {})
    if {"negative", "score"} <= chosen.keys():
        raise InputError("columns: negative and score exclude each other. Give one of them")
    for role, names in labels.items():
        if not labels.keys() & chosen.keys() and (free := _free_columns(rows, chosen, names)):
            chosen[role] = free if role == "negative" else free[:1]
    if task == "classify" and {"text", "text2"} & chosen.keys():
        inputs = inputs[-1:]  # the user has chosen, so no pair is guessed
    for roles in inputs:
        if task == "causal-lm" and not chosen.keys() <= roles.keys():
            continue
        fields = {role: names for role, names in chosen.items() if labeled or role not in labels}
        for role, names in roles.items():
            if role not in fields and (free := _free_columns(rows, fields, names)):
                fields[role] = free[:1]
        if roles.keys() <= fields.keys():
            break
    else:
        raise _missing(task, rows, inputs[-1])
    if labeled and "label" in labels and "label" not in fields:
        raise _missing(task, rows, [*roles, "label"])
    return {role: fields[role] for role in (*roles, *fields)}


def _parse_choices(task: str, rows: Rows, columns: Mapping[str, str]) -> Fields:
    """Check the user's choices: for each role a column, or several joined by +."""
    known = list(dict.fromkeys([role for roles in (*INPUTS[task], LABELS.get(task, {})) for role in roles]))
    fields: Fields = {}
    for role, value in columns.items():
        check_known(f"columns: {role} for task {task}", role, known)
        whole = value in rows.columns or role in ("label", "score")
        fields[role] = (value,) if whole else tuple(name.strip() for name in value.split("+"))
        for name in fields[role]:
            if name not in rows.columns:
                hint = f"{nearest(name, rows.columns)}\n  {_described(rows)}"
                raise InputError(f"{rows.label}: there is no column {name!r} for {role}{hint}")
    return fields


def _free_columns(rows: Rows, fields: Fields, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns with these names, in any case, that have no role yet."""
    taken = {column for columns in fields.values() for column in columns}
    by_name = {name.lower(): name for name in reversed(rows.columns) if name not in taken}
    return tuple(by_name[name] for name in names if name in by_name)


def _missing(task: str, rows: Rows, roles: Sequence[str] | Mapping[str, Sequence[str]]) -> InputError:
    example = ",".join(f"{role}=COLUMN" for role in roles)
    return InputError(
        f"{rows.label}: task {task} needs columns for {' and '.join(roles)}.\n  {_described(rows)} "
        f"Name them in `columns`, such as {example}."
    )


def _described(rows: Rows) -> str:
    return f"The data has the columns {', '.join(map(str, rows.columns))[:2000] or 'none'}."


def read_labels(rows: Rows, column: str, config: Any) -> Tensor:
    """Return the labels of all rows: class numbers, 0 and 1 per label, or the numbers of a regression."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and config.num_labels == 1):
        return _read_regression(rows, column, config.num_labels)
    cells = list(rows.column(column))
    classes = _ClassNumbers(rows, column, config)
    if not isinstance(cells[0], list | tuple):
        return torch.tensor([classes.number(index, cell) for index, cell in enumerate(cells)])
    for index, cell in enumerate(cells):
        if not isinstance(cell, list | tuple):
            raise rows.error(index, f"{column!r} is {shorten(cell)}, but must be a list of labels")
    bits = (not isinstance(value, str) and value in (0, 1) for cell in cells for value in cell)
    if all(len(cell) == config.num_labels for cell in cells) and all(bits):
        return torch.tensor([[float(value) for value in cell] for cell in cells])
    labels = torch.zeros(len(cells), config.num_labels)
    for index, cell in enumerate(cells):
        for value in cell:
            labels[index, classes.number(index, value)] = 1
    return labels


def to_float(cell: Any) -> float:
    """Return the number in a cell, or NaN."""
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


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


class _ClassNumbers:
    """Finds the number of a class, which a cell gives as a number or by the name in the model's config."""

    def __init__(self, rows: Rows, column: str, config: Any) -> None:
        self.rows, self.column, self.count = rows, column, config.num_labels
        try:
            names = {_normalize(name): int(number) for name, number in (config.label2id or {}).items()}
            id2label = getattr(config, "id2label", None) or {}
            self.by_name = names | {_normalize(name): int(number) for number, name in id2label.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the model's config: id2label or label2id is invalid: {error}") from error
        # Of classes such as stars from 1 to 5, numbers are names. Otherwise they count from 0.
        self.numbers_are_names = column not in rows.class_names and any(
            _is_number(name) and int(name) != number for name, number in self.by_name.items()
        )
        self.from_data = self._match_data()

    def number(self, index: int, cell: Any) -> int:
        """Return the class number of a cell in row ``index``."""
        label = _normalize(cell)
        number = int(label) if _is_number(label) and not self.numbers_are_names else self.by_name.get(label)
        if number is None:
            number = {"true": 1, "false": 0}.get(label, -1)
        number = self.from_data.get(number, number)
        if not 0 <= number < self.count:
            names = sorted(self.by_name, key=lambda name: self.by_name[name])
            raise self.rows.error(
                index,
                f"{self.column!r} is {shorten(cell)}, not one of the {self.count} classes of the model: "
                f"{', '.join(names[:20])}",
            )
        return number

    def _match_data(self) -> dict[int, int]:
        """If the data has class names: its class number → the model's, by name, or in order if all names differ."""
        names = self.rows.class_names.get(self.column, ())
        known = {n: self.by_name[_normalize(name)] for n, name in enumerate(names) if _normalize(name) in self.by_name}
        if len(known) == len(names):
            return known  # also if the data has no class names
        if known:
            unknown = [name for n, name in enumerate(names) if n not in known]
            raise InputError(
                f"{self.rows.label}: the model has some classes of the data, but not these:\n{listed(unknown)}"
            )
        numeric = all(name.isdecimal() and len(name) < 19 for name in names)  # folders 1, 10 and 2 are in this order
        matched = {n: int(name) if numeric else n for n, name in enumerate(names)}
        pairs = ", ".join(f"{name} = {matched[n]}" for n, name in enumerate(names[:8]))
        self.rows.notes.append(
            f"the model has none of the data's class names, so classes are matched by number: {pairs}"
            + (", …" if len(names) > 8 else "")
        )
        return matched


def _normalize(cell: Any) -> str:
    """Return the same text for a label in every format: `1`, `1.0` and `"1"` become "1", `true` and `"True"` "true"."""
    if not isinstance(cell, bool) and (number := to_float(cell)).is_integer():
        return str(int(number))
    return str(cell).strip().lower() if isinstance(cell, str | bool) else ""


def _is_number(label: str) -> bool:
    return len(label) < 400 and label.removeprefix("-").isdecimal()  # beyond 308 digits there is no float
