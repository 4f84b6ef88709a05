"""The merges of a diagnosis compared on data, as a preview compares its settings; and the recipe's without penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .candidates import Candidate
from .grid import Setting, recipe_with
from .in_memory import TaskData, materialise
from .penalty_check import FAR
from .predict import open_to_look
from .preview import Outcome, Preview, score_all
from .scores import headline

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

NO_PENALTY = ("base.penalty", "none")


def compare_merges(found: Diagnosis) -> Preview:
    """Every merge on the tasks that have data; the reference is the one that is diagnosed."""
    tasks = list(found.examples)
    rows = []
    for name in (*found.candidates, *filter(None, [found.without_penalty])):
        metrics = found.metrics[name]
        values = {task: metrics[task].get(headline(metrics[task])) for task in tasks}
        rows.append(Outcome(Setting(name, ()), values, metrics, rows=found.rows[name]))
    criterion = score_all(rows, True, "worst")
    compared = Preview(found.recipe, tasks, [], True, criterion, rows, rows[0], "", examples=found.examples)
    compared.rank_all()
    return compared


def measure_without_penalty(
    found: Diagnosis, own: Candidate, loaded: Mapping[str, TaskData], threads: int, allowed: dict[str, Any]
) -> None:
    """Where the gauge says that models were not tuned under the penalty: what the merge without it measures."""
    far = any((gauge.gauge or 0.0) >= FAR for gauge in found.gauges.values())
    if not far or own.model is not None or "penalty" not in found.recipe.rule.inputs or own.method == "removal":
        return
    setting = Setting(own.method, tuple(found.recipe.weights), changes=(NO_PENALTY,))
    plan = open_to_look(recipe_with(found.recipe, setting), **allowed)
    try:
        (state,) = materialise(plan, [own], threads)
    finally:
        plan.inputs.close()
    name = found.without_penalty = f"{own.name}, base.penalty none"
    found.metrics[name], found.rows[name] = {}, {}
    for task, data in loaded.items():
        found.metrics[name][task], found.rows[name][task] = data.evaluate_rows(data.model_with(state))
        data.forget()
