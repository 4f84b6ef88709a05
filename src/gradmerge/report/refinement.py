"""The reports of calibration, distillation and removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..refinement.calibrate import MERGE
from ..refinement.distances import Distances
from ..refinement.distill import Distillation
from ..refinement.influence import RemovalResult
from ..tasks.metrics import TIE
from ..text import count
from .figures import Series, curves
from .page import Figure, Page, Section, Table, Value

_EVALUATE = "Evaluate the result on labeled rows before you use it: `gradmerge evaluate`."
_DISTANCE = (
    "The distance of a block is ‖h − h_t‖² / ‖h_t‖². Here h is the block's output in the model, and h_t its output in "
    "the fine-tuned model of the task, on held-out rows."
)
_DISTILLATION = {
    "representations": "The loss of a task is ‖h − h_t‖² / ‖h_t‖². Here h is the representation in the model, and h_t "
    "that in the fine-tuned model.",
    "answers": "The loss of a task is the mean KL from the fine-tuned model's answers to the model's, in nats.",
    "both": "The loss of a task is ‖h − h_t‖² / ‖h_t‖² of representations, plus the mean KL of the answers in nats.",
}
_REMOVAL_STEP = (
    "A step changes the weights by s (S + λ)⁻¹ g. g is the gradient of the loss on the forget set, S the Kronecker "
    "curvature of the retain set, and λ a damping. s is the longest step that keeps the loss on held-out rows of the "
    "retain set within the budget."
)
_REMOVAL_CURVE = (
    "Each point is a step length s within the budget. The further to the right, the more is forgotten. The further up, "
    "the more is lost on the retain set. The star is the model that was written."
)


def calibration_page(title: str, chosen: str, layers: int, distances: Mapping[str, Distances]) -> Page:
    """The report of a calibration.

    Args:
        title: Of the page.
        chosen: The candidate that was written.
        layers: How many layers were solved.
        distances: Candidate → distances on held-out rows. Empty if they were not measured.
    """
    sections = []
    if distances:
        figures, tables = _distance_figures(chosen, distances), [_distance_table(distances)]
        sections.append(Section("Distance to the fine-tuned models", _DISTANCE, figures, tables))
    subtitle = f"{count(layers)} linear layers solved, with {chosen}" if chosen != MERGE else "the merge, unchanged"
    return Page(title, subtitle, calibration_verdict(chosen, distances), sections)


def calibration_verdict(chosen: str, distances: Mapping[str, Distances]) -> list[str]:
    """What a user should know, in sentences."""
    if not distances:
        return ["The distances to the fine-tuned models were not measured."]
    before, after = distances[MERGE].total, distances[chosen].total
    if chosen == MERGE:
        return ["Calibration did not bring the merge closer to the fine-tuned models. **The merge was kept.**"]
    measure = "distance to the fine-tuned models" + (" plus KL" if distances[MERGE].answers else "")
    fell = f"On held-out rows, the {measure}, averaged over tasks, fell from {before:.4g} to **{after:.4g}**."
    return [fell, _EVALUATE]


def _distance_figures(chosen: str, distances: Mapping[str, Distances]) -> list[Figure]:
    before, after = distances[MERGE].blocks, distances[chosen].blocks
    if len(before) < 2:
        return []
    numbers = [float(number) for number in range(1, len(before) + 1)]
    series = []
    for task in distances[MERGE].representations:
        series.append(Series(f"{task}, merge", numbers, [values[task] for values in before.values()]))
        if chosen != MERGE:
            series.append(Series(f"{task}, calibrated", numbers, [values[task] for values in after.values()]))
    chart = curves(series, "block", "distance to the fine-tuned model, lower is better")
    return [Figure("Distance to each fine-tuned model by block", "distances", chart)]


def _distance_table(distances: Mapping[str, Distances]) -> Table:
    rows: list[list[Value]] = [
        [name, task, value, one.answers.get(task)]
        for name, one in distances.items()
        for task, value in one.representations.items()
    ]
    columns = ["candidate", "task", "representations", "answers (KL, nats)"]
    note = (
        "Lower is better. Output factors weight errors by the curvature of a layer's output; the larger epsilon, the "
        "less they count. Answers are compared only where the tasks share a head."
    )
    return Table("Distances on held-out rows", "candidates", columns, rows, note)


def distillation_page(title: str, done: Distillation) -> Page:
    """The report of a distillation."""
    steps = [float(step) for step, _ in done.losses]
    tasks = list(done.losses[0][1])
    series = [Series(task, steps, [losses[task] for _, losses in done.losses]) for task in tasks]
    chart = curves(series, "step", "loss on held-out rows, lower is better")
    before, after = done.losses_at(0), done.losses_at(done.best_step)
    rows: list[list[Value]] = [[task, before[task], after[task]] for task in tasks]
    figures = [Figure("Loss on held-out rows", "losses", chart)]
    tables = [Table("Loss on held-out rows by task", "tasks", ["task", "before", "after"], rows)]
    sections = [Section("Loss on held-out rows", _DISTILLATION[done.match], figures, tables)]
    subtitle = f"{done.steps} steps at a learning rate of {done.lr:.3g}; the weights of step {done.best_step} were kept"
    return Page(title, subtitle, distillation_verdict(done), sections)


def distillation_verdict(done: Distillation) -> list[str]:
    """What a user should know, in sentences."""
    if not done.improved:
        return ["No step lowered the loss on held-out rows. **The model was kept as it was.**"]
    before, after = (sum(done.losses_at(step).values()) / len(done.losses_at(step)) for step in (0, done.best_step))
    return [f"The mean loss on held-out rows fell from {before:.4g} to **{after:.4g}**.", _EVALUATE]


def removal_page(result: RemovalResult, base: str, sources: Mapping[str, str], commands: Sequence[str]) -> Page:
    """The report of a removal."""
    rows = result.rows
    counts = f"{rows['forget_rows']} rows to forget, {rows['retain_rows'] + rows['held_out_rows']} rows to keep"
    title = "Loss on the retain set against loss on the forget set"
    sections = [
        Section(title, _REMOVAL_CURVE, [_removal_curve(title, result)]),
        Section("Losses", _REMOVAL_STEP, (), [_removal_losses(result)]),
    ]
    facts, title = {"model": base, **sources}, f"Removal from {base}"
    return Page(title, counts, removal_verdict(result), sections, "", facts, commands, result.notes)


def removal_card(result: RemovalResult) -> str:
    """The model card without its title."""
    count, steps = result.rows["forget_rows"], len(result.steps)
    how = "one influence step" if steps == 1 else f"{steps} influence steps"
    lines = "\n".join(f"| {name} | {before:.4g} | {after:.4g} |" for name, before, after, _ in result.losses())
    return f"""\
gradmerge removed {count} examples from this model with {how}.

| mean loss of an example | before | after |
|---|---:|---:|
{lines}

{_budget_text(result)} `gradmerge.json` in this repository has all numbers.
"""


def removal_verdict(result: RemovalResult) -> list[str]:
    """The result in sentences."""
    _, before, after, rise = result.losses()[0]
    tied = " The change is no more than two standard errors." if rise.error and abs(rise) <= TIE * rise.error else ""
    texts = [f"The loss on the forget set went from **{before:.4g} to {after:.4g}**.{tied}"]
    if result.until is not None:
        texts.append(f"The stopping level was {result.until:.4g}.")
    return [*texts, _budget_text(result)]


def _budget_text(result: RemovalResult) -> str:
    _, before, after, _ = result.losses()[1]
    rose = f"The loss on held-out rows of the retain set went from {before:.4g} to {after:.4g} ({result.used_text})"
    return f"{rose}. The budget was {100 * result.budget:.4g} %."


def _removal_curve(title: str, result: RemovalResult) -> Figure:
    series, start = [], (0.0, result.before.retain, result.before.forget)
    for number, step in enumerate(result.steps, 1):
        points = [start, *((t.s, t.retain, t.forget) for t in step.trials if t.forget is not None)]
        name = f"step {number}" if len(result.steps) > 1 else "over s"
        texts = [f"s = {s:.3g}" for s, _, _ in points]
        series.append(Series(name, [forget for *_, forget in points], [retain for _, retain, _ in points], texts))
        start = next(((0.0, retain, forget) for s, retain, forget in points if s == step.s), start)
    marks = [("before", result.before.retain)]
    marks.append((f"budget, +{100 * result.budget:.3g} %", result.before.retain * (1 + result.budget)))
    stars = [(series[-1].name, result.after.forget, result.after.retain)] if series else []
    labels = "mean loss on the forget set", "mean loss on held-out rows of the retain set"
    return Figure(title, "trade-off", curves(series, *labels, marks=marks, stars=stars))


def _removal_losses(result: RemovalResult) -> Table:
    rows: list[list[Value]] = [list(row) for row in result.losses()]
    note = "± is a standard error. That of the increase compares the same rows."
    return Table("Mean loss of an example", "losses", ["rows", "before", "after", "increase"], rows, note)
