"""The report of a calibration: distances to the fine-tuned models, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..refinement.calibrate import MERGE
from ..refinement.distances import Distances
from ..text import count
from .figures import Series, curves
from .page import Figure, Page, Section, Table, Value, made


def calibration_page(
    title: str,
    chosen: str,
    layers: int,
    distances: Mapping[str, Distances],
    notes: Sequence[str],
    provenance: Mapping[str, str],
    commands: Sequence[str] = (),
) -> Page:
    """Build the report.

    Args:
        title: Of the page.
        chosen: The candidate that was written.
        layers: How many layers were solved.
        distances: Candidate → distances on held-out rows. Empty if they were not measured.
        notes: What a user should know.
        provenance: Names and paths for the end of the page.
        commands: What repeats the run.
    """
    sections = []
    if distances:
        sections.append(_distance_section(chosen, distances))
    if notes:
        sections.append(Section("Notes", "\n\n".join(notes)))
    subtitle = f"{count(layers)} linear layers solved, with {chosen}" if chosen != MERGE else "the merge, unchanged"
    return Page(
        title, subtitle, calibration_verdict(chosen, distances), sections, "", {**made(), **provenance}, commands
    )


def calibration_verdict(chosen: str, distances: Mapping[str, Distances]) -> list[str]:
    """What a user should know, in sentences."""
    if not distances:
        return ["The distances to the fine-tuned models were not measured."]
    before, after = distances[MERGE].total, distances[chosen].total
    if chosen == MERGE:
        return ["Calibration did not bring the merge closer to the fine-tuned models. **The merge was kept.**"]
    return [
        f"On held-out rows, the mean distance to the fine-tuned models fell from {before:.4g} to **{after:.4g}**.",
        "Evaluate the result on labeled rows before you use it: `gradmerge evaluate`.",
    ]


def _distance_section(chosen: str, distances: Mapping[str, Distances]) -> Section:
    text = (
        "The distance of a block is ‖h − h_t‖² / ‖h_t‖². Here h is the block's output in the model, and h_t its output "
        "in the fine-tuned model of the task, on held-out rows."
    )
    return Section("Distance to the fine-tuned models", text, _figures(chosen, distances), [_table(distances)])


def _figures(chosen: str, distances: Mapping[str, Distances]) -> list[Figure]:
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


def _table(distances: Mapping[str, Distances]) -> Table:
    columns = ["candidate", "task", "representations", "answers (KL, nats)"]
    rows: list[list[Value]] = [
        [name, task, value, one.answers.get(task)]
        for name, one in distances.items()
        for task, value in one.representations.items()
    ]
    note = "Lower is better. Answers are compared only where the tasks share a head."
    return Table("Distances on held-out rows", "candidates", columns, rows, note)
