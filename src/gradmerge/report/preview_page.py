"""A preview in words, tables and figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..compare.predict import BASE
from ..compare.preview import Outcome, Preview
from ..compare.search import Suggestion
from ..text import Measured
from .figures import Series, curves, heat_map, trade_off
from .formatting import finite, in_plain_words as _words
from .notebook import in_notebooks
from .page import Figure, Page, Section
from .preview_tables import alone_table, best_table, task_unit as _task_unit, top_table, unit_of as _unit
from .preview_text import reference_words as _reference, verdict, weights_words as _weights

WHISKERS = "Lines through points reach one standard error to each side."
STARS = "A star is the setting that is taken of a method."
#: With more tasks than this, pairs of tasks are not drawn one by one.
PAIRS = 4
#: With more values of other keys than this, only the curve with the best setting of a method is drawn.
CURVES = 6

Get = Callable[[Outcome], float | None]


def preview_page(
    found: Preview, suggestion: Suggestion | None, recipe: str, provenance: dict[str, str], commands: Sequence[str]
) -> Page:
    """The report of a preview, or of a search for weights."""
    sections = [_curves(found)]
    front = _fronts(found)
    if front:
        text = (
            "Every setting is a point. The line joins those that cannot be improved for one task without losing on "
            "the other."
        )
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
        f"{base} and {len(found.models)} tuned model{several}, {len(found.rows)} settings",
        verdict(found, suggestion),
        [section for section in sections if section.figures or section.tables or section.text],
        recipe,
        provenance,
        commands,
    )


def _value(found: Preview, task: str) -> Get:
    return lambda row: found.shown_value(row, task)


def _curves(found: Preview) -> Section:
    """The score and every task against the weight that varies, all methods in one figure."""
    text = (
        WHISKERS
        if found.measured
        else f"Predicted losses as multiples of those of {_reference(found)}; lower is better."
    )
    name = _words(found.criterion.name)
    label = _label(found, _unit(found, name), found.criterion.higher)
    charts: list[Figure | None] = []
    if len(found.tasks) > 1 or not found.measured:
        charts.append(_chart(found, name[:1].upper() + name[1:], "score", label, found.shown_score))
    for task in found.tasks:
        unit = _label(found, _task_unit(found, task), found.higher(task))
        charts.append(_chart(found, f"Task {task}", f"task-{task}", unit, _value(found, task), _marks(found, task)))
    drawn = [chart for chart in charts if chart is not None]
    if drawn and found.best() is not None:
        text = f"{text} {STARS}"
    shown = [*drawn, *_maps(found, name, label)]
    return Section(f"Against the {found.axis.partition(',')[0]}" if shown else "What was looked at", text, shown)


def _label(found: Preview, unit: str, higher: bool) -> str:
    return f"{unit}, {'higher' if higher else 'lower'} is better" if found.measured else unit


def _marks(found: Preview, task: str) -> list[tuple[str, float]]:
    """What the base, and the model tuned for a task, have on its data."""
    models = {BASE: "base"} | ({task: "its own model"} if task != BASE else {})
    known = {name: found.alone.get(model, {}).get(task, {}) for model, name in models.items()}
    values = {name: metrics.get(found.metric(task)) for name, metrics in known.items() if metrics}
    return [(name, value) for name, value in values.items() if value is not None]


def _chart(
    found: Preview, title: str, slug: str, label: str, get: Get, alone: Sequence[tuple[str, float]] = ()
) -> Figure | None:
    """A curve for each method and values of keys that are not on the axis, a line where nothing varies; or nothing."""
    series, marks, stars = [], [], []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method]
        best = found.best(method)
        names = list(dict.fromkeys(row.setting.series for row in rows))
        for name in names if len(names) <= CURVES or best is None else [best.setting.series]:
            placed = ((row.setting.position, row) for row in rows if row.setting.series == name)
            curve = sorted(((x, row) for x, row in placed if x is not None), key=lambda point: point[0])
            if len(curve) > 1:
                words = [_setting(found, row) for _, row in curve]
                series.append(Series(name, [x for x, _ in curve], [get(row) for _, row in curve], words))
                stars += [(name, x, y) for x, row in curve if row is best and (y := get(row)) is not None]
        if len(rows) == 1 and (not rows[0].setting.weights or rows[0].setting.position is None):
            marks += [(method, value) for value in [get(rows[0])] if value is not None]
    chart = curves(series, found.axis, label, marks=[*marks, *alone], stars=stars)
    return Figure(title, slug, chart) if series else None


def _setting(found: Preview, row: Outcome) -> str:
    """The weights and what else is changed."""
    return ", ".join(part for part in (_weights(found, row), row.setting.changes_in_words) if part)


def _maps(found: Preview, name: str, label: str) -> list[Figure]:
    """The score over two weights or other keys, where exactly two vary and every combination was tried."""
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
    """What some settings differ in, as far as all of them have numbers there: weights, and other keys."""
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
    """Settings by one task against another; with more than two tasks, also by the average against the worst task."""
    tasks = found.tasks
    axes = [_Axis(f"{task}, {_task_unit(found, task)}", _value(found, task), found.higher(task)) for task in tasks]
    charts = []
    if len(tasks) <= PAIRS:
        for (one, x), (other, y) in itertools.combinations(zip(tasks, axes, strict=True), 2):
            charts.append(_front(found, f"{one} and {other}", f"pareto-{one}-{other}", x, y))
    units = {_task_unit(found, task) for task in tasks}
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
    series, points = [], []
    for method in found.methods:
        rows = [(x.get(row), y.get(row), row) for row in found.rows if row.setting.method == method]
        known = [(a, b, _setting(found, row)) for a, b, row in rows if finite(a) and finite(b)]
        series.append(Series(method, [a for a, _, _ in known], [b for _, b, _ in known], [w for _, _, w in known]))
        points += [(a, b) for a, b, _ in known]
    front = pareto_front(points, (x.higher, y.higher))
    return Figure(title, slug, trade_off(series, x.label, y.label, front=front))


def pareto_front(points: Sequence[tuple[float, float]], higher: tuple[bool, bool]) -> list[tuple[float, float]]:
    """The points that no other beats: none is at least as good in both values and better in one.

    The point with the best first value comes first.
    """
    signs = [-1.0 if up else 1.0 for up in higher]
    front: list[tuple[float, float]] = []
    lowest = math.inf
    for a, b in sorted({(signs[0] * a, signs[1] * b) for a, b in points}):
        if b < lowest:
            front.append((signs[0] * a, signs[1] * b))
            lowest = b
    return front


def _in_notebook(found: Preview) -> list[Figure]:
    return [*_curves(found).figures, *_fronts(found)]


in_notebooks(Preview, _in_notebook)
in_notebooks(Suggestion, lambda suggestion: _in_notebook(suggestion.evaluated))
