"""The report of a diagnosis: figures and tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..compare.diagnose import FINE_TUNED, TARGET, UNDER_PENALTY, WITHOUT_PENALTY, Diagnosis
from ..compare.ranking import headline, higher_is_better, with_error
from ..compare.settings import BASE
from ..text import Measured
from .advice import PENALTIES, TRUST, base_name, diagnosis_verdict, task_pairs, tuned_tasks
from .figures import bars, heat_map
from .page import Figure, Page, Section
from .tables import Table, Value, number, plain_words

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


def diagnosis_page(found: Diagnosis, provenance: dict[str, str], recipe: str, commands: list[str]) -> Page:
    """The report of a diagnosis."""
    sections = [_metrics_section(found)] if found.outcomes else []
    sections += [_prediction_section(found), _layer_section(found)]
    if len(tuned_tasks(found)) > 1:
        sections.append(Section("Conflicts between tasks", _CONFLICTS, tables=[_conflicts_table(found)]))
    if found.penalty_checks:
        tables = [_penalty_table(found)]
        sections.append(Section("Were the models trained under the penalty?", _PENALTY, tables=tables))
    if found.residuals:
        sections.append(Section("Distance to the jointly trained model", _RESIDUAL, tables=[_residual_table(found)]))
    if found.mismatch:
        text = "‖∇ℓ_t(θ) − ∇ℓ_t(target)‖ of the mean loss on each task's data."
        sections.append(Section("Gradient mismatch to the target", text, tables=[_mismatch_table(found)]))
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
    tasks = found.prediction.tasks
    values = {name: [found.relative(name, task) for task in tasks] for name in found.candidates}
    figure = Figure("Predicted excess loss", "predicted-loss", bars(tasks, values, f"multiple of {found.reference}"))
    return Section("Predicted loss of each task", TRUST, [figure], [prediction_table(found)])


def _layer_section(found: Diagnosis) -> Section:
    groups, tasks, excess = found.prediction.groups, found.prediction.tasks, found.prediction.excess
    wholes = {task: excess(found.own, task) for task in tasks}
    shares = [
        [round(100 * excess(found.own, t, group) / wholes[t], 2) if wholes[t] > 0 else None for t in tasks]
        for group in groups
    ]
    chart = heat_map(groups, tasks, shares, "% of the task's predicted loss")
    text = f"The share of each layer group in the predicted excess loss of {found.own}. Each column adds up to 100 %."
    return Section("Which layers cost most", text, [Figure("Predicted cost by layer and task", "layers", chart)])


def _conflicts_table(found: Diagnosis) -> Table:
    rows: list[list[Value]] = [[*pair, 100 * found.prediction.between(*pair).share] for pair in task_pairs(found)]
    return Table("Pairs of tasks", "conflicts", ["task", "and", "opposed, % of the overlap"], rows)


def measured_table(found: Diagnosis) -> Table:
    """Metrics of every model with standard errors, and how merges compare with the one that is diagnosed."""
    compared = found.measured
    assert compared is not None
    columns = ["model", plain_words(compared.criterion.name), f"more than {found.own}"]
    columns += [f"{task}, {plain_words(headline(found.metrics(found.own, task)))}" for task in found.examples]
    rows: list[list[Value]] = []
    for model, values in _measured_values(found).items():
        row = found.merges.get(model)
        apart = None if row is None or model == found.own else compared.difference(row, compared.reference)
        more = None if apart is None else "tie" if apart.tied else Measured(apart.value, apart.error)
        rows.append([model, None if row is None else compared.shown_score(row), more, *values])
    note = "± is a standard error. Merges are compared on the same rows; a tie is within two standard errors."
    return Table("Measured", "measured-table", columns, rows, note)


def _measured_values(found: Diagnosis) -> dict[str, list[float | None]]:
    """Model → the first metric of every task."""
    models = [BASE, FINE_TUNED, *found.candidates, *filter(None, [found.without_penalty])]
    names = {task: headline(found.metrics(found.own, task)) for task in found.examples}
    return {
        model: [with_error(found.metrics(model, task), name) for task, name in names.items()]
        for model in [*models, *([TARGET] if TARGET in found.outcomes else [])]
    }


def _metrics_section(found: Diagnosis) -> Section:
    kinds = sorted({headline(found.metrics(found.own, task)) for task in found.examples})
    label = plain_words(" / ".join(kinds)) + ("" if any(map(higher_is_better, kinds)) else ", lower is better")
    figure = Figure("Measured on data", "measured", bars(list(found.examples), _measured_values(found), label))
    counts = ", ".join(f"{task}: {count} rows" for task, count in found.examples.items())
    text = f"Measured on {counts}. `diagnosis.json` has all metrics, also the losses."
    return Section("Measured results", text, [figure], [measured_table(found)])


def _penalty_table(found: Diagnosis) -> Table:
    rows: list[Sequence[Value]] = []
    for task, check in found.penalty_checks.items():
        answer = None
        if check.ratio is not None:
            answer = "no" if check.ratio >= WITHOUT_PENALTY else "a similar one, or not to convergence"
            answer = "yes" if check.ratio < UNDER_PENALTY else answer
        rows.append([task, PENALTIES[check.penalty], answer, check.ratio, check.pull, check.gradient])
    columns = ["task", "P", "trained under P?", "ratio", "‖P Δ_t‖", "‖∇ℓ_t(θ_t)‖"]
    return Table("Penalty check", "penalty-check", columns, rows)


def _residual_table(found: Diagnosis) -> Table:
    rows: list[list[Value]] = [
        [name, r.residual, _percent(r.residual, r.gradient), _relative_step(r.distance, r.moved)]
        for name, r in found.residuals.items()
    ]
    columns = ["merge", "‖r‖, sum over examples", "‖r‖, % of the gradient Σ α ∇ℓ", "predicted step to the joint model"]
    return Table("Residual", "residual", columns, rows)


def _mismatch_table(found: Diagnosis) -> Table:
    tasks = list(found.examples)
    rows: list[list[Value]] = [[name, *(found.mismatch[name, task] for task in tasks)] for name in found.candidates]
    return Table("True mismatch", "mismatch", ["merge", *tasks], rows)


def _percent(value: float, whole: float) -> Value:
    share = 100 * value / whole if whole > 0 else None
    return share if share is None or share < 1000 else "over 1000"


def _relative_step(step: float, distance: float) -> str | None:
    """A step relative to the distance from the base; in words where the curvature is almost zero."""
    if distance <= 0:
        return None
    times = step / distance
    if times > 10:
        return "unknown: the curvature is almost zero there"
    return f"{number(100 * times, 2)} % of the distance" if times < 1 else f"{number(times, 2)} times the distance"
