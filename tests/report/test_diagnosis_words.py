"""What a diagnosis advises: never against what it measured."""

from __future__ import annotations

import pytest
import torch

from gradmerge.diagnostics.diagnosis import Diagnosis
from gradmerge.diagnostics.gauge import Gauge
from gradmerge.diagnostics.measured_merges import compare_merges
from gradmerge.diagnostics.predict import Cost, Interference, Prediction
from gradmerge.recipe import make_recipe
from gradmerge.report.diagnosis_page import _metrics_section, measured_table
from gradmerge.report.diagnosis_words import verdict
from gradmerge.tasks.uncertainty import standard_errors

OWN, OTHER, THIRD = "gradient-matching", "average", "task-arithmetic"
TASKS = ["a", "b", "base"]


def diagnosis(
    predicted: dict[str, float],
    right: dict[str, dict[str, int]],
    tasks: tuple[str, ...] = ("a", "b"),
    apart: float = 0.2,
    gauge: float | None = None,
    costs: dict[str, float] | None = None,
    without_penalty: str = "",
) -> Diagnosis:
    """Merges with a predicted loss each, and how many of 120 examples of each task models have right."""
    recipe = make_recipe({"method": OWN, "base": "base", "models": ["a", "b"]})
    prediction = Prediction(list(predicted), TASKS, moved={("a", "x"): 1.0, ("b", "x"): 1.0})
    for name, loss in predicted.items():
        for task in TASKS:
            prediction.costs[name, task, "x"] = Cost(loss * (costs or {}).get(task, 1.0))
    prediction.interference["a", "b", "x"] = Interference(1.0, apart)
    found = Diagnosis(recipe, OWN, prediction)
    if gauge is not None:
        found.gauges = {task: Gauge("H_0", gauge, 1.0, 1.0) for task in ("a", "b")}
    if right:
        found.examples, found.without_penalty = dict.fromkeys(tasks, 120), without_penalty
        for model, counts in right.items():
            rows = {task: {"accuracy": (torch.arange(120) < counts[task]).double()} for task in tasks}
            found.rows[model] = rows
            found.metrics[model] = {
                task: {"accuracy": counts[task] / 120, "standard_errors": standard_errors(one)}
                for task, one in rows.items()
            }
        found.measured = compare_merges(found)
    return found


def both(count: int) -> dict[str, int]:
    return dict.fromkeys(TASKS, count)


ALONE = {"base": both(110), "tuned": both(112)}


def test_another_method_that_measured_better_is_advised_though_it_is_predicted_to_be_worse() -> None:
    found = diagnosis({OWN: 1.0, OTHER: 3.0}, {**ALONE, OWN: both(80), OTHER: both(100)})
    words = " ".join(verdict(found))
    assert "**average measured better** than gradient-matching on the data of a, b: average accuracy 0.8333" in words
    assert (
        "Curvature predicts that its worst task loses more than with gradient-matching; the measurement counts" in words
    )
    assert "To try: average" in words


def test_what_is_predicted_to_be_better_is_not_advised_where_it_measured_worse() -> None:
    found = diagnosis({OWN: 3.0, OTHER: 1.0, THIRD: 4.0}, {**ALONE, OWN: both(100), OTHER: both(80), THIRD: both(99)})
    words = " ".join(verdict(found))
    assert "To try: average" not in words
    assert "none of the other methods is better than gradient-matching by more than two standard errors" in words
    assert "tied with it: task-arithmetic" in words
    assert "the worst task of average loses less; measured, it is worse (average accuracy 0.6667 ± " in words
    assert "and the measurement counts" in words


def test_what_is_predicted_to_be_better_is_not_advised_where_data_does_not_tell() -> None:
    words = " ".join(verdict(diagnosis({OWN: 3.0, OTHER: 1.0}, {**ALONE, OWN: both(100), OTHER: both(101)})))
    assert "To try: average" not in words and "measured, the two are tied" in words


def test_without_data_the_prediction_advises() -> None:
    assert "To try: average, whose worst task is predicted to lose less" in " ".join(
        verdict(diagnosis({OWN: 3.0, OTHER: 1.0}, {}))
    )
    costs = {"a": 0.5, "b": 0.5, "base": 1.0}
    # Of multiples of a reference, the base's is the largest.
    found = diagnosis({OWN: 1.0, THIRD: 1.0}, {}, costs=costs)
    found.prediction.costs[THIRD, "base", "x"] = Cost(0.95)
    assert "To try: smaller weights, since the base's own data is predicted to lose most" in verdict(found)[-1]


@pytest.mark.parametrize("merged", [110, 60])
def test_smaller_weights_are_advised_where_the_bases_data_measured_a_loss(merged: int) -> None:
    """Whatever is predicted of it."""
    right = {**ALONE, OWN: {"a": 111, "b": 111, "base": merged}}
    right["tuned"] = {"a": 112, "b": 112, "base": 110}
    words = " ".join(verdict(diagnosis({OWN: 1.0}, right, tasks=("a", "b", "base"), costs={"base": 9.0})))
    assert ("smaller weights" in words) == (merged == 60)


@pytest.mark.parametrize("merged", [112, 70])
def test_tasks_that_pull_apart_need_not_lose(merged: int) -> None:
    words = " ".join(verdict(diagnosis({OWN: 1.0}, {**ALONE, OWN: both(merged)}, apart=0.7)))
    assert ("expect a trade-off" in words) == (merged == 70)
    assert ("but measured, neither loses" in words) == (merged == 112)


@pytest.mark.parametrize(
    ("without", "says"), [(118, ": set `base"), (100, "the merge is tied"), (60, "leave it as it is")]
)
def test_the_gauge_advises_what_was_measured(without: int, says: str) -> None:
    name = f"{OWN}, base.penalty none"
    found = diagnosis({OWN: 1.0}, {**ALONE, OWN: both(99), name: both(without)}, gauge=2.0, without_penalty=name)
    words = " ".join(verdict(found))
    assert says in words and ("set `base.penalty: none`" in words) == (without == 118)
    assert "To try: gradient-matching, base" not in words
    alone = " ".join(verdict(diagnosis({OWN: 1.0}, {}, gauge=2.0)))
    assert "`base.penalty: none` may suit better" in alone


def test_numbers_have_their_errors_and_ties_are_called_so() -> None:
    found = diagnosis({OWN: 1.0, OTHER: 1.0}, {**ALONE, OWN: both(111), OTHER: both(60)})
    words = " ".join(verdict(found))
    assert (
        "On a (120 examples) its accuracy is 0.925 ± 0.024; the model tuned for it has 0.9333 ± 0.023, a tie" in words
    )
    table = {row[0]: row for row in measured_table(found, losses=False).rows}
    assert f"{table[OWN][1]:.4g}" == "0.925 ± 0.017" and f"{table[OTHER][2]:.4g}" == "-0.425 ± 0.033"
    assert table["tuned"][1:3] == [None, None] and f"{table['tuned'][3]:.4g}" == "0.9333 ± 0.023"


@pytest.mark.parametrize(("tasks", "names"), [(2, ["measured-table"]), (3, ["measured-table", "measured-losses"])])
def test_losses_of_many_tasks_have_a_table_of_their_own(tasks: int, names: list[str]) -> None:
    found = diagnosis({OWN: 1.0, OTHER: 2.0}, {OWN: both(90), OTHER: both(80), **ALONE}, tasks=tuple(TASKS[:tasks]))
    for number, model in enumerate(found.metrics.values()):
        for task, metrics in model.items():
            metrics["loss_per_example"] = number + len(task)
    tables = _metrics_section(found).tables
    assert [table.slug for table in tables] == names
    shown = {row[0]: row for row in tables[-1].rows}
    losses = shown[OTHER][1:] if tasks > 2 else shown[OTHER][4::2]
    assert losses == [1 + len(task) for task in TASKS[:tasks]]
    assert tasks == 2 or not any("loss" in column for column in tables[0].columns)


def test_a_removal_is_not_advised_to_lose_less() -> None:
    found = diagnosis({OWN: 3.0, OTHER: 1.0}, {})
    found.recipe = make_recipe({"method": "removal", "base": "base", "models": ["a"]})
    assert verdict(found)[-1] == (
        "To try: `gradmerge preview` over the strengths, with rows of what is to go and of what is to stay."
    )
