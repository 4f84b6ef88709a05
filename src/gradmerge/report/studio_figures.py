"""Figures of settings that were measured one after another, and of the one that is looked at now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..compare.ranking import Outcome, Preview, headline, higher_is_better, unbeaten
from ..compare.settings import BASE
from ..text import natural
from .figures import Series, bars, heat_map, trade_off

if TYPE_CHECKING:
    import altair as alt

Point = tuple[float, float | None]
"""A value and its standard error."""


def figures(
    found: Preview, present: Outcome, best: Outcome | None, removed: Sequence[str]
) -> dict[str, alt.LayerChart]:
    """`tasks`: metrics of the present setting beside others'; `front`: all settings, and those that none beats; of a
    removal `trade-off`: what is forgotten against what is kept."""
    charts = {"tasks": _tasks(found, present, best)}
    if removed:
        kept = [task for task in found.tasks if task not in removed]
        if kept:
            charts["trade-off"] = _points(found, present, (removed, "forgotten"), (kept, "kept"), forget=True)
    elif len(found.tasks) > 1:
        charts["front"] = _points(found, present, *_axes(found.tasks))
    return charts


def _tasks(found: Preview, present: Outcome, best: Outcome | None) -> alt.LayerChart:
    """Bars of every task: the base, its own tuned model, the best so far, and now."""
    series: dict[str, list[Point | None]] = {}
    if BASE in found.alone:
        series["base"] = [_metric(found.alone[BASE].get(task)) for task in found.tasks]
    series["tuned"] = [None if task == BASE else _metric(found.alone.get(task, {}).get(task)) for task in found.tasks]
    if best is not None and best.setting != present.setting:
        series["best so far"] = [_metric(best.metrics.get(task)) for task in found.tasks]
    series[f"{present.setting.method} now"] = [_metric(present.metrics.get(task)) for task in found.tasks]
    values = {name: [None if one is None else one[0] for one in every] for name, every in series.items()}
    errors = {name: [None if one is None else one[1] for one in every] for name, every in series.items()}
    names = list(dict.fromkeys(found.metric(task) for task in found.tasks))
    groups = [task if len(names) == 1 else f"{task} ({found.metric(task)})" for task in found.tasks]
    return bars(groups, values, names[0] if len(names) == 1 else "metric of the task", errors=errors)


def _metric(metrics: Mapping[str, Any] | None) -> Point | None:
    if not metrics:
        return None
    name = headline(metrics)
    return float(metrics[name]), (metrics.get("standard_errors") or {}).get(name)


Axis = tuple[Sequence[str], str]
"""Tasks whose metrics are averaged, and what they are together."""


def _axes(tasks: Sequence[str]) -> tuple[Axis, Axis]:
    """Two tasks; of more, the tuned ones against the base's own data, or the first against the others."""
    if len(tasks) == 2:
        return ([tasks[0]], ""), ([tasks[1]], "")
    if BASE in tasks:
        return ([task for task in tasks if task != BASE], "tuned tasks"), ([BASE], "")
    return (tasks[:1], ""), (tasks[1:], "other tasks")


def _points(found: Preview, present: Outcome, across: Axis, up: Axis, *, forget: bool = False) -> alt.LayerChart:
    """Every setting as a point, and a line through those that none is better than on both axes."""
    better = [_direction(found, tasks) for tasks, _ in (across, up)]
    if forget:
        better[0] = -better[0]
    known = [(row, _mean(row, across[0]), _mean(row, up[0])) for row in found.rows]
    series = []
    for method in dict.fromkeys(row.setting.method for row in found.rows):
        own = [(row, x, y) for row, x, y in known if row.setting.method == method]
        series.append(
            Series(
                method,
                [x[0] for _, x, _ in own],
                [y[0] for _, _, y in own],
                [row.setting.name for row, _, _ in own],
                [y[1] for _, _, y in own],
                [x[1] for _, x, _ in own],
            )
        )
    gains = [((x[0], y[0]), (better[0] * x[0], better[1] * y[0])) for _, x, y in known]
    now = (_mean(present, across[0])[0], _mean(present, up[0])[0])
    labels = [_label(found, *axis) for axis in (across, up)]
    return trade_off(series, *labels, front=unbeaten(gains), present=now)


def _direction(found: Preview, tasks: Sequence[str]) -> float:
    return 1.0 if all(higher_is_better(found.metric(task)) for task in tasks) else -1.0


def _mean(row: Outcome, tasks: Sequence[str]) -> Point:
    """The mean over tasks of their metrics; their rows have nothing to do with each other."""
    known = [point for task in tasks if (point := _metric(row.metrics.get(task))) is not None]
    if len(known) < len(tasks):
        return math.nan, None
    errors = [error for _, error in known if error is not None]
    error = math.hypot(*errors) / len(known) if len(errors) == len(known) else None
    return sum(value for value, _ in known) / len(known), error


def _label(found: Preview, tasks: Sequence[str], words: str) -> str:
    metrics = " or ".join(dict.fromkeys(found.metric(task) for task in tasks))
    which = ", ".join(tasks)
    average = "mean " if len(tasks) > 1 else ""
    return f"{average}{metrics}, {words + ': ' if words else ''}{which}"


def predicted_layers(predicted: Outcome, own_costs: Mapping[str, float]) -> alt.LayerChart:
    """Where a setting is predicted to cost a task something, as a share of what the recipe's own costs it in all."""
    layers = sorted(predicted.parts, key=natural)
    tasks = [task for task in predicted.costs if own_costs.get(task, 0.0) > 0]
    # A reader asks which layers cost most: beyond hundredths of a percent, digits tell nothing.
    share: Callable[[str, str], float] = lambda layer, task: predicted.parts[layer].get(task, 0.0) / own_costs[task]  # noqa: E731
    values = [[round(100 * share(layer, task), 2) for task in tasks] for layer in layers]
    return heat_map(layers, tasks, values, "predicted loss, % of what the recipe's own costs the task in all")


def remaining_layers(remaining: Mapping[str, Mapping[str, float]], models: Sequence[str]) -> alt.LayerChart:
    """How far a setting still is from each tuned model, layer by layer; the base is at 1."""
    layers = sorted(remaining, key=natural)
    values = [[remaining[layer].get(model) for model in models] for layer in layers]
    return heat_map(layers, models, values, "distance to the tuned model, where the base's is 1", centre=1.0)
