"""Figures of settings that were measured one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..compare.ranking import Outcome, Preview, headline, higher_is_better, unbeaten, with_error
from ..compare.settings import BASE
from ..report.figures import Series, heat_map, trade_off
from ..text import Measured, natural

if TYPE_CHECKING:
    import altair as alt


def trade_off_figure(found: Preview, present: Outcome, removed: Sequence[str]) -> alt.LayerChart | None:
    """Every setting as a point, the Pareto front, and the present setting; None if there are not two axes."""
    others = [task for task in found.tasks if task not in (removed or [BASE])]
    if removed:
        across, up, names = list(removed), others, ("forgotten: ", "kept: ")
    elif len(found.tasks) == 2:
        across, up, names = found.tasks[:1], found.tasks[1:], ("", "")
    elif BASE in found.tasks:
        across, up, names = others, [BASE], ("fine-tuned tasks: ", "")
    else:
        across, up, names = found.tasks[:1], found.tasks[1:], ("", "other tasks: ")
    if not across or not up:
        return None
    signs = [_sign(found, across) * (-1 if removed else 1), _sign(found, up)]
    points = [(row, _mean(row, across), _mean(row, up)) for row in found.rows]
    series = [
        Series(
            method,
            [x for row, x, _ in points if row.setting.method == method],
            [y for row, _, y in points if row.setting.method == method],
            [row.setting.name for row, _, _ in points if row.setting.method == method],
        )
        for method in found.methods
    ]
    gains = [((x, y), (signs[0] * x, signs[1] * y)) for _, x, y in points]
    now = _mean(present, across), _mean(present, up)
    labels = [_label(found, tasks, name) for tasks, name in zip((across, up), names, strict=True)]
    return trade_off(series, *labels, front=unbeaten(gains), present=now)


def _sign(found: Preview, tasks: Sequence[str]) -> int:
    return 1 if all(higher_is_better(found.metric(task)) for task in tasks) else -1


def _mean(row: Outcome, tasks: Sequence[str]) -> float:
    """The mean of the tasks' first metrics, with its standard error: the rows of tasks are independent."""
    known = [with_error(row.metrics[task], headline(row.metrics[task])) for task in tasks if row.metrics.get(task)]
    values = [value for value in known if value is not None]
    if len(values) < len(tasks):
        return math.nan
    errors = [error for value in values if (error := getattr(value, "error", None)) is not None]
    error = math.hypot(*errors) / len(values) if len(errors) == len(values) else None
    return Measured(sum(values) / len(values), error)


def _label(found: Preview, tasks: Sequence[str], name: str) -> str:
    metrics = " or ".join(dict.fromkeys(found.metric(task) for task in tasks))
    return f"{'mean ' if len(tasks) > 1 else ''}{metrics}, {name}{', '.join(tasks)}"


def predicted_layers(predicted: Outcome, own_costs: Mapping[str, float]) -> alt.LayerChart:
    """The predicted costs of a setting layer by layer, in percent of what the recipe's own merge costs the task."""
    layers = sorted(predicted.parts, key=natural)
    tasks = [task for task in predicted.costs if own_costs.get(task, 0.0) > 0]
    values = [
        [round(100 * predicted.parts[layer].get(task, 0.0) / own_costs[task], 2) for task in tasks] for layer in layers
    ]
    return heat_map(layers, tasks, values, "predicted loss, % of the recipe's own loss on the task")
