"""A removal by influence steps, in words, a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence

from ..refinement.influence import InfluenceRemoval
from ..tasks.uncertainty import TIE
from .figures import Series, curves
from .notebook import in_notebooks
from .page import Figure, Page, Section, Table, Value, made

HOW = (
    "Each step goes along (S + λ)⁻¹ g: g the gradient of what is to be forgotten, S the Kronecker curvature of what is "
    "kept. Its length s is the largest that keeps the loss of kept examples, measured on rows that are held back, "
    "within the budget; the Newton length is what the quadratic model would take."
)


def removal_page(found: InfluenceRemoval, base: str, forget: str, keep: str, commands: Sequence[str]) -> Page:
    """The report of a removal."""
    rows = found.rows
    counted = f"{rows['forget_rows']} examples forgotten, {rows['keep_rows'] + rows['held_rows']} kept"
    sections = [
        Section("What is lost for what is forgotten", _curve_text(found), [_chart(found)]),
        Section("Steps", HOW, (), [_losses(found), _rounds(found)]),
        *([Section("Notes", "\n\n".join(found.notes))] if found.notes else []),
    ]
    given = {**made(), "model": base, "forget": forget, "keep": keep}
    return Page(f"Removal from {base}", counted, verdict(found), sections, "", given, commands)


def removal_card(found: InfluenceRemoval, forget: str, keep: str) -> str:
    """The model card below its title."""
    count = found.rows["forget_rows"]
    lines = "\n".join(f"| {name} | {before:.4g} | {after:.4g} |" for name, before, after, _ in found.losses())
    return f"""\
What the model had learned from {count} examples was taken out by **influence steps** with gradmerge.

| mean loss of an example | before | after |
|---|---:|---:|
{lines}

{_budget_words(found)} `gradmerge.json` in this repository holds every step.
"""


def verdict(found: InfluenceRemoval) -> list[str]:
    """What a user should know, in sentences."""
    _, before, after, rise = found.losses()[0]
    tied = " That is no more than two standard errors." if rise.error and abs(rise) <= TIE * rise.error else ""
    lost = f"went from **{before:.4g} to {after:.4g}**"
    return [f"The mean loss of an example that is to be forgotten {lost}.{tied}", _budget_words(found)]


def _budget_words(found: InfluenceRemoval) -> str:
    _, before, after, _ = found.losses()[1]
    rose = f"The loss of a kept one went from {before:.4g} to {after:.4g} ({found.used_words} on the same rows)"
    return (
        f"{rose}; the budget was {100 * found.budget:.4g} %."
        if found.budget is not None
        else f"{rose}; without a budget."
    )


def _curve_text(found: InfluenceRemoval) -> str:
    text = (
        "Each point is a length s of a step, each curve a round. Further to the right more is forgotten, further up "
        "more of the rest is lost; the star is the model that was written."
    )
    return text if len(found.rounds) == 1 else text + " Between two rounds, steps on the kept rows go down again."


def _chart(found: InfluenceRemoval) -> Figure:
    series = []
    for place, one in enumerate(found.rounds, 1):
        # Beyond twice the budget a curve says nothing more, and would hide the others.
        most = found.before.kept * (1 + 2 * found.budget) if found.budget is not None else float("inf")
        shown = [trial for trial in one.curve if trial.kept <= most] or one.curve[:1]
        words = [f"s = {trial.s:.3g}" for trial in shown]
        name = f"round {place}" if len(found.rounds) > 1 else "over s"
        series.append(Series(name, [t.forget for t in shown], [t.kept for t in shown], words))
    marks = [("before", found.before.kept)]
    if found.budget is not None:
        marks.append((f"budget, +{100 * found.budget:.3g} %", found.before.kept * (1 + found.budget)))
    last = series[-1].name
    stars = [(last, found.after.forget, found.after.kept)]
    forgotten, kept = (
        "mean loss of an example to forget, higher is better",
        "mean loss of a kept example, lower is better",
    )
    chart = curves(series, forgotten, kept, marks=marks, stars=stars)
    return Figure("Kept loss against the loss of what is forgotten", "trade-off", chart)


def _losses(found: InfluenceRemoval) -> Table:
    rows: list[list[Value]] = [list(row) for row in found.losses()]
    note = "± is a standard error; that of the rise is taken on the same rows."
    return Table("Mean loss of an example", "losses", ["examples", "before", "after", "rose by"], rows, note)


def _rounds(found: InfluenceRemoval) -> Table:
    columns = ["round", "s", "Newton length", "λ", "kept before the step", "kept after", "to forget after"]
    rows: list[list[Value]] = [
        [place, one.chosen.s, one.newton, one.damping, one.curve[0].kept, one.chosen.kept, one.chosen.forget]
        for place, one in enumerate(found.rounds, 1)
    ]
    return Table("Rounds", "rounds", columns, rows)


in_notebooks(InfluenceRemoval, lambda found: [_chart(found)] if found.rounds else [])
