"""The report of a distillation: the loss on held-out rows over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..refinement.distill import Distillation
from .figures import Series, curves
from .page import Figure, Page, Section, Table, Value, made


def distillation_page(
    title: str,
    done: Distillation,
    notes: Sequence[str],
    provenance: Mapping[str, str],
    commands: Sequence[str] = (),
) -> Page:
    """Build the report.

    Args:
        title: Of the page.
        done: The distillation.
        notes: What a user should know.
        provenance: Names and paths for the end of the page.
        commands: What repeats the run.
    """
    sections = [Section("Loss on held-out rows", _TEXT[done.match], [_figure(done)], [_table(done)])]
    if notes:
        sections.append(Section("Notes", "\n\n".join(notes)))
    subtitle = f"{done.steps} steps at a learning rate of {done.lr:.3g}; the weights of step {done.best_step} were kept"
    return Page(title, subtitle, distillation_verdict(done), sections, "", {**made(), **provenance}, commands)


_TEXT = {
    "representations": "The loss of a task is ‖h − h_t‖² / ‖h_t‖². Here h is the representation in the model, and h_t "
    "that in the fine-tuned model.",
    "answers": "The loss of a task is the mean KL from the fine-tuned model's answers to the model's, in nats.",
    "both": "The loss of a task is ‖h − h_t‖² / ‖h_t‖² of representations, plus the mean KL of the answers in nats.",
}


def distillation_verdict(done: Distillation) -> list[str]:
    """What a user should know, in sentences."""
    if not done.improved:
        return ["No step lowered the loss on held-out rows. **The model was kept as it was.**"]
    before, after = (sum(done.losses_at(step).values()) / len(done.losses_at(step)) for step in (0, done.best_step))
    return [
        f"The mean loss on held-out rows fell from {before:.4g} to **{after:.4g}**.",
        "Evaluate the result on labeled rows before you use it: `gradmerge evaluate`.",
    ]


def _figure(done: Distillation) -> Figure:
    steps = [float(step) for step, _ in done.losses]
    series = [Series(task, steps, [losses[task] for _, losses in done.losses]) for task in done.losses[0][1]]
    return Figure("Loss on held-out rows", "losses", curves(series, "step", "loss on held-out rows, lower is better"))


def _table(done: Distillation) -> Table:
    before, after = done.losses_at(0), done.losses_at(done.best_step)
    rows: list[list[Value]] = [[task, before[task], after[task]] for task in before]
    return Table("Loss on held-out rows by task", "tasks", ["task", "before", "after"], rows)
