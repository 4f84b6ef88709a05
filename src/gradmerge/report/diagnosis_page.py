"""A diagnosis in words, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..diagnostics.diagnosis import Diagnosis
from ..diagnostics.gauge import FAR, NEAR
from ..diagnostics.predict import BASE
from ..diagnostics.scores import headline, higher_is_better, loss_of
from .figures import Series, bars, heat_map, trade_off
from .page import Figure, Page, Section, Table, Value

TRUST = (
    "Predictions come from curvature alone and are shown relative to a reference merge, because a diagonal sees little "
    "of the loss along the path: in an independent study of five sentiment models they ranked 50 to 70 merges by true "
    "loss with Spearman's ρ of 0.4 to 0.5 on average (0.9 on one task, 0 on another) and hardly ranked accuracy. They "
    "are good at telling which layers cost most. A handful of labelled rows (`--data NAME=SRC`) overrides them."
)

#: Where a model's P comes from, in words.
PENALTIES = {"recipe": "of the recipe", "recorded": "recorded beside it", "H_0": "H_0"}


def costliest(found: Diagnosis, count: int = 5) -> list[tuple[str, float]]:
    """Layer groups of the recipe's merge with their share of the predicted excess loss, all tasks weighing the same."""
    excess = found.prediction.excess
    wholes = {task: excess(found.own, task) for task in found.prediction.tasks}
    wholes = {task: whole for task, whole in wholes.items() if whole > 0}
    shares = {
        group: sum(excess(found.own, task, group) / whole / len(wholes) for task, whole in wholes.items())
        for group in (found.prediction.groups if wholes else ())
    }
    return sorted(shares.items(), key=lambda item: -item[1])[:count]


def verdict(found: Diagnosis) -> list[str]:
    """What a user should know, in sentences."""
    tuned = _tuned(found)
    several = "s" if len(tuned) > 1 else ""
    words = [f"{found.own} merges {len(tuned)} model{several} ({', '.join(tuned)}) into {_base(found)}."]
    words += _measured_words(found) if found.metrics else _predicted_words(found)
    layers = costliest(found, 3)
    if layers:
        listed = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in layers)
        words.append(f"Most of the predicted cost sits in {listed}.")
    return [*words, *_interference_words(found), *_gauge_words(found), _advice(found)]


def diagnosis_page(found: Diagnosis, provenance: dict[str, str], recipe: str, commands: list[str]) -> Page:
    """The report of a diagnosis."""
    sections = [_prediction_section(found), _layer_section(found)]
    if len(_tuned(found)) > 1:
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
    subtitle = f"{_base(found)} and {len(found.recipe.models)} tuned models"
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


def _base(found: Diagnosis) -> str:
    return found.recipe.base.model if found.recipe.base is not None else "nothing"


def _tuned(found: Diagnosis) -> list[str]:
    return [task for task in found.prediction.tasks if task != BASE]


def _pairs(found: Diagnosis) -> Iterable[tuple[str, str]]:
    tuned = _tuned(found)
    return ((one, other) for i, other in enumerate(tuned) for one in tuned[:i])


def _ratio(value: float, whole: float) -> float | None:
    return value / whole if whole > 0 else None


def _predicted_words(found: Diagnosis) -> list[str]:
    reference = found.reference
    if reference == found.own:
        return []
    times = {task: found.relative(found.own, task) for task in found.prediction.tasks}
    parts = [f"{value:.2g}× for {task}" for task, value in times.items() if value is not None]
    return [f"Beside {reference} at the same weights, its predicted loss is {', '.join(parts)}."] if parts else []


def _measured_words(found: Diagnosis) -> list[str]:
    words = []
    for task, metrics in found.metrics[found.own].items():
        name = headline(metrics)
        merged, tuned = metrics[name], found.metrics["tuned"][task].get(name)
        if merged is not None and tuned is not None:
            what = f"On {task} ({found.examples[task]} examples) its {name.replace('_', ' ')} is"
            words.append(f"{what} {merged:.4g}; the model tuned for it has {tuned:.4g}.")
    return words


def _interference_words(found: Diagnosis) -> list[str]:
    shares = {pair: found.prediction.between(*pair).share for pair in _pairs(found)}
    if not shares:
        return []
    (one, other), worst = max(shares.items(), key=lambda item: item[1])
    extent = f"{100 * worst:.0f} % of what they both care about"
    if worst > 0.5:
        return [f"{one} and {other} pull apart on {extent}: expect a trade-off between them."]
    if worst < 0.005:
        return ["Where two tasks care about the same entries, they move them in the same direction."]
    return [f"No two tasks pull apart on more than {extent} (chance gives 50 %)."]


def _gauge_words(found: Diagnosis) -> list[str]:
    known = {task: gauge for task, gauge in found.gauges.items() if gauge.gauge is not None}
    if not known:
        return []
    words = []
    for low, high, says in (
        (0.0, NEAR, "tuned under the penalty {}, as the merge assumes"),
        (NEAR, FAR, "tuned under something like the penalty {}, or not to the end"),
        (FAR, math.inf, "not tuned under the penalty {}: set `base.penalty: none`"),
    ):
        fitting = {task: gauge for task, gauge in known.items() if low <= (gauge.gauge or 0.0) < high}
        if fitting:
            names = ", ".join(f"{task} ({gauge.gauge:.2g})" for task, gauge in fitting.items())
            were = "were" if len(fitting) > 1 else "was"
            kinds = " and ".join(dict.fromkeys(PENALTIES[gauge.penalty] for gauge in fitting.values()))
            how = says.format(kinds)
            words.append(f"By the gauge (0: tuned under it; about 1 or more: not), {names} {were} {how}.")
    return words


def _advice(found: Diagnosis) -> str:
    def loss(candidate: str, task: str) -> float:
        return found.relative(candidate, task) or 0.0

    tasks = found.prediction.tasks
    worst = {candidate: max(loss(candidate, task) for task in tasks) for candidate in found.candidates}
    best = min(worst, key=lambda candidate: worst[candidate])
    if best != found.own and worst[best] < 0.9 * worst[found.own]:
        return f"To try: {best}, whose worst task is predicted to lose less (`gradmerge preview` sweeps the weights)."
    if max(tasks, key=lambda task: loss(found.own, task)) == BASE:
        why = "since the base's own data is predicted to lose most"
        return f"To try: smaller weights, {why} (`gradmerge preview --suggest`)."
    return "To try: `gradmerge preview` over the weights, with a few labelled rows of each task."


def _prediction_section(found: Diagnosis) -> Section:
    tasks, reference = found.prediction.tasks, found.reference

    def shown(title: str, slug: str, of: Callable[[str, str], float]) -> Figure:
        """What a merge costs a task, as a multiple of the reference's."""
        values = {c: [_ratio(of(c, task), of(reference, task)) for task in tasks] for c in found.candidates}
        return Figure(title, slug, bars(tasks, values, f"multiple of {reference}"))

    figures = [
        shown("Predicted excess loss", "predicted-loss", found.prediction.excess),
        shown("Predicted gradient mismatch", "predicted-mismatch", found.prediction.mismatch),
    ]
    return Section("What each task is expected to lose", TRUST, figures, [prediction_table(found)])


def _layer_section(found: Diagnosis) -> Section:
    groups, tasks, excess = found.prediction.groups, found.prediction.tasks, found.prediction.excess
    wholes = {task: excess(found.own, task) for task in tasks}
    shares = [[_ratio(100 * excess(found.own, t, group), wholes[t]) for t in tasks] for group in groups]
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
    prediction, tuned = found.prediction, _tuned(found)
    moved = {task: sum(prediction.moved[task, group] for group in prediction.groups) for task in tuned}
    rows: list[list[Value]] = []
    for one, other in _pairs(found):
        shared = prediction.between(one, other)
        overlap = _ratio(100 * shared.overlap, (moved[one] * moved[other]) ** 0.5)
        rows.append([one, other, overlap, 100 * shared.share])
    values = [[None if a == b else 100 * prediction.between(a, b).share for b in tuned] for a in tuned]
    return Section(
        "Where tasks pull apart",
        "Two tasks overlap where both moved an entry that matters to both (√(H_s H_t) |Δ_s Δ_t|, summed). The share of "
        "the overlap with opposite signs is what a merge cannot serve both in; chance gives 50 %.",
        [
            Figure(
                "Opposed share of the overlap",
                "interference",
                heat_map(tuned, tuned, values, "% of the overlap", centre=50.0),
            )
        ],
        [Table("Pairs of tasks", "interference-table", ["task", "and", "overlap, %", "opposed, % of it"], rows)],
    )


def _metrics_section(found: Diagnosis) -> Section:
    models = [BASE, "tuned", *found.candidates, *(["target"] if "target" in found.metrics else [])]
    tasks = list(found.examples)
    names = {task: headline(found.metrics[found.own][task]) for task in tasks}
    columns = ["model"]
    rows: list[list[Value]] = [[model] for model in models]
    for task, name in names.items():
        columns += [f"{task}, {name.replace('_', ' ')}", f"{task}, loss per example, nats"]
        for row, model in zip(rows, models, strict=True):
            metrics = found.metrics[model][task]
            row += [metrics.get(name), metrics.get("loss_per_example")]
    values = {model: [found.metrics[model][task].get(names[task]) for task in tasks] for model in models}
    kinds = sorted(set(names.values()))
    lower = "" if any(map(higher_is_better, kinds)) else ", lower is better"
    return Section(
        "What data says",
        "Measured on " + ", ".join(f"{task}: {count} examples" for task, count in found.examples.items()) + ".",
        [Figure("Measured on data", "measured", bars(tasks, values, " / ".join(kinds).replace("_", " ") + lower))],
        [Table("Measured", "measured-table", columns, rows)],
    )


def _gauge_section(found: Diagnosis) -> Section:
    rows = [[task, PENALTIES[g.penalty], g.gauge, g.pull, g.gradient] for task, g in found.gauges.items()]
    return Section(
        "Were the models tuned under the penalty?",
        "Gradient matching takes each model to be tuned to the end under ½‖θ − θ_0‖²_P: then ∇ℓ_t(θ_t) = −P Δ_t, and "
        "the gauge ‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖ is 0. Around 1 or above, it was not, and P = 0 (`base.penalty: none`) "
        "is the better assumption. Gradients are of the data given, which should be rows that the model was tuned on: "
        "on few rows, or others, the gauge is too large.",
        tables=[Table("Gauge of the penalty", "gauge", ["task", "P", "gauge", "‖P Δ_t‖", "‖∇ℓ_t(θ_t)‖"], rows)],
    )


def _residual_section(found: Diagnosis) -> Section:
    rows = [
        [name, r.residual, _ratio(r.residual, r.gradient), r.distance, _ratio(r.distance, r.moved)]
        for name, r in found.residuals.items()
    ]
    columns = ["merge", "‖r‖", "‖r‖ / ‖Σ α ∇ℓ‖", "‖H̄⁻¹r‖", "‖H̄⁻¹r‖ / ‖θ̂ − θ_0‖"]
    return Section(
        "How far from the jointly trained model",
        "r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ) is zero at the model trained on everything, and H̄⁻¹r is the predicted "
        "step to it. It needs no target model.",
        tables=[Table("Stationarity residual", "residual", columns, rows)],
    )


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
