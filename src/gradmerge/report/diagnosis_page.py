"""A diagnosis in words, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compare.diagnosis import Diagnosis
from ..compare.penalty_check import FAR, NEAR
from ..compare.predict import BASE
from ..compare.scores import headline, higher_is_better, loss_of, measured
from ..text import Measured
from .diagnosis_text import PENALTIES, base_of, pairs, ratio, tuned_of, verdict
from .figures import Series, bars, heat_map, trade_off
from .formatting import in_plain_words, number
from .notebook import in_notebooks
from .page import Figure, Page, Section, Table, Value

TRUST = (
    "Predictions come from curvature alone and are shown relative to a reference merge, because a diagonal sees little "
    "of the loss along the path: in an independent study of five sentiment models they ranked 50 to 70 merges by true "
    "loss with Spearman's ρ of 0.4 to 0.5 on average (0.9 on one task, 0 on another) and hardly ranked accuracy. They "
    "are good at telling which layers cost most. A handful of labelled rows (`--data NAME=SRC`) overrides them."
)


def diagnosis_page(found: Diagnosis, provenance: dict[str, str], recipe: str, commands: list[str]) -> Page:
    """The report of a diagnosis."""
    sections = [_prediction_section(found), _layer_section(found)]
    if len(tuned_of(found)) > 1:
        sections.append(_interference_section(found))
    if found.metrics:
        sections.append(_metrics_section(found))
    if found.gauges:
        sections.append(_gauge_section(found))
    if found.residuals:
        sections.append(_residual_section(found))
    if found.mismatch:
        sections.append(_target_section(found))
    if found.notes:
        sections.append(Section("Notes", "\n\n".join(found.notes)))
    subtitle = f"{base_of(found)} and {len(found.recipe.models)} tuned models"
    return Page(f"What {found.own} costs", subtitle, verdict(found), sections, recipe, provenance, commands)


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
        """What a merge costs a task, as a multiple of the reference's."""
        values = {c: [ratio(of(c, task), of(reference, task)) for task in tasks] for c in found.candidates}
        return Figure(title, slug, bars(tasks, values, f"multiple of {reference}"))

    figures = [
        shown("Predicted excess loss", "predicted-loss", found.prediction.excess),
        shown("Predicted gradient mismatch", "predicted-mismatch", found.prediction.mismatch),
    ]
    return Section("What each task is expected to lose", TRUST, figures, [prediction_table(found)])


def _layer_section(found: Diagnosis) -> Section:
    groups, tasks, excess = found.prediction.groups, found.prediction.tasks, found.prediction.excess
    wholes = {task: excess(found.own, task) for task in tasks}
    # A reader asks which layers cost most: beyond hundredths of a percent, digits tell nothing.
    shares = [
        [round(100 * excess(found.own, t, group) / wholes[t], 2) if wholes[t] > 0 else None for t in tasks]
        for group in groups
    ]
    rows = [[group, *row] for group, row in zip(groups, shares, strict=True)]
    label = "% of the task's predicted loss"
    return Section(
        "Which layers cost most",
        f"Share of the predicted excess loss of {found.own} that each layer group has, task by task; "
        "a column adds up to 100 %.",
        [Figure("Predicted cost by layer and task", "layers", heat_map(groups, tasks, shares, label))],
        [Table("Predicted cost by layer", "layers-table", ["layer", *(f"{t}, %" for t in tasks)], rows)],
    )


def _interference_section(found: Diagnosis) -> Section:
    prediction, tuned = found.prediction, tuned_of(found)
    moved = {task: sum(prediction.moved[task, group] for group in prediction.groups) for task in tuned}
    rows: list[list[Value]] = []
    for one, other in pairs(found):
        shared = prediction.between(one, other)
        most = (moved[one] * moved[other]) ** 0.5
        overlaps = [ratio(100 * value, most) for value in (shared.overlap, shared.chance)]
        rows.append([one, other, *overlaps, 100 * shared.share])
    values = [[None if a == b else 100 * prediction.between(a, b).share for b in tuned] for a in tuned]
    return Section(
        "Where tasks pull apart",
        "Two tasks overlap where both moved an entry that matters to both (√(H_s H_t) |Δ_s Δ_t|, summed). The share of "
        "the overlap with opposite signs is what a merge cannot serve both in. By chance it is 50 %, the white of the "
        "figure: blue pairs pull together, orange ones apart. The overlap itself is 100 % where two tasks moved the "
        "same entries in the same proportions; what chance gives it is in the table.",
        [
            Figure(
                "Opposed share of the overlap",
                "interference",
                heat_map(tuned, tuned, values, "% of the overlap", centre=50.0, reach=50.0),
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
    """What data says of every model: metrics with their errors, and how merges compare with the one diagnosed."""
    compared = found.measured
    assert compared is not None
    outcomes = {row.setting.method: row for row in compared.rows}
    columns = ["model", in_plain_words(compared.criterion.name), f"more than {found.own}"]
    rows: list[list[Value]] = []
    for model in (BASE, "tuned", *outcomes, *(["target"] if "target" in found.metrics else [])):
        row = outcomes.get(model)
        apart = (
            compared.difference(row, compared.reference) if row is not None and row is not compared.reference else None
        )
        more = None if apart is None else "tie" if apart.tied else Measured(apart.value, apart.error)
        rows.append([model, None if row is None else compared.shown_score(row), more])
    for task in found.examples:
        name = headline(found.metrics[found.own][task])
        shown = [name, "loss_per_example"] if losses and name != "loss_per_example" else [name]
        columns += [f"{task}, {in_plain_words(metric)}" for metric in shown]
        for cells in rows:
            cells += [measured(found.metrics[str(cells[0])][task], metric) for metric in shown]
    note = "± is a standard error; merges are compared on the same rows, and a tie is within two standard errors."
    return Table("Measured", "measured-table", columns, rows, note)


def losses_table(found: Diagnosis, models: Sequence[str]) -> Table:
    """What is beside the metrics of many tasks, in a table of its own: both together are wider than a page."""
    rows = [
        [model, *(measured(found.metrics[model][t], "loss_per_example") for t in found.examples)] for model in models
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
    models = [BASE, "tuned", *merges, *(["target"] if "target" in found.metrics else [])]
    tasks = list(found.examples)
    names = {task: headline(found.metrics[found.own][task]) for task in tasks}
    values = {model: [measured(found.metrics[model][task], names[task]) for task in tasks] for model in models}
    kinds = sorted(set(names.values()))
    lower = "" if any(map(higher_is_better, kinds)) else ", lower is better"
    tables = [measured_table(found)]
    if len(tasks) > 2 and any(name != "loss_per_example" for name in names.values()):
        tables = [measured_table(found, losses=False), losses_table(found, models)]
    return Section(
        "What data says",
        "Measured on " + ", ".join(f"{task}: {count} examples" for task, count in found.examples.items()) + ".",
        [Figure("Measured on data", "measured", bars(tasks, values, " / ".join(kinds).replace("_", " ") + lower))],
        tables,
    )


def _gauge_section(found: Diagnosis) -> Section:
    rows = [
        [t, PENALTIES[g.penalty], _gauge_meaning(g.gauge), g.gauge, g.pull, g.gradient] for t, g in found.gauges.items()
    ]
    return Section(
        "Were the models tuned under the penalty?",
        "Gradient matching takes each model to be tuned to the end under ½‖θ − θ_0‖²_P: then ∇ℓ_t(θ_t) = −P Δ_t, and "
        "the gauge ‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖ is 0. Around 1 or above, it was not, and P = 0 (`base.penalty: none`) "
        "may be the better assumption; what the merge measures with it stands among the others above. Gradients are of "
        "the data given, which should be rows that the model was tuned on: on few rows, or others, the gauge is too "
        "large.",
        tables=[
            Table(
                "Gauge of the penalty",
                "gauge",
                ["task", "P", "tuned under P?", "gauge", "‖P Δ_t‖", "‖∇ℓ_t(θ_t)‖"],
                rows,
            )
        ],
    )


def _residual_section(found: Diagnosis) -> Section:
    rows = [
        [name, r.residual, _percent(r.residual, r.gradient), _way(r.distance, r.moved)]
        for name, r in found.residuals.items()
    ]
    columns = ["merge", "‖r‖, sum over examples", "‖r‖, % of the gradient Σ α ∇ℓ", "step to the joint model, predicted"]
    return Section(
        "How far from the jointly trained model",
        "r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ) is zero at the model trained on everything, and H̄⁻¹r is the predicted "
        "step to it, in the table beside the way ‖θ̂ − θ_0‖ that the merge has come from the base. No target model is "
        "needed. `diagnosis.json` has every number.",
        tables=[Table("Stationarity residual", "residual", columns, rows)],
    )


def _percent(value: float, whole: float) -> Value:
    share = ratio(100 * value, whole)
    return share if share is None or share < 1000 else "over 1000: the base pulls harder"


def _way(step: float, way: float) -> str | None:
    """A step beside the way from the base, in words: where curvature is all but zero, a number would mislead."""
    times = ratio(step, way)
    if times is None:
        return None
    if times > 10:
        return "no telling: it lies where the curvature is all but zero"
    return f"{number(100 * times, 2)} % of the way" if times < 1 else f"{number(times, 2)} times the way"


def _gauge_meaning(gauge: float | None) -> str | None:
    if gauge is None:
        return None
    return "yes" if gauge < NEAR else "roughly, or not to the end" if gauge < FAR else "no"


def _target_section(found: Diagnosis) -> Section:
    tasks, series = list(found.examples), []
    rows: list[Sequence[Value]] = []
    for candidate in found.candidates:
        norms = [found.mismatch[candidate, task] for task in tasks]
        gaps = [_gap(found.metrics[candidate][task], found.metrics["target"][task]) for task in tasks]
        series.append(Series(candidate, norms, gaps, tasks))
        rows += [(candidate, *row) for row in zip(tasks, norms, gaps, strict=True)]
    accuracy = all("accuracy" in metrics for metrics in found.metrics["target"].values())
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
    measured_ones = [_metrics_section(found)] if found.metrics else []
    return [f for s in (*measured_ones, _prediction_section(found), _layer_section(found)) for f in s.figures]


in_notebooks(Diagnosis, _in_notebook)
