"""The reports of previews and diagnoses: figures, tables, and preview.csv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..compare.diagnose import FINE_TUNED, TARGET, UNDER_PENALTY, WITHOUT_PENALTY, Diagnosis
from ..compare.ranking import Outcome, Preview, headline, higher_is_better, lost_share, with_error
from ..compare.settings import BASE, changes_text, is_removal
from ..recipe import in_words
from ..text import Measured, counted
from .advice import PENALTIES, TRUST, ranges_text, reference_text, weights_text
from .figures import Series, bars, curves, heat_map, trade_off
from .page import Figure, Page, Section, Table, Value, finite, number, plain_words

if TYPE_CHECKING:
    from altair import LayerChart

#: Rows of the settings table; preview.csv has all.
SHOWN = 50
ERRORS = "± is a standard error."
#: With more curves than this, only the curve with the best setting of a method is drawn.
MAX_CURVES = 6

Get = Callable[[Outcome], float | None]


def preview_page(preview: Preview, recipe: str, provenance: Mapping[str, str], commands: Sequence[str]) -> Page:
    """Return the report of a preview, or of a search for weights."""
    sections = []
    if drawn := _curves(preview):
        text = "Lines through points reach one standard error to each side."
        if not preview.measured:
            text = f"Predicted losses are multiples of those of {reference_text(preview)}; lower is better."
        stars = " A star is the setting to take of a method." if preview.best() is not None else ""
        sections.append(Section(f"By {preview.axis.label.partition(',')[0]}", text + stars, drawn))
    if (chart := trade_off_chart(preview)) is not None:
        text = "Every setting is a point. The line connects settings that no other setting beats on both axes."
        sections.append(Section("Trade-offs", text, [Figure("Trade-off between tasks", "trade-off", chart)]))
    tables = [best_table(preview), _top_table(preview), *([_alone_table(preview)] if preview.alone else [])]
    what = "Measured" if preview.measured else "Predicted"
    sections.append(Section("Settings", f"{what}; `preview.csv` has every setting with all numbers.", (), tables))
    base = preview.recipe.base.model if preview.recipe.base is not None else "no base"
    subtitle = f"{base} and {counted(preview.models, 'fine-tuned model')}, {counted(preview.rows, 'setting')}"
    title = f"Preview of {', '.join(preview.methods)}"
    return Page(title, subtitle, preview.verdict, sections, recipe, provenance, commands, preview.notes)


def _curves(preview: Preview) -> list[Figure]:
    """Return figures of the score and of every task over the axis, each with a curve for every method."""
    charts: list[Figure | None] = []
    if len(preview.tasks) > 1 or not preview.measured:
        title = plain_words(preview.criterion.name)
        charts.append(_chart(preview, title[:1].upper() + title[1:], "score", _label(preview), preview.shown_score))
    for task in preview.tasks:

        def value(row: Outcome, task: str = task) -> float | None:
            return preview.shown_value(row, task)

        charts.append(
            _chart(preview, f"Task {task}", f"task-{task}", _label(preview, task), value, _marks(preview, task))
        )
    return [chart for chart in charts if chart is not None]


def _label(preview: Preview, task: str | None = None) -> str:
    """Return the label of an axis: the score or the number of a task, and with data whether higher is better."""
    higher = preview.criterion.higher if task is None else preview.higher(task)
    return (
        f"{_unit(preview, task)}, {'higher' if higher else 'lower'} is better"
        if preview.measured
        else _unit(preview, task)
    )


def _marks(preview: Preview, task: str) -> list[tuple[str, float]]:
    """Return the metrics of the base and of the task's own model, to mark in a figure."""
    models = {BASE: "base"} | ({task: "its own model"} if task != BASE else {})
    known = {name: preview.alone.get(model, {}).get(task, {}) for model, name in models.items()}
    values = {name: metrics.get(preview.metric(task)) for name, metrics in known.items() if metrics}
    return [(name, value) for name, value in values.items() if value is not None]


def _chart(
    preview: Preview, title: str, slug: str, label: str, get: Get, alone: Sequence[tuple[str, float]] = ()
) -> Figure | None:
    """Return a figure with a curve for each method and its changes. Methods with one setting are horizontal lines."""
    series, marks, stars = [], [], []
    for method in preview.methods:
        rows, best = [row for row in preview.rows if row.setting.method == method], preview.best(method)
        points: dict[str, list[tuple[float, Outcome]]] = {}
        for row in rows:
            if (x := preview.axis.position(row.setting)) is not None:
                points.setdefault(preview.axis.curve(row.setting), []).append((x, row))
        if len(points) > MAX_CURVES and best is not None:
            points = {name: curve for name, curve in points.items() if name == preview.axis.curve(best.setting)}
        for name, curve in points.items():
            curve.sort(key=lambda point: point[0])
            if len(curve) > 1:
                words = [_setting(preview, row) for _, row in curve]
                series.append(Series(name, [x for x, _ in curve], [get(row) for _, row in curve], words))
                stars += [(name, x, y) for x, row in curve if row is best and (y := get(row)) is not None]
        if len(rows) == 1 and (value := get(rows[0])) is not None:
            marks.append((method, value))
    chart = curves(series, preview.axis.label, label, marks=[*marks, *alone], stars=stars)
    return Figure(title, slug, chart) if series else None


def _setting(preview: Preview, row: Outcome) -> str:
    """Return the weights and the changes of a setting as text."""
    return ", ".join(part for part in (weights_text(preview, row), changes_text(row.setting.changes)) if part)


def trade_off_chart(preview: Preview, present: Outcome | None = None) -> LayerChart | None:
    """Return a scatter chart of all settings with their Pareto front; None if there are no two axes.

    A ring marks the setting ``present``. For a removal, the axes are the means of the tasks to forget and of all
    others. Otherwise one axis is the last task (the base's own data, if there is any), and one the mean of the others.
    """
    removed = [task for task in preview.models if task in preview.tasks] if is_removal(preview.recipe) else []
    across = removed or preview.tasks[:-1]
    up = [task for task in preview.tasks if task not in across]
    if not across or not up:
        return None
    points = [(row, _mean(preview, row, across), _mean(preview, row, up)) for row in preview.rows]
    known = [(row, x, y) for row, x, y in points if finite(x) and finite(y)]
    more_x, more_y = (all(map(preview.higher, tasks)) for tasks in (across, up))
    front = pareto_front([(x, y) for _, x, y in known], more_x != bool(removed), more_y)
    series = []
    for method in preview.methods:
        of_method = [point for point in known if point[0].setting.method == method]
        words = [_setting(preview, row) for row, _, _ in of_method]
        series.append(Series(method, [x for _, x, _ in of_method], [y for _, _, y in of_method], words))
    labels = [_axis(preview, across, "forgotten: " if removed else ""), _axis(preview, up, "kept: " if removed else "")]
    now = None if present is None else (_mean(preview, present, across), _mean(preview, present, up))
    return trade_off(series, *labels, front=front, present=now)


def pareto_front(points: Sequence[tuple[float, float]], more_x: bool, more_y: bool) -> list[tuple[float, float]]:
    """Return the points that no other beats on both axes. ``more_x`` and ``more_y``: larger is better."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (-p[0] if more_x else p[0], -p[1] if more_y else p[1])):
        if not front or (y > front[-1][1] if more_y else y < front[-1][1]):
            front.append((x, y))
    return front


def _mean(preview: Preview, row: Outcome, tasks: Sequence[str]) -> float:
    """Return the mean of the values of some tasks, with its standard error: the rows of tasks are independent."""
    values = [preview.shown_value(row, task) for task in tasks]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return math.nan
    errors = [getattr(value, "error", None) or math.nan for value in known]
    return Measured(sum(known) / len(known), math.hypot(*errors) / len(known))


def _axis(preview: Preview, tasks: Sequence[str], what: str) -> str:
    units = " or ".join(dict.fromkeys(_unit(preview, task) for task in tasks))
    return f"{'mean ' if len(tasks) > 1 else ''}{units}, {what}{', '.join(tasks)}"


def _unit(preview: Preview, task: str | None = None) -> str:
    """Return the name of the score, or of the number of a task."""
    if preview.measured:
        return plain_words(preview.criterion.name if task is None else preview.metric(task))
    return f"{preview.criterion.name if task is None else 'predicted loss'}, × reference"


def _cells(preview: Preview, row: Outcome) -> dict[str, Value]:
    """Column → value, for tables in a page."""
    cells: dict[str, Value] = {"method": row.setting.method}
    cells["weights"] = weights_text(preview, row) if row.setting.weights else "takes none"
    if any(row.setting.changes for row in preview.rows):
        cells["changed"] = changes_text(row.setting.changes) or None
    cells |= {_unit(preview): preview.shown_score(row), "rank": row.rank}
    if preview.criterion.shares:
        cells |= {f"{task}, share lost": lost_share(row, task) for task in preview.tasks}
    for task in preview.tasks:
        what = plain_words(preview.metric(task)) if preview.measured else "× reference's worst task"
        cells[f"{task}, {what}"] = preview.shown_value(row, task)
    return cells


def best_table(preview: Preview) -> Table:
    """Return a table of the setting to use of every method, and of the reference."""
    rows: list[list[Value]] = []
    columns = [*_cells(preview, preview.reference), "tied with the best" if preview.measured else "within 1 % of it"]
    for method in preview.methods:
        best = preview.best(method)
        if best is None:
            rows.append([method, "no best setting", *[None] * (len(columns) - 2)])
            continue
        close = [row for row in preview.as_good(None if preview.measured else method) if row.setting.method == method]
        rows.append([*_cells(preview, best).values(), ranges_text(preview, close) if close else None])
    if preview.best() is not None and not any(preview.best(method) is preview.reference for method in preview.methods):
        rows.append([*_cells(preview, preview.reference).values(), reference_text(preview).partition(" (")[0]])
    more = f", or tied with it. {ERRORS}" if preview.measured else f". The reference is {reference_text(preview)}."
    note = f"Rank 1 is best of {len(preview.rows)} settings{more}"
    return Table("Best setting of each method", "best", columns, rows, note)


def _top_table(preview: Preview) -> Table:
    """Return a table of the best settings."""
    ranked = preview.ranked()
    cut = len(ranked) > SHOWN
    note = (f"The first {SHOWN} of {len(ranked)}. " if cut else "") + (ERRORS if preview.measured else "")
    rows = [[*_cells(preview, row).values()] for row in ranked[:SHOWN]]
    columns = [*_cells(preview, preview.reference)]
    return Table("First settings" if cut else "All settings", "settings", columns, rows, note)


def _alone_table(preview: Preview) -> Table:
    """Return a table of the base and the fine-tuned models on the data of every task."""
    rows: list[list[Value]] = [
        [name, *(with_error(by_task[task], preview.metric(task)) for task in preview.tasks)]
        for name, by_task in preview.alone.items()
    ]
    names = [f"{task}, {plain_words(preview.metric(task))}" for task in preview.tasks]
    return Table("The models alone", "alone", ["model", *names], rows, ERRORS)


def settings_table(preview: Preview) -> Table:
    """Return the table in `preview.csv`: all settings and numbers. Predictions are multiples of the reference's."""
    columns: dict[str, Iterable[Value]] = {"method": [row.setting.method for row in preview.rows]}
    for model in preview.models:
        columns[f"weight {model}"] = [_cell(preview.weights(row).get(model)) for row in preview.rows]
    columns["rank"] = [row.rank for row in preview.rows]
    for key in dict.fromkeys(key for row in preview.rows for key in row.setting.changes):
        columns[key] = [_cell(row.setting.get(key)) for row in preview.rows]
    name, leading = preview.criterion.name, preview.leading()
    columns[name if preview.measured else f"{name}, times reference"] = map(preview.shown_score, preview.rows)
    if preview.measured and leading is not None:
        columns["tied with best"] = ["yes" if preview.among_best(row) else "no" for row in preview.rows]
        apart = [preview.difference(row, leading) for row in preview.rows]
        columns["more than the best"] = [None if one is None else Measured(one.value, one.error) for one in apart]
    for task in preview.tasks:
        if not preview.measured:
            columns[f"{task} times reference"] = [preview.shown_value(row, task) for row in preview.rows]
        for metric in dict.fromkeys(metric for row in preview.rows for metric in row.metrics.get(task, {})):
            if metric != "standard_errors":
                columns[f"{task} {metric}"] = [with_error(row.metrics[task], metric) for row in preview.rows]
    return Table("Settings", "preview", list(columns), list(zip(*columns.values(), strict=True)))


def _cell(value: Any) -> Value:
    return value if isinstance(value, float | int | None) else in_words(value)


_CONFLICTS = (
    "Two tasks overlap in weights that both moved and that matter to both (Σ √(H_s H_t) |Δ_s Δ_t|). Where they moved "
    "in opposite directions, a merge cannot serve both. By chance that is 50 % of the overlap."
)
_PENALTY = (
    "Gradient matching assumes that each model was trained to convergence under ½‖θ − θ_0‖²_P. Then ∇ℓ_t(θ_t) = "
    "−P Δ_t, and the ratio ‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖ is 0. Around 1 or above, the model was trained without the "
    "penalty, and P = 0 (`base.penalty: none`) may suit better; the table above has what that merge measured. Use rows "
    "that the model was trained on: with few or other rows the ratio is too large."
)
_RESIDUAL = (
    "r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ) is zero at the jointly trained model, and H̄⁻¹r is the predicted step to it. "
    "The table compares that step with the merge's distance ‖θ̂ − θ_0‖ from the base. `diagnosis.json` has all numbers."
)


def diagnosis_page(diagnosis: Diagnosis, recipe: str, provenance: Mapping[str, str], commands: Sequence[str]) -> Page:
    """Return the report of a diagnosis."""
    sections = [_metrics_section(diagnosis)] if diagnosis.outcomes else []
    sections += [_prediction_section(diagnosis), _layer_section(diagnosis)]
    if len(diagnosis.tuned) > 1:
        sections.append(Section("Conflicts between tasks", _CONFLICTS, tables=[_conflicts_table(diagnosis)]))
    if diagnosis.penalty_checks:
        tables = [_penalty_table(diagnosis)]
        sections.append(Section("Were the models trained under the penalty?", _PENALTY, tables=tables))
    if diagnosis.residuals:
        sections.append(
            Section("Distance to the jointly trained model", _RESIDUAL, tables=[_residual_table(diagnosis)])
        )
    if diagnosis.mismatch:
        text = "‖∇ℓ_t(θ) − ∇ℓ_t(target)‖ of the mean loss on each task's data."
        sections.append(Section("Gradient mismatch to the target", text, tables=[_mismatch_table(diagnosis)]))
    subtitle, title = (
        f"{diagnosis.base_name} and {counted(diagnosis.tuned, 'fine-tuned model')}",
        f"What {diagnosis.own} costs",
    )
    return Page(title, subtitle, diagnosis.verdict, sections, recipe, provenance, commands, diagnosis.notes)


def prediction_table(diagnosis: Diagnosis) -> Table:
    """Predicted loss and rank of every candidate on every task."""
    tasks, reference = diagnosis.prediction.tasks, diagnosis.reference
    columns = ["merge", *(f"{task}, {what}" for task in tasks for what in (f"× {reference}", "rank"))]
    rows = [
        [candidate, *(cell(candidate, task) for task in tasks for cell in (diagnosis.relative, diagnosis.rank))]
        for candidate in diagnosis.candidates
    ]
    note = "Relative to the reference merge; rank 1 is best."
    return Table("Predicted loss of each task", "predicted", columns, rows, note)


def _prediction_section(diagnosis: Diagnosis) -> Section:
    tasks = diagnosis.prediction.tasks
    values = {name: [diagnosis.relative(name, task) for task in tasks] for name in diagnosis.candidates}
    figure = Figure(
        "Predicted excess loss", "predicted-loss", bars(tasks, values, f"multiple of {diagnosis.reference}")
    )
    return Section("Predicted loss of each task", TRUST, [figure], [prediction_table(diagnosis)])


def _layer_section(diagnosis: Diagnosis) -> Section:
    groups, tasks, excess = diagnosis.prediction.groups, diagnosis.prediction.tasks, diagnosis.prediction.excess
    wholes = {task: excess(diagnosis.own, task) for task in tasks}
    shares = [
        [round(100 * excess(diagnosis.own, t, group) / wholes[t], 2) if wholes[t] > 0 else None for t in tasks]
        for group in groups
    ]
    chart = heat_map(groups, tasks, shares, "% of the task's predicted loss")
    text = (
        f"The share of each layer group in the predicted excess loss of {diagnosis.own}. Each column adds up to 100 %."
    )
    return Section("Which layers cost most", text, [Figure("Predicted cost by layer and task", "layers", chart)])


def _conflicts_table(diagnosis: Diagnosis) -> Table:
    pairs = itertools.combinations(diagnosis.tuned, 2)
    rows: list[list[Value]] = [[*pair, 100 * diagnosis.prediction.between(*pair).share] for pair in pairs]
    return Table("Pairs of tasks", "conflicts", ["task", "and", "opposed, % of the overlap"], rows)


def measured_table(diagnosis: Diagnosis) -> Table:
    """Metrics of every model with standard errors, and how merges compare with the one that is diagnosed."""
    compared = diagnosis.measured
    assert compared is not None
    columns = ["model", plain_words(compared.criterion.name), f"more than {diagnosis.own}"]
    columns += [
        f"{task}, {plain_words(headline(diagnosis.metrics(diagnosis.own, task)))}" for task in diagnosis.examples
    ]
    rows: list[list[Value]] = []
    for model, values in _measured_values(diagnosis).items():
        row = diagnosis.merges.get(model)
        apart = None if row is None or model == diagnosis.own else compared.difference(row, compared.reference)
        more = None if apart is None else "tie" if apart.tied else Measured(apart.value, apart.error)
        rows.append([model, None if row is None else compared.shown_score(row), more, *values])
    note = "± is a standard error. Merges are compared on the same rows; a tie is within two standard errors."
    return Table("Measured", "measured-table", columns, rows, note)


def _measured_values(diagnosis: Diagnosis) -> dict[str, list[float | None]]:
    """Model → the first metric of every task."""
    models = [BASE, FINE_TUNED, *diagnosis.candidates, *filter(None, [diagnosis.without_penalty])]
    names = {task: headline(diagnosis.metrics(diagnosis.own, task)) for task in diagnosis.examples}
    return {
        model: [with_error(diagnosis.metrics(model, task), name) for task, name in names.items()]
        for model in [*models, *([TARGET] if TARGET in diagnosis.outcomes else [])]
    }


def _metrics_section(diagnosis: Diagnosis) -> Section:
    kinds = sorted({headline(diagnosis.metrics(diagnosis.own, task)) for task in diagnosis.examples})
    label = plain_words(" / ".join(kinds)) + ("" if any(map(higher_is_better, kinds)) else ", lower is better")
    figure = Figure("Measured on data", "measured", bars(list(diagnosis.examples), _measured_values(diagnosis), label))
    counts = ", ".join(f"{task}: {count} rows" for task, count in diagnosis.examples.items())
    text = f"Measured on {counts}. `diagnosis.json` has all metrics, also the losses."
    return Section("Measured results", text, [figure], [measured_table(diagnosis)])


def _penalty_table(diagnosis: Diagnosis) -> Table:
    rows: list[Sequence[Value]] = []
    for task, check in diagnosis.penalty_checks.items():
        answer = None
        if check.ratio is not None:
            answer = "no" if check.ratio >= WITHOUT_PENALTY else "a similar one, or not to convergence"
            answer = "yes" if check.ratio < UNDER_PENALTY else answer
        rows.append([task, PENALTIES[check.penalty], answer, check.ratio, check.pull, check.gradient])
    columns = ["task", "P", "trained under P?", "ratio", "‖P Δ_t‖", "‖∇ℓ_t(θ_t)‖"]
    return Table("Penalty check", "penalty-check", columns, rows)


def _residual_table(diagnosis: Diagnosis) -> Table:
    rows: list[list[Value]] = [
        [
            name,
            r.residual,
            100 * r.residual / r.gradient if r.gradient > 0 else None,
            _relative_step(r.distance, r.moved),
        ]
        for name, r in diagnosis.residuals.items()
    ]
    columns = ["merge", "‖r‖, sum over examples", "‖r‖, % of the gradient Σ α ∇ℓ", "predicted step to the joint model"]
    return Table("Residual", "residual", columns, rows)


def _mismatch_table(diagnosis: Diagnosis) -> Table:
    tasks = list(diagnosis.examples)
    rows: list[list[Value]] = [
        [name, *(diagnosis.mismatch[name, task] for task in tasks)] for name in diagnosis.candidates
    ]
    return Table("True mismatch", "mismatch", ["merge", *tasks], rows)


def _relative_step(step: float, distance: float) -> str | None:
    """Return a step relative to the distance from the base, in words where the curvature is almost zero."""
    if distance <= 0:
        return None
    times = step / distance
    if times > 10:
        return "unknown: the curvature is almost zero there"
    return f"{number(100 * times, 2)} % of the distance" if times < 1 else f"{number(times, 2)} times the distance"
