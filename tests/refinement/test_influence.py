"""Influence steps against retraining, dense solves and losses computed apart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.losses import LOSSES
from gradmerge.refinement import influence, owners
from gradmerge.refinement.influence import remove_influence
from gradmerge.refinement.overlap import in_both
from gradmerge.refinement.owners import DataOwner
from gradmerge.refinement.splitting import as_batches, split_batches

from .making import Batch, batches, classes, perceptron, regression


def mean_loss(model: nn.Module, rows: Batch) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(rows[0]), rows[1]))


def trained_on(model: nn.Module, rows: Batch, steps: int = 60, ridge: float = 1e-3) -> nn.Module:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        loss = nn.functional.cross_entropy(model(rows[0]), rows[1]) + ridge * squares
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    return model


def joined(*parts: Batch) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _part(rows: Batch, which: slice) -> Batch:
    return rows[0][which], rows[1][which]


def numbers(seed: int, count: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    truth = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + 50), dtype=torch.float64)
    return x, x @ truth + noise


def least_squares(rows: Batch) -> Tensor:
    """[W b] of the best linear model."""
    wide = torch.cat([rows[0], torch.ones(len(rows[0]), 1, dtype=torch.float64)], 1)
    return torch.linalg.lstsq(wide, rows[1]).solution.T


def placed(solution: Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(solution[:, :-1])
        model[0].bias.copy_(solution[:, -1])
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_in_linear_regression_one_step_is_retraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is quadratic, and the Kronecker curvature of one layer exact: s = 1 is the model without the rows."""
    monkeypatch.setattr(influence, "DAMPING", 0.0)
    keep, forget = numbers(0, 60), numbers(1, 20)
    model = placed(least_squares(joined(keep, forget)))
    squared = LOSSES["squared"]
    owners = (DataOwner("f", batches(forget), [], output=squared), DataOwner("k", batches(keep), [], output=squared))
    done = remove_influence(model, *owners, budget=None)
    torch.testing.assert_close(weights(model), weights(placed(least_squares(keep))), rtol=1e-9, atol=1e-9)
    assert done.rounds[0].chosen.s == pytest.approx(1.0, rel=1e-9)


def test_a_step_is_the_dense_solve_with_a_tenth_of_the_mean_curvature_added() -> None:
    keep, forget = numbers(0, 60), numbers(1, 20)
    solution = least_squares(joined(keep, forget))
    model = placed(solution)
    squared = LOSSES["squared"]
    scale = 7.0
    owners = (
        DataOwner("f", batches(forget), [], output=squared),
        DataOwner("k", batches(keep), [], output=squared, examples=int(scale * 60)),
    )
    done = remove_influence(model, *owners, budget=None)
    wide, other = (torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) for x in (keep[0], forget[0]))
    hessian = scale * torch.kron(torch.eye(3, dtype=torch.float64), 2 * wide.T @ wide)
    damping = 0.1 * float(torch.linalg.eigvalsh(hessian).mean())
    gradient = (2 * (other @ solution.T - forget[1]).T @ other).flatten()
    direction = torch.linalg.solve(hessian + damping * torch.eye(15, dtype=torch.float64), gradient)
    s = float(gradient @ direction / (direction @ hessian @ direction))
    moved = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach() - solution
    torch.testing.assert_close(moved.flatten(), s * direction, rtol=1e-8, atol=1e-10)
    assert done.rounds[0].damping == pytest.approx(damping, rel=1e-8) and done.after.s == pytest.approx(s, rel=1e-8)


def test_with_no_layer_wide_enough_for_factors_a_step_divides_by_the_diagonal() -> None:
    """`widest=0`: (S + λ)⁻¹ g entry by entry, S the sum of squared gradients with labels that the model's law gives."""
    torch.manual_seed(0)
    rows, other = torch.randn(30, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    keep, forget = (rows, torch.randint(2, (30,))), (other, torch.randint(2, (9,)))
    model = nn.Sequential(nn.Linear(4, 2)).double()
    start = copy.deepcopy(model)
    owner = DataOwner("k", batches(keep), [], few_classes=2, widest=0)
    remove_influence(model, DataOwner("f", batches(forget), []), owner, budget=None)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        found = torch.autograd.grad(nn.functional.cross_entropy(start(x), y), list(start.parameters()))
        return torch.cat([one.flatten() for one in found])

    total = torch.zeros(10, dtype=torch.float64)
    for x in rows.split(1):
        chances = start(x).softmax(-1)[0].detach()
        for label in (0, 1):
            total += chances[label] * gradients(x, torch.tensor([label])).square()
    wanted = sum(gradients(x, y) for x, y in zip(other.split(1), forget[1].split(1), strict=True))
    direction = wanted / (total + influence.DAMPING * total.mean())
    moved = weights(model) - weights(start)
    torch.testing.assert_close(moved / moved.norm(), direction / direction.norm(), rtol=1e-7, atol=1e-9)


def test_curvature_of_a_sample_is_scaled_to_all_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a linear model, S from 30 and the Newton length from 20 of 60 rows that stand for 600."""
    monkeypatch.setattr(owners, "CURVATURE_ROWS", 30)
    monkeypatch.setattr(owners, "ALONG_ROWS", 20)
    keep, forget = numbers(0, 60), numbers(1, 20)
    goes, stays = (DataOwner("k", batches(some), [], output=LOSSES["squared"]) for some in (forget, keep))
    stays.examples = 600
    solution = least_squares(joined(keep, forget))
    done = remove_influence(placed(solution), goes, stays, budget=None)
    drawn = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:30]
    wide, other = (torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) for x in (keep[0][drawn], forget[0]))
    hessian, along = (
        600 / len(some) * torch.kron(torch.eye(3, dtype=torch.float64), 2 * some.T @ some) for some in (wide, wide[:20])
    )
    damping = 0.1 * float(hessian.diagonal().mean())
    gradient = (2 * (other @ solution.T - forget[1]).T @ other).flatten()
    direction = torch.linalg.solve(hessian + damping * torch.eye(15, dtype=torch.float64), gradient)
    s = float(gradient @ direction / (direction @ along @ direction))
    assert done.rounds[0].damping == pytest.approx(damping, rel=1e-8) and done.after.s == pytest.approx(s, rel=1e-8)


def test_of_many_rows_a_sample_that_the_seed_draws_is_asked_for_curvature(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "CURVATURE_ROWS", 50)
    asked: list[Tensor] = []
    estimate = DataOwner.curvature

    def noted(self: DataOwner, model: nn.Module) -> Any:
        asked.append(torch.cat([x for x, _ in self._curved]))
        return estimate(self, model)

    monkeypatch.setattr(DataOwner, "curvature", noted)
    given: Any = {"forget": batches(task[2]), "keep": batches(task[1]), "budget": 0.1, "progress": False}
    for seed in (0, 0, 1):
        done = gm.remove(copy.deepcopy(task[0]), **given, rounds=2, seed=seed)
        assert done.used <= 0.1 and done.after.forget > done.before.forget and done.rows["keep_rows"] == 180
    assert [len(rows) for rows in asked] == [50] * 6
    assert all(torch.equal(asked[0], rows) for rows in asked[1:4]) and not torch.equal(asked[0], asked[4])
    assert all((row == task[1][0]).all(1).any() for row in asked[0]) and len(asked[0].unique(dim=0)) == 50


def test_in_logistic_regression_a_step_comes_nearer_to_retraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, but with Kronecker factors in the place of the true curvature: nearer, and not all of the way."""
    monkeypatch.setattr(influence, "DAMPING", 1e-6)  # not 0: softmax does not see what all logits share
    keep, forget = classes(400, 0, labels=2), classes(8, 1, labels=2, shift=1.0)

    def fitted(rows: Batch) -> nn.Module:
        return trained_on(regression(labels=2), rows, 200, ridge=0.0)

    model, target = fitted(joined(keep, forget)), fitted(keep)
    before = [one - other for one, other in zip(logits(model, keep), logits(target, keep), strict=True)]
    remove_influence(model, DataOwner("f", batches(forget), []), DataOwner("k", batches(keep), []), budget=None)
    after = [one - other for one, other in zip(logits(model, keep), logits(target, keep), strict=True)]
    size = [float(torch.stack(some).norm()) for some in (before, after)]
    assert size[1] < 0.85 * size[0]


def logits(model: nn.Module, rows: Batch) -> list[Tensor]:
    with torch.no_grad():
        return list(model(rows[0]).log_softmax(-1))


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Batch, Batch]:
    """A perceptron that knows two tasks, and the rows to keep and to forget."""
    keep, forget = classes(200, 0), classes(100, 1, shift=2.0)
    return trained_on(perceptron(hidden=12), joined(keep, forget)), keep, forget


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_budget_is_used_and_kept_on_rows_that_no_step_has_seen(task: Any, rounds: int) -> None:
    model, keep, forget = copy.deepcopy(task[0]), task[1], task[2]
    held, rest = _part(keep, slice(0, 40)), _part(keep, slice(40, None))
    before = mean_loss(model, held), mean_loss(model, forget)
    owners = DataOwner("f", batches(forget), []), DataOwner("k", batches(rest), batches(held))
    done = remove_influence(model, *owners, budget=0.05, rounds=rounds)
    after = mean_loss(model, held), mean_loss(model, forget)
    assert (done.before.kept, done.before.forget) == pytest.approx(before)
    assert (done.after.kept, done.after.forget) == pytest.approx(after)
    assert after[0] <= 1.05 * before[0] and after[1] > before[1]
    assert done.used == pytest.approx(after[0] / before[0] - 1)
    for place, one in enumerate(done.rounds, 1):
        limit = (1 + 0.05 * place / rounds) * before[0]
        assert one.chosen.kept <= limit
        # Every longer step that was tried breaks the budget or forgets less, and the next one is hardly longer.
        longer = [trial for trial in one.curve if trial.s > one.chosen.s]
        assert all(trial.kept > limit or trial.forget < one.chosen.forget for trial in longer)
        assert longer[0].s / one.chosen.s <= 2 ** (1 / 2 ** (influence.HALVINGS - 1)) + 1e-9 or rounds > 1
        assert one.curve == sorted(one.curve, key=lambda trial: trial.s) and one.curve[0].s == 0


def test_errors_are_those_of_the_losses_row_by_row(task: Any) -> None:
    model, keep, forget = copy.deepcopy(task[0]), task[1], task[2]
    start = copy.deepcopy(model)
    done = gm.remove(model, forget=batches(forget), keep=batches(keep), rounds=1, seed=0, progress=False)
    facts = done.facts()["standard_errors"]

    def losses(which: nn.Module, rows: Batch) -> np.ndarray[Any, Any]:
        found = -torch.stack(logits(which, rows)).double()
        return np.array([one[label].item() for one, label in zip(found, rows[1], strict=True)])

    before, after = losses(start, forget), losses(model, forget)
    root = np.sqrt(len(before))
    for name, rows in (("before", before), ("after", after), ("rise", after - before)):
        assert facts[name]["forget"] == pytest.approx(rows.std(ddof=1) / root, rel=1e-4)
    _, held = split_batches("keep", as_batches("keep", batches(keep)), 0)
    a, b = (np.concatenate([losses(which, one) for one in held]) for which in (start, model))
    count = len(a)
    left = [(b.sum() - b[i]) / (a.sum() - a[i]) - 1 for i in range(count)]
    jackknife = np.sqrt((count - 1) / count * np.square(left - np.mean(left)).sum())
    assert done.used == pytest.approx(b.sum() / a.sum() - 1, rel=1e-4)
    assert facts["used"]["kept"] == pytest.approx(jackknife, rel=0.2) and "±" in done.used_words


def test_every_length_tried_is_measured_at_that_length(task: Any) -> None:
    model, keep, forget = copy.deepcopy(task[0]), task[1], task[2]
    start = weights(model)
    owners = DataOwner("f", batches(forget), []), DataOwner("k", batches(keep), batches(keep))
    one = remove_influence(model, *owners, budget=0.05).rounds[0]
    direction = (weights(model) - start) / one.chosen.s
    for trial in one.curve:
        torch.nn.utils.vector_to_parameters(start + trial.s * direction, model.parameters())
        assert (mean_loss(model, keep), mean_loss(model, forget)) == pytest.approx((trial.kept, trial.forget))


def test_rounds_with_repairs_forget_more_within_the_same_budget(task: Any) -> None:
    found = {}
    for rounds in (1, 6):
        model = copy.deepcopy(task[0])
        found[rounds] = gm.remove(
            model, forget=batches(task[2]), keep=batches(task[1]), budget=0.1, rounds=rounds, progress=False
        )
    assert found[6].after.forget > 1.2 * found[1].after.forget
    assert max(found[6].used, found[1].used) <= 0.1


def test_a_repair_that_teaches_again_what_is_to_go_is_not_the_end(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (base, keep, forget) = copy.deepcopy(task[0]), task
    ends: list[torch.Tensor] = []
    monkeypatch.setattr(  # a repair that brings the model back to where it came from
        influence._Walk,
        "repair",
        lambda walk, *_: torch.nn.utils.vector_to_parameters(weights(base), walk.model.parameters()),
    )
    limits = iter([0.05, 0.0, 0.0])
    longest = influence._Walk.bisect
    monkeypatch.setattr(  # only the first round has a budget
        influence._Walk,
        "bisect",
        lambda walk, direction, first, limit, now: (
            longest(walk, direction, first, limit, now) if next(limits) else ([now], now)
        ),
    )
    owners = DataOwner("f", batches(forget), []), DataOwner("k", batches(keep), batches(keep))
    done = remove_influence(model, *owners, budget=0.1, rounds=3, told=lambda one: ends.append(weights(model)))
    assert torch.equal(weights(model), ends[0]) and not torch.equal(ends[0], ends[2])
    assert done.after.forget == pytest.approx(mean_loss(model, forget)) and done.after.forget > done.before.forget


def test_a_module_is_changed_in_place_but_for_what_is_frozen(task: Any) -> None:
    model = copy.deepcopy(task[0])
    model[0].requires_grad_(False)
    first, last = model[0].weight.clone(), model[2].weight.detach().clone()
    done = gm.remove(model, forget=batches(task[2]), keep=iter(batches(task[1])), rounds=2, progress=False)
    assert done.model is model and torch.equal(model[0].weight, first) and not torch.equal(model[2].weight, last)
    assert done.rows == {"forget_rows": 100, "keep_rows": 180, "held_rows": 20, "keep_size": 200}
    assert "to be forgotten" in repr(done) and "<table>" in done._repr_html_()


def test_how_many_examples_stay_scales_the_curvature_and_with_it_s(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction is K⁻¹g with K ten times as large, so that s is ten times as long, and the model the same."""
    monkeypatch.setattr(influence, "HALVINGS", 30)
    monkeypatch.setattr(influence, "TRIES", 60)
    one, ten = copy.deepcopy(task[0]), copy.deepcopy(task[0])
    given: Any = {"forget": batches(task[2]), "keep": batches(task[1]), "rounds": 1, "progress": False}
    few, many = gm.remove(one, **given), gm.remove(ten, **given, keep_size=2000)
    assert many.after.s == pytest.approx(10 * few.after.s, rel=1e-6)
    torch.testing.assert_close(weights(one), weights(ten), rtol=1e-6, atol=1e-8)


def test_without_rows_to_hold_back_the_step_has_the_newton_length(task: Any) -> None:
    model, keep = copy.deepcopy(task[0]), _part(task[1], slice(0, 9))
    done = gm.remove(model, forget=batches(task[2]), keep=batches(keep), progress=False)
    assert done.budget is None and len(done.rounds) == 1
    assert done.after.s == done.rounds[0].newton and done.rows["held_rows"] == 0
    assert "none can be held back" in done.notes[0]


@pytest.mark.parametrize("budget", [0, -0.01, "0%", "-2%", "nothing", math.nan, math.inf, "2", ""])
def test_a_budget_is_a_positive_share(task: Any, budget: Any) -> None:
    with pytest.raises(gm.InputError, match="budget"):
        gm.remove(task[0], forget=batches(task[2]), keep=batches(task[1]), budget=budget)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds 0"),
        ({"keep": None}, "forget and keep"),
        ({"keep_size": 150}, "--keep-size 150: 200 examples"),
        ({"method": "ties"}, "method 'ties'"),
        ({"method": "removal"}, "removal takes the folders"),
        ({"models": ["./toxic"]}, "removal takes the folders"),
        ({"keep": "rows.jsonl"}, "keep is str, but must be batches"),
        ({"limit": 3}, "limit is an option for a model on disk"),
        ({"out": "there"}, "out is an option for a model on disk"),
        ({"forget": []}, "forget: there are no rows"),
        ({"output": "clases"}, "did you mean 'classes'"),
    ],
)
def test_wrong_requests_are_explained(task: Any, options: dict[str, Any], says: str) -> None:
    model, before = task[0], weights(task[0])
    given: Any = {"forget": batches(task[2]), "keep": batches(task[1]), **options}
    with pytest.raises(gm.InputError, match=says):
        gm.remove(model, given.pop("out", None), **given)
    assert torch.equal(weights(model), before)


def test_rows_that_are_to_go_and_to_stay_are_counted(task: Any) -> None:
    shared = joined(_part(task[2], slice(0, 7)), task[1])
    with pytest.raises(gm.InputError, match="7 of the 100 examples to forget are also among those to keep"):
        gm.remove(task[0], forget=batches(task[2]), keep=batches(shared))


def test_rows_are_the_same_whatever_they_are_padded_to() -> None:
    short = {"input_ids": [[5, 6, 0], [7, 8, 9]], "attention_mask": [[1, 1, 0], [1, 1, 1]], "labels": [1, 0]}
    long = {"input_ids": [[5, 6, 0, 0], [7, 8, 9, 4]], "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]], "labels": [1, 0]}
    one, other = ({name: torch.tensor(value) for name, value in batch.items()} for batch in (short, long))
    assert in_both([one], [other]) == 1
    assert in_both([one], [{**other, "labels": torch.tensor([0, 0])}]) == 0
    # Text to text: labels of the batch's width or of another, and longer than the row's own text.
    targets = torch.tensor([[3, 4, 5], [6, -100, -100]])
    wider = torch.tensor([[3, 4, 5, -100], [6, 2, 2, 2]])
    assert in_both([{**one, "labels": targets}], [{**other, "labels": wider}]) == 1


def test_a_model_that_learned_nothing_from_the_rows_is_said_to() -> None:
    """Its output does not depend on its weights where they are 0 and the input is too."""
    keep = classes(40, 0)
    forget = torch.zeros(10, 4, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    with pytest.raises(gm.InputError, match="gradient of every parameter is 0"):
        gm.remove(model, forget=batches(forget), keep=batches(keep), progress=False)


def test_a_model_without_anything_to_change_is_refused(task: Any) -> None:
    model = copy.deepcopy(task[0]).requires_grad_(False)
    with pytest.raises(gm.InputError, match="requires_grad"):
        gm.remove(model, forget=batches(task[2]), keep=batches(task[1]), progress=False)


def test_no_step_goes_on_where_less_would_be_forgotten() -> None:
    """Kept rows do not object to any length, but beyond some length the rows to forget are known better again."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()

    class Line(influence._Walk):
        def trials(self, step: Any, lengths: Any) -> list[influence.StepTrial]:
            return [influence.StepTrial(s, 1.0, math.sin(s)) for s in lengths]

    rows = [(torch.zeros(2, 1), torch.zeros(2, 1))]
    walk = Line(model, DataOwner("f", rows, []), DataOwner("k", rows, []), held=False)
    curve, chosen = walk.bisect({}, 0.1, 1.5, walk.trials(None, [0.0])[0])
    assert chosen.s == 1.6 and curve[-1].s == pytest.approx(0.1 * influence.LONGEST)


def test_options_of_influence_are_refused_with_tuned_models(tmp_path: Path) -> None:
    for options in ({"widest": 0}, {"rounds": 2}, {"budget": "5%"}, {"keep_size": 100}):
        with pytest.raises(gm.InputError, match=f"{next(iter(options))} is an option of influence"):
            gm.remove(tmp_path / "base", tmp_path / "out", models=[tmp_path / "tuned"], **options)
