"""Which settings are tied, which of them to take, and that every output says the same."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare.ranking import (
    Outcome,
    Preview,
    score_difference,
    score_error,
    set_scores,
    share_difference,
)
from gradmerge.compare.settings import Axis, Setting
from gradmerge.recipe import make_recipe
from gradmerge.report.advice import preview_verdict
from gradmerge.report.comparison import best_table
from gradmerge.tasks.metrics import standard_errors

from .making import setting


def answers(right: Sequence[int], count: int = 120) -> Tensor:
    """0 and 1: right are the examples of these numbers."""
    rows = torch.zeros(count, dtype=torch.float64)
    rows[list(right)] = 1.0
    return rows


def outcome(of: Setting, rows: dict[str, dict[str, Tensor]]) -> Outcome:
    metrics = {
        task: {name: float(values.mean()) for name, values in found.items()}
        | {"standard_errors": standard_errors(found)}
        for task, found in rows.items()
    }
    return Outcome(of, metrics, rows=rows)


def accurate(method: str, weights: tuple[float, ...], **right: Sequence[int]) -> Outcome:
    return outcome(setting(method, weights), {task: {"accuracy": answers(some)} for task, some in right.items()})


def preview(rows: list[Outcome], own: Outcome | None = None, method: str = "gradient-matching") -> Preview:
    recipe = make_recipe({"method": method, "base": "base", "models": ["a", "b"]})
    criterion, tasks = set_scores(rows, True), ["a", "b"]
    return Preview(recipe, tasks, tasks, True, criterion, rows, own or rows[0], Axis("weight"))


def test_a_score_over_tasks_has_the_error_of_independent_tasks_each_on_the_same_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (
        outcome(setting("ties"), {t: {"loss_per_token": torch.rand(n, generator=generator).double()} for t, n in sizes})
        for sizes in [[("a", 30), ("b", 50)]] * 2
    )
    criterion = set_scores([one, other], True)
    found = score_difference(one, other, criterion)
    assert found is not None and found.value == pytest.approx(one.score - other.score)
    variance, own = 0.0, 0.0
    for task in ("a", "b"):
        mine, theirs = (row.rows[task]["loss_per_token"].tolist() for row in (one, other))
        apart = [x - y for x, y in zip(mine, theirs, strict=True)]
        mean = sum(apart) / len(apart)
        variance += sum((x - mean) ** 2 for x in apart) / (len(apart) - 1) / len(apart)
        mean = sum(mine) / len(mine)
        own += sum((x - mean) ** 2 for x in mine) / (len(mine) - 1) / len(mine)
    assert found.error == pytest.approx(math.sqrt(variance) / 2)
    assert score_error(one, criterion) == pytest.approx(math.sqrt(own) / 2)


def test_shares_have_the_error_of_the_bootstrap() -> None:
    """Where two tasks are almost equally bad, which of them is worse is a matter of the rows drawn."""
    generator = torch.Generator().manual_seed(1)
    noise = {task: torch.randn(80, generator=generator, dtype=torch.float64) for task in "abc"}
    slope = {task: 0.5 * torch.randn(80, generator=generator, dtype=torch.float64) for task in "abc"}
    levels = {"a": (0.5, 0.3), "b": (0.48, 0.35), "c": (-2.0, -1.0)}
    one, other = ({t: noise[t] + levels[t][i] + i * slope[t] for t in "abc"} for i in (0, 1))

    def score(shares: dict[str, Tensor], places: dict[str, Tensor]) -> float:
        means = [float(shares[task][places[task]].mean()) for task in shares]
        return max(means)

    found = share_difference(one, other)
    every = {task: torch.arange(80) for task in one}
    assert found.value == pytest.approx(score(one, every) - score(other, every))
    drawn = []
    for _ in range(3000):
        places = {task: torch.randint(80, (80,), generator=generator) for task in one}
        drawn.append(score(one, places) - score(other, places))
    assert found.error == pytest.approx(float(torch.tensor(drawn).std()), rel=0.08)
    assert share_difference(other, one).error == pytest.approx(found.error, rel=0.08)
    alone = {task: rows[:1] for task, rows in one.items()}
    assert math.isnan(share_difference(alone, alone).error) and share_difference(alone, alone).tied


def test_of_tied_settings_the_recipes_own_is_taken_and_ranks_say_that_they_are_tied() -> None:
    """0.7917 against 0.7833 on 120 rows."""
    rows = [
        accurate("gradient-matching", (0.2, 0.2), a=range(60), b=range(60)),
        accurate("gradient-matching", (1.0, 1.0), a=range(94), b=range(94)),
        accurate("task-arithmetic", (0.5, 0.5), a=range(95), b=range(95)),
    ]
    found = preview(rows, rows[1])
    assert found.leading() is rows[2] and found.all_tied() == [rows[2], rows[1]]
    assert found.best() is rows[1] and [row.rank for row in rows] == [3, 1, 1]
    assert "0.7917 ± 0.026 (task-arithmetic 0.5)" in " ".join(preview_verdict(found))
    assert found.best("task-arithmetic") is rows[2]
    cells = {row[0]: row for row in best_table(found).rows}
    assert [cells[method][-1] for method in found.methods] == ["1", "0.5"]
    assert f"{cells['task-arithmetic'][2]:.4g}" == "0.7917 ± 0.026"


def test_of_tied_settings_without_the_recipes_own_the_simplest_that_beats_it_is_taken() -> None:
    rows = [
        accurate("gradient-matching", (1.0, 1.0), a=range(40), b=range(40)),
        accurate("gradient-matching", (0.3, 0.7), a=range(96), b=range(96)),
        accurate("gradient-matching", (0.4, 0.4), a=range(95), b=range(95)),
        accurate("task-arithmetic", (0.3, 0.5), a=range(95), b=range(95)),
        accurate("task-arithmetic", (0.4, 0.4), a=range(94), b=range(94)),
        accurate("task-arithmetic", (0.5, 0.5), a=range(95), b=range(95)),
    ]
    found = preview(rows, rows[0])
    assert len(found.all_tied()) == 5 and found.best() is rows[5], "one weight, no curvature, the better of two"


def predicted(own: float, *others: float) -> Preview:
    settings = [
        setting("gradient-matching", (1.0, 1.0), {"damping": value} if value else None) for value in (0, *others)
    ]
    first, *rows = (
        Outcome(one, costs={"a": value, "b": value / 2}) for one, value in zip(settings, (own, *others), strict=True)
    )
    recipe = make_recipe({"method": "gradient-matching", "base": "base", "models": ["a", "b"]})
    criterion = set_scores([first, *rows], False)
    return Preview(
        recipe, ["a", "b"], ["a", "b"], False, criterion, [first, *rows], first, Axis("damping", ("damping",))
    )


def test_of_predictions_the_recipes_own_is_taken_within_a_hundredth_of_the_smallest() -> None:
    found = predicted(1.0, 0.995, 1.3)
    assert found.best() is found.reference and found.leading() is found.rows[1]
    other = predicted(1.0, 0.9, 1.3)
    assert other.best() is other.rows[1]


def test_a_missing_score_is_tied_with_nothing_and_removal_has_no_best() -> None:
    rows = [
        accurate("ties", (0.5, 0.5), a=range(60), b=range(60)),
        accurate("ties", (1.0, 1.0), a=range(60), b=range(60)),
    ]
    rows[1].metrics["b"] = {}
    found = preview(rows, method="ties")
    assert rows[1].score is None and found.all_tied() == [rows[0]] and rows[1].rank is None
    taken_out = preview([accurate("removal", (0.5, 0.5), a=[1], b=[1])], method="removal")
    assert taken_out.best() is None and not taken_out.among_best(taken_out.rows[0])


def test_metrics_of_one_kind_are_averaged_and_of_others_the_lost_shares_of_the_losses_count() -> None:
    rows = [
        accurate("ties", (0.5, 0.5), a=range(60), b=range(108)),
        accurate("ties", (1.0, 1.0), a=range(96), b=range(60)),
    ]
    criterion = set_scores(rows, True)
    assert criterion.higher and [row.score for row in rows] == [pytest.approx(0.7), pytest.approx(0.65)]
    losses = {"loss_per_token": torch.linspace(1, 2, 50, dtype=torch.float64)}
    mixed = [outcome(row.setting, {"a": row.rows["a"], "b": losses}) for row in rows]
    for row, lost in zip(mixed, (0.2, 0.4), strict=True):
        row.costs, row.shares = {"a": lost, "b": 0.1}, {task: torch.full((9,), lost) for task in "ab"}
    criterion = set_scores(mixed, True)
    assert criterion.shares and not criterion.higher and [row.score for row in mixed] == [0.2, 0.4]


@pytest.fixture(scope="module")
def measured(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Preview, Path]:
    out = tmp_path_factory.mktemp("measured") / "report"
    data = {name: str(texts / f"{name}.jsonl") for name in ("a", "b")}
    methods = "task-arithmetic,average"
    found = gm.preview(texts / "recipe.yml", out, methods=methods, weights="0:1:0.5", data=data, device="cpu")
    return found, out


def test_table_verdict_json_csv_and_recipe_agree(measured: tuple[Preview, Path]) -> None:
    found, out = measured
    best, leading = found.best(), found.leading()
    assert best is not None and leading is not None and best is found.own
    facts = json.loads((out / "preview.json").read_text())
    tied = found.all_tied()
    assert len(tied) > 1, "ten rows tell little apart"
    assert facts["tied_with_best"] == len(tied) == facts["winner"]["tied"]["settings"]
    assert [row["tied_with_best"] for row in facts["settings"]] == [row in tied for row in found.rows]
    assert all((row["rank"] == 1) == row["tied_with_best"] for row in facts["settings"])
    assert facts["winner"]["weights"] == {"a": 1.0, "b": 1.0}
    lines = list(csv.DictReader((out / "preview.csv").open()))
    for line, row, known in zip(lines, found.rows, facts["settings"], strict=True):
        assert (line["tied with best"] == "yes") == (row in tied) and int(line["rank"]) == row.rank
        assert float(line["average accuracy, standard error"]) == known["standard_error"]
        error = known["metrics"]["a"]["standard_errors"]["accuracy"]
        assert float(line["a accuracy, standard error"]) == pytest.approx(error)
        if row is not leading:
            assert float(line["more than the best"]) == pytest.approx(row.score - leading.score)
            assert float(line["more than the best, standard error"]) == known["more_than_best"]["standard_error"]
    assert f"{len(tied)} of {len(found.rows)}" in found.verdict[0]
    assert gm.load_recipe(out / "recipe.yml").weights == [1.0, 1.0]
    assert f"{len(tied)} of {len(found.rows)}" in (out / "report.html").read_text()
