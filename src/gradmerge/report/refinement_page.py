"""A refinement in words, a curve and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..diagnostics.scores import headline, loss_name, measured
from ..markdown import to_yaml
from ..refinement.rounds import Refinement
from ..text import Measured
from .figures import Series, curves
from .notebook import in_notebooks
from .numbers import in_plain_words
from .page import Figure, Page, Section, Table, Value, made


def refinement_page(done: Refinement, start: str, facts: Mapping[str, Any], commands: Sequence[str]) -> Page:
    """The report of a refinement: each task's loss over the rounds, and every step."""
    sections = [_curves(done), _steps(done)]
    if done.notes:
        sections.append(Section("Notes", "\n\n".join(done.notes)))
    tasks = facts["tasks"]
    provenance = {
        **made(),
        "start": start,
        "method": done.method,
        **{f"data of {name}": f"{task['data']}, {task['rows']} rows" for name, task in tasks.items()},
        **{f"teacher of {name}": teacher for name, teacher in facts.get("teachers", {}).items()},
        **{f"judged by, {name}": f"{task['valid']}, {task['held_rows']} rows" for name, task in tasks.items()},
    }
    asked = {name: facts[name] for name in ("method", "seed", "penalty_of", "teachers", "teaching") if name in facts}
    asked["tasks"] = {name: {k: task[k] for k in ("data", "valid", "examples")} for name, task in tasks.items()}
    subtitle = f"{start}, by {done.method}, on {len(tasks)} task{'s' if len(tasks) != 1 else ''}"
    return Page("What refinement gained", subtitle, verdict(done), sections, to_yaml(asked), provenance, commands)


def verdict(done: Refinement) -> list[str]:
    """What a user should know, in sentences."""
    first, last = done.rounds[0], done.rounds[-1]
    if not done.improved:
        return [f"The model is as it was: {done.stopped}."]
    count = len(done.rounds) - 1
    gained = 100 * (1 - last.judged / first.judged) if first.judged else 0.0
    loss = "taught loss" if done.teaching else "loss"
    words = [
        f"{count} round{'s' if count != 1 else ''} lowered the {loss} on the rows held back, summed over the tasks, "
        f"from {first.judged:.4g} to {last.judged:.4g} nats, by {gained:.0f} %."
    ]
    for task, before in done.before.items():
        name = headline(before)
        now, then = measured(done.after[task], name), measured(before, name)
        if now is not None and then is not None:
            tie = ", a tie on the same rows" if name in done.gains[task] and done.gains[task][name].tied else ""
            words.append(f"On {task} the {in_plain_words(name)} went from {then:.4g} to {now:.4g}{tie}.")
    worse = [task for task, loss in last.held.items() if loss > first.held[task] and not _tied(done, task)]
    if worse:
        words.append(f"{', '.join(worse)} lost what others gained.")
    if done.stopped:
        words.append(f"It ended early: {done.stopped}.")
    return words


def _tied(done: Refinement, task: str) -> bool:
    """Whether the rows held back do not tell a task's loss before and after apart."""
    gain = done.gains.get(task, {}).get(loss_name(done.before.get(task, {})))
    return gain is not None and gain.tied


def metrics_table(done: Refinement) -> Table:
    """Per task the loss and the headline metric on the rows held back, before and after."""
    rows: list[Sequence[Value]] = []
    for task, before in done.before.items():
        name = headline(before)
        loss, after, gains = loss_name(before), done.after[task], done.gains[task]
        row: list[Value] = [task, measured(before, loss), measured(after, loss), in_plain_words(name)]
        gained = Measured(gains[name].value, gains[name].error) if name in gains else None
        rows.append([*row, measured(before, name), measured(after, name), gained])
    columns = ["task", "loss before", "loss after", "metric", "before", "after", "change"]
    note = "Loss: the mean over rows, in nats. ± is a standard error; that of the change is taken on the same rows."
    return Table("Rows held back", "held-back", columns, rows, note)


def _curves(done: Refinement) -> Section:
    places = [float(number) for number in range(len(done.rounds))]
    series = [
        Series(task, places, [Measured(one.held[task], one.errors.get(task)) for one in done.rounds])
        for task in done.rounds[0].held
    ]
    bars = "Bars are ± 1 standard error. " if done.rounds[0].errors else ""
    if done.teaching:
        bars += f"Of tasks with a teacher, {done.teaching:g} of the loss is to its answers; the table's is to labels. "
    unit = "pass" if done.method == "adamw" else "round"
    chart = curves(series, f"{unit}, 0 is the start", "mean loss of a row, nats")
    return Section(
        "Each task's loss over the rounds",
        f"{bars}These rows chose the steps and decided when to stop, so their loss is a little "
        "too good: judge the result on others.",
        [Figure("Loss on rows held back", "losses", chart)],
        [metrics_table(done)],
    )


def _steps(done: Refinement) -> Section:
    rows: list[Sequence[Value]] = []
    for number, one in enumerate(done.rounds):
        for step in one.steps:
            ridge = step.ridge if done.method == "newton" else None
            rows.append([number, step.length, step.part, step.damping, ridge])
    what = "learning rate" if done.method == "adamw" else "damping λ"
    columns = ["round", "‖step‖" if done.method == "newton" else "from the start", "part", what, "ridge"]
    words = {
        "gradient": "for gradients",
        "curvature": "for curvature",
        "along": "along directions",
        "rows": "for losses",
    }
    passes = ", ".join(f"{done.passes[name]} {what}" for name, what in words.items() if done.passes[name])
    return Section(
        "Steps",
        f"Passes over the rows: {passes}; over those held back: {done.passes['held']}. It took {done.seconds:.1f} s.",
        tables=[Table("Steps that were taken", "steps", columns, rows)],
    )


in_notebooks(Refinement, lambda done: _curves(done).figures)
