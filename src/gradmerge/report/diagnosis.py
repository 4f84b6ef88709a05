"""The report of a diagnosis: figures and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compare.diagnose import TARGET, TUNED, UNDER_PENALTY, WITHOUT_PENALTY, Diagnosis
from ..compare.ranking import headline, higher_is_better, loss_of, with_error
from ..compare.settings import BASE
from ..text import Measured
from .advice import PENALTIES, TRUST, base_name, diagnosis_verdict, task_pairs, tuned_tasks
from .figures import Series, bars, heat_map, trade_off
from .page import Figure, Page, Section, in_notebooks
from .tables import Table, Value, number, plain_words


def diagnosis_page(found: Diagnosis, provenance: dict[str, str], recipe: str, commands: list[str]) -> Page:
    """The report of a diagnosis."""
    sections = [_prediction_section(found), _layer_section(found)]
    if len(tuned_tasks(found)) > 1:
        sections.append(_interference_section(found))
    if found.outcomes:
        sections.append(_metrics_section(found))
    if found.penalty_checks:
        sections.append(_penalty_section(found))
    if found.residuals:
        sections.append(_residual_section(found))
    if found.mismatch:
        sections.append(_target_section(found))
    if found.notes:
        sections.append(Section("Notes", "\n\n".join(found.notes)))
    subtitle = f"{base_name(found)} and {len(found.recipe.models)} fine-tuned models"
    return Page(f"What {found.own} costs", subtitle, diagnosis_verdict(found), sections, recipe, provenance, commands)


def prediction_table(found: Diagnosis) -> Table:
    """Predicted loss and rank of every candidate on every task."""
    tasks, reference = found.prediction.tasks, found.reference
    columns = ["merge", *(f"{task}, {what}" for task in tasks for what in (f"× {reference}", "rank"))]
    rows = [
        [candidate, *(cell(candidate, task) for task in tasks for cell in (found.relative, found.rank))]
        for candidate in found.candidates
    ]
    note = "Relative to the reference merge; rank 1 is best."
    return Table("Predicted loss of each task", "predicted", columns, rows, note)


def _prediction_section(found: Diagnosis) -> Section:
    tasks, reference = found.prediction.tasks, found.reference

    def shown(title: str, slug: str, of: Callable[[str, str], float]) -> Figure:
        """A number of each task, as a multiple of the reference's."""
        values = {c: [_ratio(of(c, task), of(reference, task)) for task in tasks] for c in found.candidates}
        return Figure(title, slug, bars(tasks, values, f"multiple of {reference}"))

    figures = [
        shown("Predicted excess loss", "predicted-loss", found.prediction.excess),
        shown("Predicted gradient mismatch", "predicted-mismatch", found.prediction.mismatch),
    ]
    return Section("Predicted loss of each task", TRUST, figures, [prediction_table(found)])


def _layer_section(found: Diagnosis) -> Section:
    groups, tasks, excess = found.prediction.groups, found.prediction.tasks, found.prediction.excess
    wholes = {task: excess(found.own, task) for task in tasks}
    shares = [
        [round(100 * excess(found.own, t, group) / wholes[t], 2) if wholes[t] > 0 else None for t in tasks]
        for group in groups
    ]
    rows = [[group, *row] for group, row in zip(groups, shares, strict=True)]
    label = "% of the task's predicted loss"
    return Section(
        "Which layers cost most",
        f"The share of each layer group in the predicted excess loss of {found.own}. Each column adds up to 100 %.",
        [Figure("Predicted cost by layer and task", "layers", heat_map(groups, tasks, shares, label))],
        [Table("Predicted cost by layer", "layers-table", ["layer", *(f"{t}, %" for t in tasks)], rows)],
    )


def _interference_section(found: Diagnosis) -> Section:
    prediction, tuned = found.prediction, tuned_tasks(found)
    moved = {task: sum(prediction.moved[task, group] for group in prediction.groups) for task in tuned}
    rows: list[list[Value]] = []
    for one, other in task_pairs(found):
        shared = prediction.between(one, other)
        most = (moved[one] * moved[other]) ** 0.5
        overlaps = [_ratio(100 * value, most) for value in (shared.overlap, shared.chance)]
        rows.append([one, other, *overlaps, 100 * shared.share])
    values = [[None if a == b else 100 * prediction.between(a, b).share for b in tuned] for a in tuned]
    return Section(
        "Conflicts between tasks",
        "Two tasks overlap in weights that both moved and that matter to both (Σ √(H_s H_t) |Δ_s Δ_t|). Where they "
        "moved in opposite directions, a merge cannot serve both. By chance that is 50 % of the overlap (white): blue "
        "pairs agree more, orange pairs conflict. The overlap is 100 % if both moved the same weights in the same "
        "proportions.",
        [
            Figure(
                "Opposed share of the overlap",
                "interference",
                heat_map(tuned, tuned, values, "% of the overlap", center=50.0, reach=50.0),
            )
        ],
        [
            Table(
                "Pairs of tasks",
                "interference-table",
                ["task", "and", "overlap, %", "by chance, %", "opposed, % of the overlap"],
                rows,
            )
        ],
    )


def measured_table(found: Diagnosis, losses: bool = True) -> Table:
    """Metrics of every model with standard errors, and how merges compare with the one that is diagnosed."""
    compared = found.measured
    assert compared is not None
    outcomes = {row.setting.method: row for row in compared.rows}
    columns = ["model", plain_words(compared.criterion.name), f"more than {found.own}"]
    rows: list[list[Value]] = []
    for model in (BASE, TUNED, *outcomes, *([TARGET] if TARGET in found.outcomes else [])):
        row = outcomes.get(model)
        apart = (
            compared.difference(row, compared.reference) if row is not None and row is not compared.reference else None
        )
        more = None if apart is None else "tie" if apart.tied else Measured(apart.value, apart.error)
        rows.append([model, None if row is None else compared.shown_score(row), more])
    for task in found.examples:
        name = headline(found.metrics(found.own, task))
        shown = [name, "loss_per_example"] if losses and name != "loss_per_example" else [name]
        columns += [f"{task}, {plain_words(metric)}" for metric in shown]
        for cells in rows:
            cells += [with_error(found.metrics(str(cells[0]), task), metric) for metric in shown]
    note = "± is a standard error. Merges are compared on the same rows; a tie is within two standard errors."
    return Table("Measured", "measured-table", columns, rows, note)


def losses_table(found: Diagnosis, models: Sequence[str]) -> Table:
    """The losses of many tasks, in a separate table because both would be wider than a page."""
    rows = [
        [model, *(with_error(found.metrics(model, t), "loss_per_example") for t in found.examples)] for model in models
    ]
    return Table(
        "Measured loss per example",
        "measured-losses",
        ["model", *found.examples],
        rows,
        "In nats; ± is a standard error.",
    )


def _metrics_section(found: Diagnosis) -> Section:
    merges = [*found.candidates, *filter(None, [found.without_penalty])]
    models = [BASE, TUNED, *merges, *([TARGET] if TARGET in found.outcomes else [])]
    tasks = list(found.examples)
    names = {task: headline(found.metrics(found.own, task)) for task in tasks}
    values = {model: [with_error(found.metrics(model, task), names[task]) for task in tasks] for model in models}
    kinds = sorted(set(names.values()))
    lower = "" if any(map(higher_is_better, kinds)) else ", lower is better"
    tables = [measured_table(found)]
    if len(tasks) > 2 and any(name != "loss_per_example" for name in names.values()):
        tables = [measured_table(found, losses=False), losses_table(found, models)]
    return Section(
        "Measured results",
        "Measured on " + ", ".join(f"{task}: {count} rows" for task, count in found.examples.items()) + ".",
        [Figure("Measured on data", "measured", bars(tasks, values, " / ".join(kinds).replace("_", " ") + lower))],
        tables,
    )


def _penalty_section(found: Diagnosis) -> Section:
    rows = [
        [t, PENALTIES[c.penalty], _penalty_answer(c.ratio), c.ratio, c.pull, c.gradient]
        for t, c in found.penalty_checks.items()
    ]
    text = (
        "Gradient matching assumes that each model was trained to convergence under ½‖θ − θ_0‖²_P. Then ∇ℓ_t(θ_t) = "
        "−P Δ_t, and the ratio ‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖ is 0. Around 1 or above, the model was trained without "
        "the penalty, and P = 0 (`base.penalty: none`) may suit better; the table above has what that merge measured. "
        "Use rows that the model was trained on: with few or other rows the ratio is too large."
    )
    columns = ["task", "P", "trained under P?", "ratio", "‖P Δ_t‖", "‖∇ℓ_t(θ_t)‖"]
    table = Table("Penalty check", "penalty-check", columns, rows)
    return Section("Were the models trained under the penalty?", text, tables=[table])


def _residual_section(found: Diagnosis) -> Section:
    rows = [
        [name, r.residual, _percent(r.residual, r.gradient), _way(r.distance, r.moved)]
        for name, r in found.residuals.items()
    ]
    columns = ["merge", "‖r‖, sum over examples", "‖r‖, % of the gradient Σ α ∇ℓ", "predicted step to the joint model"]
    return Section(
        "Distance to the jointly trained model",
        "r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ) is zero at the jointly trained model, and H̄⁻¹r is the predicted step to "
        "it. The table compares that step with the merge's distance ‖θ̂ − θ_0‖ from the base. `diagnosis.json` has "
        "all numbers.",
        tables=[Table("Residual", "residual", columns, rows)],
    )


def _ratio(value: float, whole: float) -> float | None:
    return value / whole if whole > 0 else None


def _percent(value: float, whole: float) -> Value:
    share = _ratio(100 * value, whole)
    return share if share is None or share < 1000 else "over 1000"


def _way(step: float, way: float) -> str | None:
    """A step relative to the distance from the base; in words where the curvature is almost zero."""
    times = _ratio(step, way)
    if times is None:
        return None
    if times > 10:
        return "unknown: the curvature is almost zero there"
    return f"{number(100 * times, 2)} % of the distance" if times < 1 else f"{number(times, 2)} times the distance"


def _penalty_answer(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    return (
        "yes" if ratio < UNDER_PENALTY else "a similar one, or not to convergence" if ratio < WITHOUT_PENALTY else "no"
    )


def _target_section(found: Diagnosis) -> Section:
    tasks, series = list(found.examples), []
    rows: list[Sequence[Value]] = []
    for candidate in found.candidates:
        norms = [found.mismatch[candidate, task] for task in tasks]
        gaps = [_gap(found.metrics(candidate, task), found.metrics(TARGET, task)) for task in tasks]
        series.append(Series(candidate, norms, gaps, tasks))
        rows += [(candidate, *row) for row in zip(tasks, norms, gaps, strict=True)]
    accuracy = all("accuracy" in metrics for metrics in found.outcomes[TARGET].metrics.values())
    label = f"difference in {'error' if accuracy else 'loss per example'} to the target"
    label += ", points" if accuracy else ", nats"
    return Section(
        "Mismatch against error",
        "‖∇ℓ_t(θ) − ∇ℓ_t(target)‖ of the mean loss on each task's data, against how much worse the merge is than the "
        "target.",
        [Figure("Gradient mismatch and error", "mismatch", trade_off(series, "true gradient mismatch", label))],
        [Table("True mismatch", "mismatch-table", ["merge", "task", "mismatch", label], rows)],
    )


def _gap(metrics: dict[str, Any], goal: dict[str, Any]) -> float:
    if "accuracy" in metrics and "accuracy" in goal:
        return 100 * float(goal["accuracy"] - metrics["accuracy"])
    return loss_of(metrics) - loss_of(goal)


def _in_notebook(found: Diagnosis) -> list[Figure]:
    measured_ones = [_metrics_section(found)] if found.outcomes else []
    return [f for s in (*measured_ones, _prediction_section(found), _layer_section(found)) for f in s.figures]


in_notebooks(Diagnosis, _in_notebook)
