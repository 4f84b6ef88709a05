"""The report of a preview: figures, tables, and preview.csv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..compare.ranking import Outcome, Preview, lost_share, unbeaten, with_error
from ..compare.settings import BASE, changes_text
from ..recipe import in_words
from ..text import Measured
from .advice import preview_verdict, ranges_text, reference_text, weights_text
from .figures import Series, curves, heat_map, trade_off
from .page import Figure, Page, Section, in_notebooks
from .tables import Table, Value, finite, plain_words

WHISKERS = "Lines through points reach one standard error to each side."
STARS = "A star is the setting to take of a method."
#: Rows of the settings table; preview.csv has all.
SHOWN = 50
ERRORS = "± is a standard error."
#: With more tasks than this, there is no figure for each pair of tasks.
MAX_PAIRS = 4
#: With more curves than this, only the curve with the best setting of a method is drawn.
MAX_CURVES = 6

Get = Callable[[Outcome], float | None]


def preview_page(found: Preview, recipe: str, provenance: dict[str, str], commands: Sequence[str]) -> Page:
    """The report of a preview, or of a search for weights."""
    sections = [_curves(found)]
    front = _fronts(found)
    if front:
        text = "Every setting is a point. The line connects settings that no other setting beats on both axes."
        sections.append(Section("Trade-offs", text, front))
    tables = [best_table(found), top_table(found), *([alone_table(found)] if found.alone else [])]
    what = "Measured" if found.measured else "Predicted"
    sections.append(Section("Settings", f"{what}; `preview.csv` has every setting with all numbers.", (), tables))
    if found.notes:
        sections.append(Section("Notes", "\n\n".join(found.notes)))
    base = found.recipe.base.model if found.recipe.base is not None else "no base"
    several = "s" if len(found.models) > 1 else ""
    return Page(
        f"Preview of {', '.join(found.methods)}",
        f"{base} and {len(found.models)} fine-tuned model{several}, {len(found.rows)} settings",
        preview_verdict(found),
        [section for section in sections if section.figures or section.tables or section.text],
        recipe,
        provenance,
        commands,
    )


def _value(found: Preview, task: str) -> Get:
    return lambda row: found.shown_value(row, task)


def _curves(found: Preview) -> Section:
    """The score and every task over the key that varies, with all methods in one figure."""
    text = f"Predicted losses are multiples of those of {reference_text(found)}; lower is better."
    text = WHISKERS if found.measured else text
    name = plain_words(found.criterion.name)
    label = _label(found, unit_of(found, name), found.criterion.higher)
    charts: list[Figure | None] = []
    if len(found.tasks) > 1 or not found.measured:
        charts.append(_chart(found, name[:1].upper() + name[1:], "score", label, found.shown_score))
    for task in found.tasks:
        unit = _label(found, task_unit(found, task), found.higher(task))
        charts.append(_chart(found, f"Task {task}", f"task-{task}", unit, _value(found, task), _marks(found, task)))
    drawn = [chart for chart in charts if chart is not None]
    if drawn and found.best() is not None:
        text = f"{text} {STARS}"
    shown = [*drawn, *_maps(found, name, label)]
    return Section(f"By {found.axis.label.partition(',')[0]}" if shown else "Settings", text, shown)


def _label(found: Preview, unit: str, higher: bool) -> str:
    return f"{unit}, {'higher' if higher else 'lower'} is better" if found.measured else unit


def _marks(found: Preview, task: str) -> list[tuple[str, float]]:
    """The metrics of the base and of the task's own model."""
    models = {BASE: "base"} | ({task: "its own model"} if task != BASE else {})
    known = {name: found.alone.get(model, {}).get(task, {}) for model, name in models.items()}
    values = {name: metrics.get(found.metric(task)) for name, metrics in known.items() if metrics}
    return [(name, value) for name, value in values.items() if value is not None]


def _chart(
    found: Preview, title: str, slug: str, label: str, get: Get, alone: Sequence[tuple[str, float]] = ()
) -> Figure | None:
    """A curve for each method and for other keys; a line where nothing varies; None without a curve."""
    series, marks, stars = [], [], []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method]
        best = found.best(method)
        names = list(dict.fromkeys(found.axis.curve(row.setting) for row in rows))
        for name in names if len(names) <= MAX_CURVES or best is None else [found.axis.curve(best.setting)]:
            placed = ((found.axis.position(row.setting), row) for row in rows if found.axis.curve(row.setting) == name)
            curve = sorted(((x, row) for x, row in placed if x is not None), key=lambda point: point[0])
            if len(curve) > 1:
                words = [_setting(found, row) for _, row in curve]
                series.append(Series(name, [x for x, _ in curve], [get(row) for _, row in curve], words))
                stars += [(name, x, y) for x, row in curve if row is best and (y := get(row)) is not None]
        if len(rows) == 1 and (not rows[0].setting.weights or found.axis.position(rows[0].setting) is None):
            marks += [(method, value) for value in [get(rows[0])] if value is not None]
    chart = curves(series, found.axis.label, label, marks=[*marks, *alone], stars=stars)
    return Figure(title, slug, chart) if series else None


def _setting(found: Preview, row: Outcome) -> str:
    """The weights and what else is changed."""
    return ", ".join(part for part in (weights_text(found, row), changes_text(row.setting.changes)) if part)


def _maps(found: Preview, name: str, label: str) -> list[Figure]:
    """The score over two keys, if exactly two vary and every combination was evaluated."""
    maps = []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method]
        places = {key: values for key, values in _places(found, rows).items() if len(set(values)) > 1}
        if len(places) != 2:
            continue
        (one, downs), (other, acrosses) = places.items()
        known = {(a, b): found.shown_score(row) for a, b, row in zip(downs, acrosses, rows, strict=True)}
        tried = [sorted(set(values)) for values in (downs, acrosses)]
        if len(known) == len(tried[0]) * len(tried[1]):
            down, across = ([f"{key} {x:g}" for x in xs] for key, xs in zip((one, other), tried, strict=True))
            values = [[known[a, b] for b in tried[1]] for a in tried[0]]
            maps.append(Figure(f"{method}: {name}", f"map-{method}", heat_map(down, across, values, label)))
    return maps


def _places(found: Preview, rows: Sequence[Outcome]) -> dict[str, list[float]]:
    """Weights and other keys that all of some settings have numbers for."""
    every = [row.setting for row in rows]
    if len({len(set(setting.weights)) == 1 for setting in every}) == 1 and len(set(every[0].weights)) == 1:
        columns: dict[str, list[Any]] = {"weight": [setting.weights[0] for setting in every]}
    else:
        columns = {model: [s.weights[i] if s.weights else None for s in every] for i, model in enumerate(found.models)}
    keys = dict.fromkeys(key for setting in every for key, _ in setting.changes)
    columns |= {key.removeprefix("options."): [dict(s.changes).get(key) for s in every] for key in keys}
    plain = {key: values for key, values in columns.items() if not any(isinstance(value, bool) for value in values)}
    return {key: values for key, values in plain.items() if all(isinstance(value, int | float) for value in values)}


class _Axis(NamedTuple):
    label: str
    get: Get
    higher: bool
    """Higher is better."""


def _fronts(found: Preview) -> list[Figure]:
    """One task against another; with more than two tasks, also the average against the worst task."""
    tasks = found.tasks
    axes = [_Axis(f"{task}, {task_unit(found, task)}", _value(found, task), found.higher(task)) for task in tasks]
    charts = []
    if len(tasks) <= MAX_PAIRS:
        for (one, x), (other, y) in itertools.combinations(zip(tasks, axes, strict=True), 2):
            charts.append(_front(found, f"{one} and {other}", f"pareto-{one}-{other}", x, y))
    units = {task_unit(found, task) for task in tasks}
    if len(tasks) > 2 and len(units) == 1:
        unit, higher = units.pop(), found.higher(tasks[0])

        def values(row: Outcome) -> list[float]:
            shown = (found.shown_value(row, task) for task in tasks)
            return [value for value in shown if value is not None]

        def mean(row: Outcome) -> float | None:
            known = values(row)
            errors = [error for value in known if (error := getattr(value, "error", None)) is not None]
            error = math.hypot(*errors) / len(known) if known and len(errors) == len(known) else None
            return Measured(sum(known) / len(known), error) if known else None

        def worst(row: Outcome) -> float | None:
            return (min if higher else max)(values(row), default=None)

        x, y = _Axis(f"average {unit}", mean, higher), _Axis(f"worst task's {unit}", worst, higher)
        charts.append(_front(found, "Average and worst task", "pareto", x, y))
    return charts


def _front(found: Preview, title: str, slug: str, x: _Axis, y: _Axis) -> Figure:
    series: list[Series] = []
    gains: list[tuple[tuple[float, float], tuple[float, float]]] = []
    signs = [1 if axis.higher else -1 for axis in (x, y)]
    for method in found.methods:
        rows = [(x.get(row), y.get(row), row) for row in found.rows if row.setting.method == method]
        known = [(a, b, _setting(found, row)) for a, b, row in rows if finite(a) and finite(b)]
        series.append(Series(method, [a for a, _, _ in known], [b for _, b, _ in known], [w for _, _, w in known]))
        gains += [((a, b), (signs[0] * a, signs[1] * b)) for a, b, _ in known]
    return Figure(title, slug, trade_off(series, x.label, y.label, front=unbeaten(gains)))


def unit_of(found: Preview, name: str) -> str:
    return plain_words(name) if found.measured else f"{name}, × reference"


def task_unit(found: Preview, task: str) -> str:
    return unit_of(found, found.metric(task) if found.measured else "predicted loss")


def _task_columns(found: Preview) -> list[str]:
    if not found.measured:
        whole = "worst task" if found.criterion.worst else "sum"
        return [f"{task}, × reference's {whole}" for task in found.tasks]
    shares = [f"{task}, share lost" for task in found.tasks if found.criterion.shares]
    return shares + [f"{task}, {plain_words(found.metric(task))}" for task in found.tasks]


def _task_cells(found: Preview, row: Outcome) -> list[Value]:
    shares: list[Value] = [lost_share(row, task) for task in found.tasks if found.criterion.shares]
    return shares + [found.shown_value(row, task) for task in found.tasks]


def _setting_cells(found: Preview, row: Outcome) -> list[Value]:
    changes: list[Value] = [changes_text(row.setting.changes) or None] if _changed(found) else []
    return [row.setting.method, weights_text(found, row) if row.setting.weights else "takes none", *changes]


def _changed(found: Preview) -> bool:
    return any(row.setting.changes for row in found.rows)


def best_table(found: Preview) -> Table:
    """The setting to take of every method, and the reference."""
    setting = ["method", "weights", *(["changed"] if _changed(found) else [])]
    last = "tied with the best" if found.measured else "within 1 % of it"
    columns = [*setting, unit_of(found, found.criterion.name), "rank", *_task_columns(found), last]
    rows: list[list[Value]] = []
    shown = []
    for method in found.methods:
        best = found.best(method)
        if best is None:
            rows.append([method, "no best setting", *[None] * (len(columns) - 2)])
            continue
        shown.append(best)
        close = [row for row in found.as_good(None if found.measured else method) if row.setting.method == method]
        many = "yes" if len(close) == 1 else f"{len(close)} settings"
        rows.append([*_cells(found, best), ranges_text(found, close) or many if close else None])
    if not any(row is found.reference for row in shown) and found.best() is not None:
        rows.append([*_cells(found, found.reference), reference_text(found).partition(" (")[0]])
    more = f", or tied with it. {ERRORS}" if found.measured else f". The reference is {reference_text(found)}."
    note = f"Rank 1 is best of {len(found.rows)} settings{more}"
    return Table("Best setting of each method", "best", columns, rows, note)


def _cells(found: Preview, row: Outcome) -> list[Value]:
    return [*_setting_cells(found, row), found.shown_score(row), row.rank, *_task_cells(found, row)]


def top_table(found: Preview) -> Table:
    """The settings, best first."""
    ranked = found.ranked()
    rows: list[list[Value]] = [_cells(found, row) for row in ranked[:SHOWN]]
    setting = ["method", "weights", *(["changed"] if _changed(found) else [])]
    columns = [*setting, unit_of(found, found.criterion.name), "rank", *_task_columns(found)]
    cut = len(ranked) > SHOWN
    note = (f"The first {SHOWN} of {len(ranked)}. " if cut else "") + (ERRORS if found.measured else "")
    return Table("First settings" if cut else "All settings", "settings", columns, rows, note)


def alone_table(found: Preview) -> Table:
    """The base and the fine-tuned models on the data of every task."""
    rows: list[list[Value]] = [
        [name, *(with_error(by_task[task], found.metric(task)) for task in found.tasks)]
        for name, by_task in found.alone.items()
    ]
    names = [f"{task}, {plain_words(found.metric(task))}" for task in found.tasks]
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
                    add(f"{task} {metric}", (with_error(row.metrics[task], metric) for row in found.rows))
        else:
            add(f"{task} times reference", (found.shown_value(row, task) for row in found.rows))
    return Table("Settings", "preview", columns, rows)


def _cell(value: Any) -> Value:
    return value if isinstance(value, float | int | None) else in_words(value)


def _in_notebook(found: Preview) -> list[Figure]:
    return [*_curves(found).figures, *_fronts(found)]


in_notebooks(Preview, _in_notebook)
