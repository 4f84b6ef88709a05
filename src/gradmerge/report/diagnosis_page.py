"""A diagnosis in words, tables and figures."""

from __future__ import annotations

from typing import Any

from ..diagnostics.diagnosis import Diagnosis
from ..diagnostics.predict import BASE
from ..diagnostics.scores import headline, higher_is_better, loss_of
from .charts import BarChart, HeatMap, ScatterChart, Series
from .page import Page, Section, Table

#: What predictions are held against.
REFERENCES = ("task-arithmetic", "task-arithmetic (negated)")
TRUST = (
    "Predictions come from curvature alone and are shown relative to a reference merge, because a diagonal sees little of the "
    "loss along the path: in an independent study of five sentiment models they ranked 50 to 70 merges by true loss with "
    "Spearman's ρ of 0.4 to 0.5 on average (0.9 on one task, 0 on another) and hardly ranked accuracy. They are good at telling "
    "which layers cost most. A handful of labelled rows (`--data NAME=SRC`) overrides them."
)


def reference_of(found: Diagnosis) -> str:
    """The merge that others are shown relative to: task arithmetic at the same weights, or else the recipe's own."""
    return next((name for name in REFERENCES if name in found.candidates), found.own)


def relative(found: Diagnosis, candidate: str, task: str) -> float | None:
    """Predicted excess loss of a task, as a multiple of the reference merge's."""
    reference = found.prediction.excess(reference_of(found), task)
    return found.prediction.excess(candidate, task) / reference if reference else None


def rank(found: Diagnosis, candidate: str, task: str) -> int:
    """1 for the candidate that is predicted to cost a task least."""
    own = found.prediction.excess(candidate, task)
    return 1 + sum(found.prediction.excess(other, task) < own for other in found.candidates)


def costliest(found: Diagnosis, count: int = 5) -> list[tuple[str, float]]:
    """Layer groups of the recipe's merge with their share of the predicted excess loss, all tasks weighing the same."""
    shares: dict[str, float] = {}
    tasks = [t for t in found.prediction.tasks if found.prediction.excess(found.own, t) > 0]
    for task in tasks:
        whole = found.prediction.excess(found.own, task)
        for group in found.prediction.groups:
            part = found.prediction.excess(found.own, task, group) / whole / len(tasks)
            shares[group] = shares.get(group, 0.0) + part
    return sorted(shares.items(), key=lambda item: -item[1])[:count]


def verdict(found: Diagnosis) -> list[str]:
    """What a user should know, in sentences."""
    tuned = [task for task in found.prediction.tasks if task != BASE]
    words = [
        f"{found.own} merges {len(tuned)} model{'s' if len(tuned) > 1 else ''} ({', '.join(tuned)}) into {_base(found)}."
    ]
    words += _measured_words(found) if found.metrics else _predicted_words(found)
    layers = costliest(found, 3)
    if layers:
        listed = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in layers)
        words.append(f"Most of the predicted cost sits in {listed}.")
    words += _interference_words(found, tuned)
    words.append(_advice(found))
    return words


def _base(found: Diagnosis) -> str:
    return found.recipe.base.model if found.recipe.base is not None else "nothing"


def _predicted_words(found: Diagnosis) -> list[str]:
    reference = reference_of(found)
    if reference == found.own:
        return []
    parts = [
        f"{value:.2g}× for {task}"
        for task in found.prediction.tasks
        if (value := relative(found, found.own, task)) is not None
    ]
    return [f"Beside {reference} at the same weights, its predicted loss is {', '.join(parts)}."] if parts else []


def _measured_words(found: Diagnosis) -> list[str]:
    words = []
    for task, metrics in found.metrics[found.own].items():
        name = headline(metrics)
        merged, tuned = metrics[name], found.metrics["tuned"][task].get(name)
        if merged is None or tuned is None:
            continue
        words.append(
            f"On {task} ({found.examples[task]} examples) its {name.replace('_', ' ')} is {merged:.4g}; the model tuned for it has {tuned:.4g}."
        )
    return words


def _interference_words(found: Diagnosis, tuned: list[str]) -> list[str]:
    pairs = [(found.prediction.between(a, b), a, b) for i, a in enumerate(tuned) for b in tuned[:i]]
    if not pairs:
        return []
    worst, a, b = max(pairs, key=lambda pair: pair[0].share)
    if worst.share > 0.5:
        return [
            f"{b} and {a} pull apart on {100 * worst.share:.0f} % of what they both care about: expect a trade-off between them."
        ]
    if worst.share < 0.005:
        return ["Where two tasks care about the same entries, they move them in the same direction."]
    return [
        f"No two tasks pull apart on more than {100 * worst.share:.0f} % of what they both care about (chance gives 50 %)."
    ]


def _advice(found: Diagnosis) -> str:
    def worst(candidate: str) -> float:
        return max(relative(found, candidate, task) or 0.0 for task in found.prediction.tasks)

    best = min(found.candidates, key=worst)
    if best != found.own and worst(best) < 0.9 * worst(found.own):
        return f"To try: {best}, whose worst task is predicted to lose less (`gradmerge preview` sweeps the weights)."
    costly = max(found.prediction.tasks, key=lambda task: relative(found, found.own, task) or 0.0)
    if costly == BASE:
        return "To try: smaller weights, since the base's own data is predicted to lose most (`gradmerge preview --suggest`)."
    return "To try: `gradmerge preview` over the weights, with a few labelled rows of each task."


def diagnosis_page(found: Diagnosis, provenance: dict[str, str], recipe: str, commands: list[str]) -> Page:
    sections = [_prediction_section(found), _layer_section(found)]
    if len(found.prediction.tasks) - (BASE in found.prediction.tasks) > 1:
        sections.append(_interference_section(found))
    if found.metrics:
        sections.append(_metrics_section(found))
    if found.residuals:
        sections.append(_residual_section(found))
    if found.mismatch:
        sections.append(_target_section(found))
    if found.notes:
        sections.append(Section("Notes", "\n\n".join(found.notes)))
    title = f"What {found.own} costs"
    return Page(
        title,
        f"{_base(found)} and {len(found.recipe.models)} tuned models",
        verdict(found),
        sections,
        recipe,
        provenance,
        commands,
    )


def prediction_table(found: Diagnosis) -> Table:
    reference = reference_of(found)
    columns = ["merge"]
    for task in found.prediction.tasks:
        columns += [f"{task}, × {reference}", f"{task}, rank"]
    rows: list[list[Any]] = []
    for candidate in found.candidates:
        row: list[Any] = [candidate]
        for task in found.prediction.tasks:
            row += [relative(found, candidate, task), rank(found, candidate, task)]
        rows.append(row)
    return Table(
        "Predicted loss of each task", "predicted", columns, rows, "Relative to the reference merge; rank 1 is best."
    )


def _prediction_section(found: Diagnosis) -> Section:
    tasks = found.prediction.tasks
    loss = {c: [relative(found, c, t) for t in tasks] for c in found.candidates}
    reference = reference_of(found)

    def mismatch(candidate: str, task: str) -> float | None:
        whole = found.prediction.mismatch(reference, task)
        return found.prediction.mismatch(candidate, task) / whole if whole else None

    pulls = {c: [mismatch(c, t) for t in tasks] for c in found.candidates}
    return Section(
        "What each task is expected to lose",
        TRUST,
        [
            BarChart("Predicted excess loss", "predicted-loss", f"multiple of {reference}", tasks, loss),
            BarChart("Predicted gradient mismatch", "predicted-mismatch", f"multiple of {reference}", tasks, pulls),
        ],
        [prediction_table(found)],
    )


def _layer_section(found: Diagnosis) -> Section:
    groups, tasks = found.prediction.groups, found.prediction.tasks
    shares = []
    for group in groups:
        row: list[float | None] = []
        for task in tasks:
            whole = found.prediction.excess(found.own, task)
            row.append(100 * found.prediction.excess(found.own, task, group) / whole if whole else None)
        shares.append(row)
    rows = [[group, *row] for group, row in zip(groups, shares, strict=True)]
    return Section(
        "Which layers cost most",
        f"Share of the predicted excess loss of {found.own} that each layer group has, task by task; a column adds up to 100 %.",
        [
            HeatMap(
                "Predicted cost by layer and task", "layers", groups, tasks, shares, "% of the task's predicted loss"
            )
        ],
        [Table("Predicted cost by layer", "layers-table", ["layer", *(f"{t}, %" for t in tasks)], rows)],
    )


def _interference_section(found: Diagnosis) -> Section:
    tuned = [task for task in found.prediction.tasks if task != BASE]
    rows: list[list[Any]] = []
    for i, one in enumerate(tuned):
        for other in tuned[:i]:
            shared = found.prediction.between(one, other)
            size = (sum(found.prediction.moved[one, g] for g in found.prediction.groups)
                    * sum(found.prediction.moved[other, g] for g in found.prediction.groups)) ** 0.5  # fmt: skip
            rows.append([other, one, 100 * shared.overlap / size if size else None, 100 * shared.share])
    values = [[None if a == b else 100 * found.prediction.between(a, b).share for b in tuned] for a in tuned]
    return Section(
        "Where tasks pull apart",
        "Two tasks overlap where both moved an entry that matters to both (√(H_s H_t) |Δ_s Δ_t|, summed). The share of the overlap "
        "with opposite signs is what a merge cannot serve both in; chance gives 50 %.",
        [HeatMap("Opposed share of the overlap", "interference", tuned, tuned, values, "% of the overlap")],
        [Table("Pairs of tasks", "interference-table", ["task", "and", "overlap, %", "opposed, % of it"], rows)],
    )


def _metrics_section(found: Diagnosis) -> Section:
    models = [BASE, "tuned", *found.candidates, *(["target"] if "target" in found.metrics else [])]
    tasks = list(found.examples)
    names = {task: headline(found.metrics[found.own][task]) for task in tasks}
    rows: list[list[Any]] = []
    for model in models:
        row: list[Any] = [model]
        for task in tasks:
            metrics = found.metrics[model][task]
            row += [metrics.get(names[task]), metrics.get("loss_per_example")]
        rows.append(row)
    columns = ["model"]
    for task in tasks:
        columns += [f"{task}, {names[task].replace('_', ' ')}", f"{task}, loss per example, nats"]
    bars = {m: [found.metrics[m][t].get(names[t]) for t in tasks] for m in models}
    kinds = sorted(set(names.values()))
    label = " / ".join(kinds).replace("_", " ") + (
        ", lower is better" if not any(higher_is_better(kind) for kind in kinds) else ""
    )
    return Section(
        "What data says",
        "Measured on " + ", ".join(f"{task}: {count} examples" for task, count in found.examples.items()) + ".",
        [BarChart("Measured on data", "measured", label, tasks, bars)],
        [Table("Measured", "measured-table", columns, rows)],
    )


def _residual_section(found: Diagnosis) -> Section:
    rows = [
        [
            name,
            r.residual,
            r.residual / r.gradient if r.gradient else None,
            r.distance,
            r.distance / r.moved if r.moved else None,
        ]
        for name, r in found.residuals.items()
    ]
    columns = ["merge", "‖r‖", "‖r‖ / ‖Σ α ∇ℓ‖", "‖H̄⁻¹r‖", "‖H̄⁻¹r‖ / ‖θ̂ − θ_0‖"]
    return Section(
        "How far from the jointly trained model",
        "r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ) is zero at the model trained on everything, and H̄⁻¹r is the predicted way to it. "
        "It needs no target model.",
        [],
        [Table("Stationarity residual", "residual", columns, rows)],
    )


def _target_section(found: Diagnosis) -> Section:
    series = []
    rows: list[list[Any]] = []
    for candidate in found.candidates:
        points = []
        for task in found.examples:
            metrics, goal = found.metrics[candidate][task], found.metrics["target"][task]
            gap = _gap(metrics, goal)
            points.append((found.mismatch[candidate, task], gap, task))
            rows.append([candidate, task, found.mismatch[candidate, task], gap])
        series.append(Series(candidate, [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]))
    label = (
        "difference in error to the target, points"
        if _has_accuracy(found)
        else "difference in loss per example to the target, nats"
    )
    return Section(
        "Mismatch against error",
        "‖∇ℓ_t(θ) − ∇ℓ_t(target)‖ of the mean loss on each task's data, against how much worse the merge is than the target.",
        [ScatterChart("Gradient mismatch and error", "mismatch", "true gradient mismatch", label, series)],
        [Table("True mismatch", "mismatch-table", ["merge", "task", "mismatch", label], rows)],
    )


def _has_accuracy(found: Diagnosis) -> bool:
    return all("accuracy" in metrics for metrics in found.metrics["target"].values())


def _gap(metrics: dict[str, Any], goal: dict[str, Any]) -> float | None:
    if "accuracy" in metrics and "accuracy" in goal:
        return 100 * float(goal["accuracy"] - metrics["accuracy"])
    return loss_of(metrics) - loss_of(goal)
