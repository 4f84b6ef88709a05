"""A preview in words, tables and figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ..diagnostics.predict import BASE
from ..diagnostics.preview import Outcome as Row
from ..diagnostics.preview import Preview
from ..diagnostics.scores import higher_is_better
from ..diagnostics.suggest import Suggestion
from .charts import Chart, HeatMap, LineChart, ScatterChart, Series
from .numbers import number
from .page import Page, Section, Table, Value

TRUST = (
    "Predictions come from curvature alone and are shown as ranks and as multiples of a reference merge, never as losses. How far to "
    "trust them: in an independent study (five sentiment models, three seeds) the weight with the smallest predicted loss of the "
    "worst task was the best of a grid every time, and the smallest sum chose weights that were too small; over 50 to 70 merges the "
    "predictions ranked true losses with Spearman's ρ of only 0.4 to 0.5 on average (0.9 on one task, 0 on another), and hardly "
    "ranked accuracy. A handful of labelled rows (`--data NAME=SRC`) overrides them."
)
#: Settings that the report's own table shows; preview.csv has all.
SHOWN = 200
#: With more tasks than this, pairs of tasks are not drawn one by one.
PAIRS = 4

Get = Callable[[Row], float | None]


def preview_page(
    found: Preview, suggestion: Suggestion | None, recipe: str, provenance: dict[str, str], commands: Sequence[str]
) -> Page:
    """The report of a preview, or of a search for weights."""
    what = "Measured" if found.measured else "Predicted"
    sections = [_curves(found)]
    front = _fronts(found)
    if front:
        text = "Every setting as a point: no setting on the front can be improved for one without losing on the other."
        sections.append(Section("Trade-offs", text, front))
    tables = [best_table(found), _top(found)]
    if found.alone:
        tables.append(_alone(found))
    sections.append(Section("Settings", f"{what}; `preview.csv` has every setting with all numbers.", (), tables))
    if found.notes:
        sections.append(Section("Notes", "\n\n".join(found.notes)))
    base = found.recipe.base.model if found.recipe.base is not None else "no base"
    return Page(
        f"Preview of {', '.join(found.methods)}",
        f"{base} and {len(found.models)} tuned model{'s' if len(found.models) > 1 else ''}, {len(found.rows)} settings",
        verdict(found, suggestion),
        [section for section in sections if section.figures or section.tables or section.text],
        recipe,
        provenance,
        commands,
    )


def verdict(found: Preview, suggestion: Suggestion | None = None) -> list[str]:
    """What a user should know, in sentences."""
    best = found.best()
    words = []
    if best is None:
        words.append(
            "No setting is called the best: what a removal takes out and what is to stay pull against each other. The figures show both."
        )
    elif found.measured:
        own = (
            f"; the recipe's own merge ({found.reference.setting.name}) has {number(found.reference.score)}"
            if found.reference is not best
            else ", which is the recipe's own merge"
        )
        least = "highest" if found.criterion.higher else "smallest"
        words.append(
            f"Of {len(found.rows)} settings, **{_named(found, best)}** has the {least} {_words(found.criterion.name)}: "
            f"{number(best.score)}{own}."
        )
        if found.criterion.shares:
            words.append("A share of 0 is as good as each task's own model, and 1 as bad as the base.")
    else:
        times = found.relative_score(best)
        beside = f": {number(times)} times that of {_reference(found)}" if times is not None else ""
        words.append(
            f"Of {len(found.rows)} settings, **{_named(found, best)}** has the smallest {found.criterion.name}{beside}."
        )
    if best is not None and best.setting.weights:
        words.append(_flatness(found, best))
    if suggestion is not None and suggestion.weights:
        weights = ", ".join(f"{task} {weight:g}" for task, weight in suggestion.weights.items())
        words.append(f"Suggested weights: {weights}.")
    if not found.measured:
        words.append(TRUST)
    return words


def _named(found: Preview, row: Row) -> str:
    return f"{row.setting.method} with {_weights_words(found, row)}" if row.setting.weights else row.setting.method


def _weights_words(found: Preview, row: Row) -> str:
    words = _weights(found, row)
    return f"weight {words}" if len(set(row.setting.weights)) == 1 else f"weights {words}"


def _weights(found: Preview, row: Row) -> str:
    """`0.3`, or `a 0.3, b 0.5`."""
    weights = found.weights(row)
    if len(set(weights.values())) == 1 and len(weights) > 0:
        return f"{next(iter(weights.values())):g}"
    return ", ".join(f"{task} {weight:g}" for task, weight in weights.items())


def _reference(found: Preview) -> str:
    setting = found.reference.setting
    own = "the recipe's own merge" if setting.method == found.recipe.method else "the reference"
    return f"{own} ({setting.name})"


def _words(name: str) -> str:
    return name.replace("_", " ")


def flat_range(found: Preview, best: Row) -> str:
    """The weights within 1 % of the best: `0.3–0.6`, or by task."""
    if not best.setting.weights:
        return ""
    close = found.as_good(best)
    by_task = {
        task: (min(row.setting.weights[i] for row in close), max(row.setting.weights[i] for row in close))
        for i, task in enumerate(found.models)
    }
    spans = {task: f"{low:g}" if low == high else f"{low:g}–{high:g}" for task, (low, high) in by_task.items()}
    if len(set(spans.values())) == 1:
        return next(iter(spans.values()))
    return ", ".join(f"{task} {span}" for task, span in spans.items())


def _flatness(found: Preview, best: Row) -> str:
    close = found.as_good(best)
    tried = sum(row.setting.method == best.setting.method for row in found.rows)
    if len(close) == 1:
        return f"No other of its {tried} settings is within 1 % of it."
    return f"{len(close)} of its {tried} settings are within 1 % of it: weights {flat_range(found, best)}."


def best_table(found: Preview) -> Table:
    """The best setting of every rule."""
    columns = ["method", "weights"]
    columns += [_words(found.criterion.name)] if found.measured else [f"{found.criterion.name}, × reference", "rank"]
    columns += _task_columns(found)
    columns += ["within 1 % of it"]
    rows: list[list[Value]] = []
    for method in found.methods:
        best = found.best(method)
        if best is None:
            rows.append([method, "no best is chosen", *[None] * (len(columns) - 2)])
            continue
        score: list[Value] = [best.score] if found.measured else [found.relative_score(best), best.rank]
        weights = _weights(found, best) if best.setting.weights else "takes none"
        rows.append([method, weights, *score, *_task_values(found, best), flat_range(found, best)])
    note = (
        "" if found.measured else f"The reference is {_reference(found)}. Rank 1 is best of {len(found.rows)} settings."
    )
    return Table("Best setting of each method", "best", columns, rows, note)


def _task_columns(found: Preview) -> list[str]:
    if found.measured:
        return [f"{task}, {_words(found.metric(task))}" for task in found.tasks]
    return [f"{task}, × reference" for task in found.tasks]


def _task_values(found: Preview, row: Row) -> list[float | None]:
    return [row.values.get(task) if found.measured else found.relative(row, task) for task in found.tasks]


def _top(found: Preview) -> Table:
    ranked = sorted(found.rows, key=lambda row: (row.rank is None, row.rank))
    rows: list[list[Value]] = []
    for row in ranked[:SHOWN]:
        score = row.score if found.measured else found.relative_score(row)
        rows.append([row.rank, row.setting.method, _weights(found, row), score, *_task_values(found, row)])
    score_name = _words(found.criterion.name) if found.measured else f"{found.criterion.name}, × reference"
    note = f"The first {SHOWN} of {len(ranked)}." if len(ranked) > SHOWN else ""
    return Table(
        "All settings", "settings", ["rank", "method", "weights", score_name, *_task_columns(found)], rows, note
    )


def _alone(found: Preview) -> Table:
    rows: list[list[Value]] = [
        [name, *(by_task[task].get(found.metric(task)) for task in found.tasks)]
        for name, by_task in found.alone.items()
    ]
    return Table("The models alone", "alone", ["model", *_task_columns(found)], rows)


def settings_table(found: Preview) -> Table:
    """Every setting with all numbers: what `preview.csv` holds. Predictions are multiples of the reference's, and ranks."""
    columns = ["method", *(f"weight {model}" for model in found.models), "rank"]
    names = {
        task: list(dict.fromkeys(name for row in found.rows for name in row.metrics.get(task, {})))
        for task in found.tasks
    }
    if found.measured:
        columns += [found.criterion.name, *(f"{task} {name}" for task in found.tasks for name in names[task])]
    else:
        columns += [f"{found.criterion.name}, times reference"]
        columns += [word for task in found.tasks for word in (f"{task} times reference", f"{task} rank")]
    rows: list[list[Value]] = []
    for row in found.rows:
        line: list[Value] = [row.setting.method, *(row.setting.weights or [None] * len(found.models)), row.rank]
        if found.measured:
            line += [row.score, *(row.metrics[task].get(name) for task in found.tasks for name in names[task])]
        else:
            line.append(found.relative_score(row))
            for task in found.tasks:
                line += [found.relative(row, task), row.ranks.get(task)]
        rows.append(line)
    return Table("Settings", "preview", columns, rows)


def _curves(found: Preview) -> Section:
    """The score and every task against the weight that varies, all rules in one figure."""
    text = "" if found.measured else f"Predicted losses as multiples of those of {_reference(found)}; lower is better."
    charts: list[Chart] = []
    score: Get = (lambda row: row.score) if found.measured else found.relative_score
    name = _words(found.criterion.name)
    whole = _chart(found, name[:1].upper() + name[1:], "score", _label(found, name), score)
    several = len(found.tasks) > 1
    if whole is not None and (several or not found.measured):
        charts.append(whole)
    for task in found.tasks:
        label = _label(found, _words(found.metric(task)) if found.measured else "predicted loss", task)
        chart = _chart(found, f"Task {task}", f"task-{task}", label, _value(found, task), task)
        if chart is not None:
            charts.append(chart)
    charts += _maps(found, score, name)
    return Section("Against the weight" if charts else "What was looked at", text, charts)


def _value(found: Preview, task: str) -> Get:
    return lambda row: row.values.get(task) if found.measured else found.relative(row, task)


def _label(found: Preview, name: str, task: str | None = None) -> str:
    if not found.measured:
        return f"{name}, × reference"
    higher = found.higher(task) if task is not None else found.criterion.higher
    return f"{name}, {'higher' if higher else 'lower'} is better"


def _chart(found: Preview, title: str, slug: str, label: str, get: Get, task: str | None = None) -> LineChart | None:
    series, marks, stars = [], [], []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method]
        curve = sorted((row for row in rows if row.setting.position is not None), key=_position)
        if not rows[0].setting.weights:
            value = get(rows[0])
            if value is not None:
                marks.append((method, value))
        elif len(curve) > 1:
            words = [_weights(found, row) for row in curve]
            series.append(Series(method, [_position(row) for row in curve], [get(row) for row in curve], words))
            best = found.best(method)
            value = get(best) if best is not None else None
            if best is not None and best.setting.position is not None and value is not None:
                stars.append((method, best.setting.position, value))
    if not series:
        return None
    if task is not None and found.measured:
        names = {"base": BASE, "its own model": task} if task != BASE else {"base": BASE}
        for name, model in names.items():
            value = found.alone.get(model, {}).get(task, {}).get(found.metric(task))
            if value is not None:
                marks.append((name, value))
    return LineChart(title, slug, found.axis, label, series, marks, stars)


def _position(row: Row) -> float:
    assert row.setting.position is not None
    return row.setting.position


def _maps(found: Preview, score: Get, name: str) -> list[Chart]:
    """The score over two weights, where exactly two vary and every combination was tried."""
    maps: list[Chart] = []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method and row.setting.weights]
        varying = [i for i in range(len(found.models)) if len({row.setting.weights[i] for row in rows}) > 1]
        if len(varying) != 2:
            continue
        one, other = varying
        down, across = (sorted({row.setting.weights[i] for row in rows}) for i in varying)
        known = {(row.setting.weights[one], row.setting.weights[other]): score(row) for row in rows}
        if len(known) != len(down) * len(across) or len(known) < 4:
            continue
        maps.append(
            HeatMap(
                f"{method}: {name}", f"map-{method}",
                [f"{found.models[one]} {weight:g}" for weight in down],
                [f"{found.models[other]} {weight:g}" for weight in across],
                [[known[a, b] for b in across] for a in down],
                _label(found, name),
            )
        )  # fmt: skip
    return maps


def _fronts(found: Preview) -> list[Chart]:
    """What a setting gives one task against what it gives another; for more than two tasks also the average and the worst."""
    charts: list[Chart] = []
    tasks = found.tasks
    if len(tasks) < 2:
        return charts
    if len(tasks) <= PAIRS:
        for one, other in itertools.combinations(tasks, 2):
            labels = [
                f"{t}, {_words(found.metric(t))}" if found.measured else f"{t}, predicted loss, × reference"
                for t in (one, other)
            ]
            charts.append(
                _front(
                    found, f"{one} and {other}", f"pareto-{one}-{other}", labels, _value(found, one), _value(found, other),
                    (found.higher(one), found.higher(other)),
                )
            )  # fmt: skip
    kinds = {found.metric(task) for task in tasks} if found.measured else {"predicted loss"}
    if len(tasks) > 2 and len(kinds) == 1:
        kind = kinds.pop()
        higher = found.measured and higher_is_better(kind)

        def values(row: Row) -> list[float]:
            return [v for v in _task_values(found, row) if v is not None]

        def mean(row: Row) -> float | None:
            return sum(values(row)) / len(values(row)) if values(row) else None

        def worst(row: Row) -> float | None:
            return (min if higher else max)(values(row), default=None)

        unit = _words(kind) if found.measured else "predicted loss, × reference"
        labels = [f"average {unit}", f"worst task's {unit}"]
        charts.append(_front(found, "Average and worst task", "pareto", labels, mean, worst, (higher, higher)))
    return charts


def _front(
    found: Preview, title: str, slug: str, labels: Sequence[str], x: Get, y: Get, higher: tuple[bool, bool]
) -> ScatterChart:
    series, points = [], []
    for method in found.methods:
        known = [
            (a, b, row)
            for row in found.rows
            if row.setting.method == method
            and (a := x(row)) is not None
            and (b := y(row)) is not None
            and math.isfinite(a)
            and math.isfinite(b)
        ]
        words = [_weights(found, row) if row.setting.weights else "" for _, _, row in known]
        series.append(Series(method, [a for a, _, _ in known], [b for _, b, _ in known], words))
        points += [(a, b) for a, b, _ in known]
    return ScatterChart(title, slug, labels[0], labels[1], series, pareto_front(points, higher))


def pareto_front(points: Sequence[tuple[float, float]], higher: tuple[bool, bool]) -> list[tuple[float, float]]:
    """The points that no other is at least as good as in both and better in one, from the best in the first to the best in the second."""
    signs = [-1.0 if up else 1.0 for up in higher]
    front: list[tuple[float, float]] = []
    lowest = math.inf
    for a, b in sorted({(signs[0] * a, signs[1] * b) for a, b in points}):
        if b < lowest:
            front.append((signs[0] * a, signs[1] * b))
            lowest = b
    return front
