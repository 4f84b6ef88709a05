"""What a diagnosis advises: never against what it measured."""

from __future__ import annotations

import pytest
import torch

from gradmerge.compare.diagnose import Diagnosis, PenaltyCheck
from gradmerge.compare.predict import Prediction
from gradmerge.compare.ranking import Outcome
from gradmerge.compare.settings import make_setting
from gradmerge.recipe import make_recipe
from gradmerge.report.advice import diagnosis_verdict as verdict
from gradmerge.report.comparison import measured_table
from gradmerge.rules import METHODS
from gradmerge.tasks.metrics import standard_errors

OWN, OTHER, THIRD = "gradient-matching", "average", "task-arithmetic"
TASKS = ["a", "b", "base"]


def diagnosis(
    predicted: dict[str, float],
    right: dict[str, dict[str, int]],
    tasks: tuple[str, ...] = ("a", "b"),
    apart: float = 0.2,
    ratio: float | None = None,
    costs: dict[str, float] | None = None,
    without_penalty: str = "",
) -> Diagnosis:
    """Merges with a predicted loss each, and how many of 120 examples of each task models have right."""
    recipe = make_recipe({"method": OWN, "base": "base", "models": ["a", "b"]})
    prediction = Prediction(list(predicted), TASKS)
    losses = [[loss * (costs or {}).get(task, 1.0) for task in TASKS] for loss in predicted.values()]
    conflicts = torch.zeros(3, 3, 2)
    conflicts[0, 1] = conflicts[1, 0] = torch.tensor([1.0, apart])
    prediction.add("x", torch.tensor(losses)[..., None] * torch.tensor([1.0, 0.0, 0.0]), conflicts)
    found = Diagnosis(recipe, OWN, prediction)
    if ratio is not None:
        found.penalty_checks = {task: PenaltyCheck("H_0", ratio, 1.0, 1.0) for task in ("a", "b")}
    if right:
        found.examples, found.without_penalty = dict.fromkeys(tasks, 120), without_penalty
        for model, counts in right.items():
            rows = {task: {"accuracy": (torch.arange(120) < counts[task]).double()} for task in tasks}
            metrics = {
                task: {"accuracy": counts[task] / 120, "standard_errors": standard_errors(one)}
                for task, one in rows.items()
            }
            method = model if model in METHODS else OWN
            changes = {"base.penalty": "none"} if model == without_penalty else {}
            found.outcomes[model] = Outcome(make_setting(recipe, method, changes), metrics, rows=rows)
        found.rank_measured()
    return found


def both(count: int) -> dict[str, int]:
    return dict.fromkeys(TASKS, count)


ALONE = {"base": both(110), "fine-tuned model": both(112)}


def words_of(found: Diagnosis) -> str:
    return " ".join(verdict(found))


MEASURED = {
    "measured better": ({OWN: 1.0, OTHER: 3.0}, {**ALONE, OWN: both(80), OTHER: both(100)}, True),
    "measured worse": (
        {OWN: 3.0, OTHER: 1.0, THIRD: 4.0},
        {**ALONE, OWN: both(100), OTHER: both(80), THIRD: both(99)},
        False,
    ),
    "tied": ({OWN: 3.0, OTHER: 1.0}, {**ALONE, OWN: both(100), OTHER: both(101)}, False),
    "not measured": ({OWN: 3.0, OTHER: 1.0}, {}, True),
}


@pytest.mark.parametrize("case", MEASURED)
def test_a_measurement_counts_for_more_than_a_prediction(case: str) -> None:
    predicted, right, advised = MEASURED[case]
    assert (f"--methods {OWN},{OTHER} " in words_of(diagnosis(predicted, right))) is advised


def test_smaller_weights_are_advised_where_the_bases_data_is_predicted_to_lose_most() -> None:
    """Of multiples of a reference, the base's is the largest."""
    found = diagnosis({OWN: 1.0, THIRD: 1.0}, {}, costs={"a": 0.5, "b": 0.5, "base": 1.0})
    found.prediction.costs["x"][1, TASKS.index("base"), 0] = 0.95
    assert "smaller weights" in verdict(found)[-1]


@pytest.mark.parametrize("merged", [110, 60])
def test_smaller_weights_are_advised_where_the_bases_data_measured_a_loss(merged: int) -> None:
    """Whatever is predicted of it."""
    right = {**ALONE, OWN: {"a": 111, "b": 111, "base": merged}}
    right["fine-tuned model"] = {"a": 112, "b": 112, "base": 110}
    words = words_of(diagnosis({OWN: 1.0}, right, tasks=("a", "b", "base"), costs={"base": 9.0}))
    assert ("smaller weights" in words) == (merged == 60)


@pytest.mark.parametrize("merged", [112, 70])
def test_tasks_that_pull_apart_need_not_lose(merged: int) -> None:
    words = words_of(diagnosis({OWN: 1.0}, {**ALONE, OWN: both(merged)}, apart=0.7))
    assert ("trade-off" in words) == (merged == 70)


@pytest.mark.parametrize("without", [118, 100, 60])
def test_the_penalty_check_advises_what_was_measured(without: int) -> None:
    name = f"{OWN}, base.penalty none"
    right = {**ALONE, OWN: both(99), name: both(without)}
    words = words_of(diagnosis({OWN: 1.0}, right, ratio=2.0, without_penalty=name))
    assert ("gradmerge merge RECIPE --set base.penalty=none" in words) == (without == 118)
    assert "--set base.penalty=none" in words_of(diagnosis({OWN: 1.0}, {}, ratio=2.0))


@pytest.mark.parametrize(("merged", "tasks"), [(60, ("a", "b")), (112, ("a", "b")), (112, ("a",))])
def test_calibration_is_advised_unless_no_task_loses(merged: int, tasks: tuple[str, ...]) -> None:
    found = diagnosis({OWN: 1.0}, {**ALONE, OWN: both(merged)}, tasks=tasks)
    command = "gradmerge calibrate merged --data a=a.jsonl --data b=b.jsonl -o calibrated"
    found.commands = {"calibrate": command}
    assert (command in verdict(found)[-1]) == (merged == 60 or tasks == ("a",))
    found = diagnosis({OWN: 1.0}, {})
    assert not any("gradmerge calibrate" in sentence for sentence in verdict(found))


def test_numbers_have_their_errors() -> None:
    found = diagnosis({OWN: 1.0, OTHER: 1.0}, {**ALONE, OWN: both(111), OTHER: both(60)})
    assert "0.925 ± 0.024" in words_of(found) and "0.9333 ± 0.023" in words_of(found)
    table = {row[0]: row for row in measured_table(found).rows}
    assert f"{table[OWN][1]:.4g}" == "0.925 ± 0.017" and f"{table[OTHER][2]:.4g}" == "-0.425 ± 0.033"
    assert table["fine-tuned model"][1:3] == [None, None] and f"{table['fine-tuned model'][3]:.4g}" == "0.9333 ± 0.023"
