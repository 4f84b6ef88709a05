"""The settings of a preview as tables. What was measured has its standard error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..compare.preview import Outcome, Preview
from ..compare.scores import measured
from ..compare.significance import lost_share
from ..recipe import in_words
from ..text import Measured
from .formatting import in_plain_words
from .page import Table, Value
from .preview_text import range_words, reference_words, weights_words

#: Settings that the report's own table shows; preview.csv has all.
SHOWN = 50
ERRORS = "± is a standard error."


def unit_of(found: Preview, name: str) -> str:
    return in_plain_words(name) if found.measured else f"{name}, × reference"


def task_unit(found: Preview, task: str) -> str:
    return unit_of(found, found.metric(task) if found.measured else "predicted loss")


def _task_columns(found: Preview) -> list[str]:
    if not found.measured:
        whole = "worst task" if found.criterion.worst else "sum"
        return [f"{task}, × reference's {whole}" for task in found.tasks]
    shares = [f"{task}, share lost" for task in found.tasks if found.criterion.shares]
    return shares + [f"{task}, {in_plain_words(found.metric(task))}" for task in found.tasks]


def _task_cells(found: Preview, row: Outcome) -> list[Value]:
    shares: list[Value] = [lost_share(row, task) for task in found.tasks if found.criterion.shares]
    return shares + [found.shown_value(row, task) for task in found.tasks]


def _setting_cells(found: Preview, row: Outcome) -> list[Value]:
    changes: list[Value] = [row.setting.changes_in_words or None] if _changed(found) else []
    return [row.setting.method, weights_words(found, row) if row.setting.weights else "takes none", *changes]


def _changed(found: Preview) -> bool:
    return any(row.setting.changes for row in found.rows)


def best_table(found: Preview) -> Table:
    """The setting of every method that is best, or is taken of those that are tied; and the reference."""
    setting = ["method", "weights", *(["changed"] if _changed(found) else [])]
    last = "tied with the best" if found.measured else "within 1 % of it"
    columns = [*setting, unit_of(found, found.criterion.name), "rank", *_task_columns(found), last]
    rows: list[list[Value]] = []
    shown = []
    for method in found.methods:
        best = found.best(method)
        if best is None:
            rows.append([method, "no best is chosen", *[None] * (len(columns) - 2)])
            continue
        shown.append(best)
        close = [row for row in found.as_good(None if found.measured else method) if row.setting.method == method]
        many = "yes" if len(close) == 1 else f"{len(close)} settings"
        rows.append([*_cells(found, best), range_words(found, close) or many if close else None])
    if not any(row is found.reference for row in shown) and found.best() is not None:
        rows.append([*_cells(found, found.reference), reference_words(found).partition(" (")[0]])
    more = f", or tied with it. {ERRORS}" if found.measured else f". The reference is {reference_words(found)}."
    note = f"Rank 1 is best of {len(found.rows)} settings{more}"
    return Table("Best setting of each method", "best", columns, rows, note)


def _cells(found: Preview, row: Outcome) -> list[Value]:
    return [*_setting_cells(found, row), found.shown_score(row), row.rank, *_task_cells(found, row)]


def top_table(found: Preview) -> Table:
    """The settings, the best first."""
    ranked = found.ranked()
    rows: list[list[Value]] = [_cells(found, row) for row in ranked[:SHOWN]]
    setting = ["method", "weights", *(["changed"] if _changed(found) else [])]
    columns = [*setting, unit_of(found, found.criterion.name), "rank", *_task_columns(found)]
    cut = len(ranked) > SHOWN
    note = (f"The first {SHOWN} of {len(ranked)}. " if cut else "") + (ERRORS if found.measured else "")
    return Table("First settings" if cut else "All settings", "settings", columns, rows, note)


def alone_table(found: Preview) -> Table:
    """The base and the tuned models on the data of every task."""
    rows: list[list[Value]] = [
        [name, *(measured(by_task[task], found.metric(task)) for task in found.tasks)]
        for name, by_task in found.alone.items()
    ]
    names = [f"{task}, {in_plain_words(found.metric(task))}" for task in found.tasks]
    return Table("The models alone", "alone", ["model", *names], rows, ERRORS)


def settings_table(found: Preview) -> Table:
    """Every setting with all numbers, as in `preview.csv`. Predictions are multiples of the reference's, and ranks."""
    columns = ["method", *(f"weight {model}" for model in found.models), "rank"]
    rows: list[list[Value]] = [
        [
            row.setting.method,
            *([_cell(weight) for weight in row.setting.weights] or [None] * len(found.models)),
            row.rank,
        ]
        for row in found.rows
    ]

    def add(column: str, values: Iterable[Value]) -> None:
        columns.append(column)
        for row, value in zip(rows, values, strict=True):
            row.append(value)

    for key in dict.fromkeys(key for row in found.rows for key, _ in row.setting.changes):
        add(key, (_cell(dict(row.setting.changes).get(key)) for row in found.rows))
    name, leading = found.criterion.name, found.leading()
    add(name if found.measured else f"{name}, times reference", map(found.shown_score, found.rows))
    if found.measured and leading is not None:
        add("tied with best", ("yes" if found.among_best(row) else "no" for row in found.rows))
        apart = [found.difference(row, leading) for row in found.rows]
        add("more than the best", (None if one is None else Measured(one.value, one.error) for one in apart))
    for task in found.tasks:
        if found.measured:
            names = dict.fromkeys(name for row in found.rows for name in row.metrics.get(task, {}))
            for metric in names:
                if metric != "standard_errors":
                    add(f"{task} {metric}", (measured(row.metrics[task], metric) for row in found.rows))
        else:
            add(f"{task} times reference", (found.relative(row, task) for row in found.rows))
            add(f"{task} rank", (row.ranks.get(task) for row in found.rows))
    return Table("Settings", "preview", columns, rows)


def _cell(value: Any) -> Value:
    return value if isinstance(value, float | int | None) else in_words(value)
