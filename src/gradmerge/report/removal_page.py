"""The report and the model card of a removal by influence steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..refinement.influence import RemovalResult
from ..tasks.standard_errors import TIE
from .figures import Series, curves
from .notebook import in_notebooks
from .page import Figure, Page, Section, Table, Value, made

METHOD = (
    "A step changes the weights by s (S + λ)⁻¹ g. g is the gradient of the loss on the forget set, S the Kronecker "
    "curvature of the retain set, and λ a damping. s is the longest step that keeps the loss on held-out rows of the "
    "retain set within the budget."
)


def removal_page(result: RemovalResult, base: str, sources: Mapping[str, str], commands: Sequence[str]) -> Page:
    """The report of a removal."""
    rows = result.rows
    counts = f"{rows['forget_rows']} rows to forget, {rows['retain_rows'] + rows['held_out_rows']} rows to keep"
    sections = [
        Section("Loss on the retain set against loss on the forget set", CURVE_TEXT, [_chart(result)]),
        Section("Steps", METHOD, (), [_losses(result), _steps(result)]),
        *([Section("Notes", "\n\n".join(result.notes))] if result.notes else []),
    ]
    provenance = {**made(), "model": base, **sources}
    return Page(f"Removal from {base}", counts, verdict(result), sections, "", provenance, commands)


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


def verdict(result: RemovalResult) -> list[str]:
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


CURVE_TEXT = (
    "Each point is a step length s within the budget. The further to the right, the more is forgotten. The further up, "
    "the more is lost on the retain set. The star is the model that was written."
)


def _chart(result: RemovalResult) -> Figure:
    series, start = [], (0.0, result.before.retain, result.before.forget)
    for number, step in enumerate(result.steps, 1):
        points = [start, *((t.s, t.retain, t.forget) for t in step.trials if t.forget is not None)]
        name = f"step {number}" if len(result.steps) > 1 else "over s"
        texts = [f"s = {s:.3g}" for s, _, _ in points]
        series.append(Series(name, [forget for *_, forget in points], [retain for _, retain, _ in points], texts))
        start = next(((0.0, retain, forget) for s, retain, forget in points if s == step.s), start)
    marks = [("before", result.before.retain)]
    marks.append((f"budget, +{100 * result.budget:.3g} %", result.before.retain * (1 + result.budget)))
    stars = [(series[-1].name, result.after.forget, result.after.retain)]
    titles = "mean loss on the forget set", "mean loss on held-out rows of the retain set"
    chart = curves(series, *titles, marks=marks, stars=stars)
    return Figure("Loss on the retain set against loss on the forget set", "trade-off", chart)


def _losses(result: RemovalResult) -> Table:
    rows: list[list[Value]] = [list(row) for row in result.losses()]
    note = "± is a standard error. That of the increase compares the same rows."
    return Table("Mean loss of an example", "losses", ["rows", "before", "after", "increase"], rows, note)


def _steps(result: RemovalResult) -> Table:
    columns = ["step", "s", "λ", "lengths tried", "retain set after", "forget set after"]
    rows: list[list[Value]] = []
    for number, step in enumerate(result.steps, 1):
        taken = next((trial for trial in step.trials if trial.s == step.s), None)
        losses = (taken.retain, taken.forget) if taken is not None else (None, None)
        rows.append([number, step.s, step.damping, len(step.trials), *losses])
    return Table("Steps", "steps", columns, rows)


in_notebooks(RemovalResult, lambda result: [_chart(result)] if result.steps else [])
