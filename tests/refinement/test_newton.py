"""Newton's steps reach the optimum where it is known, and never leave a model worse than they found it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.gradients import Gradient
from gradmerge.curvature.kronecker import KroneckerCurvature
from gradmerge.refinement import owners
from gradmerge.refinement.newton import Penalty, newton
from gradmerge.refinement.owners import DataOwner
from gradmerge.refinement.points import Point

from .making import Batch, batches, classes, perceptron, regression


def owner_of(rows: Batch, name: str = "task", **options: Any) -> DataOwner:
    """One whose held-back rows are its rows, so that the steps lead to the minimum of their loss."""
    return DataOwner(name, batches(rows), batches(rows), **options)


def optimum(
    model: nn.Module, tasks: Sequence[tuple[Batch, float]], matrix: float = 0.0, base: nn.Module | None = None
) -> float:
    """The lowest value of Σ scale · loss + penalty, by L-BFGS."""
    model = copy.deepcopy(model)
    anchor = [p.detach().clone() for p in (base or model).parameters()]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for (x, y), scale in tasks:
            total = total + scale * nn.functional.cross_entropy(model(x), y, reduction="sum")
        for p, a in zip(model.parameters(), anchor, strict=True):
            total = total + 0.5 * matrix * (p - a).square().sum()
        total.backward()
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(closure().detach())


def test_softmax_regression_converges_to_the_optimum() -> None:
    model, rows = regression(), [classes(60, seed=1), classes(60, seed=2, shift=0.3)]
    best = optimum(model, [(one, 1.0) for one in rows])
    done = newton(model, [owner_of(one, str(i)) for i, one in enumerate(rows)], rounds=4)
    assert done.rounds[0].rows > 1.5 * best
    assert done.rounds[-1].rows == pytest.approx(best, rel=1e-3)


def test_a_linear_model_with_squared_error_is_solved_in_one_round() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(60, 3).double(), nn.Sequential(nn.Linear(3, 1)).double()
    y = x @ torch.randn(3, 1).double() + 0.1 * torch.randn(60, 1).double()
    wide = torch.cat([x, torch.ones(60, 1).double()], 1)
    best = float((wide @ torch.linalg.lstsq(wide, y).solution - y).square().sum())
    done = newton(model, [owner_of((x, y))], rounds=1)
    assert done.rounds[0].rows > 10 * best
    assert done.rounds[-1].rows == pytest.approx(best, rel=0.02)


def test_rows_count_for_the_examples_that_they_stand_for() -> None:
    """As if every row were there so many times."""
    one, other, held = classes(60, 1), classes(60, 2, shift=1.0), classes(60, 3)
    few, many = perceptron(), perceptron()
    first = DataOwner("a", batches(one), batches(held))
    newton(few, [first, DataOwner("b", batches(other), batches(held), examples=180)], rounds=1)
    newton(many, [first, DataOwner("b", batches(other) * 3, batches(held))], rounds=1)
    for p, q in zip(few.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_curvature_of_many_rows_is_that_of_a_sample_and_the_optimum_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "CURVATURE_ROWS", 40)
    monkeypatch.setattr(owners, "ALONG_ROWS", 30)
    model, rows = regression(), [classes(120, seed=1), classes(30, seed=2, shift=0.3)]
    many, few = (owner_of(one, str(i)) for i, one in enumerate(rows))
    assert (many.curvature(model).examples, few.curvature(model).examples) == (40, 30)
    drawn = torch.randperm(120, generator=torch.Generator().manual_seed(0))[:30]
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    want = 4 * owner_of((rows[0][0][drawn], rows[0][1][drawn])).along(model, [direction])
    torch.testing.assert_close(many.along(model, [direction]), want)
    best = optimum(model, [(one, 1.0) for one in rows])
    assert newton(model, [many, few], rounds=5).rounds[-1].rows == pytest.approx(best, rel=2e-2)


def test_a_penalty_holds_the_model_to_its_base() -> None:
    model, base, rows = regression(), regression(1), classes()
    best = optimum(model, [(rows, 1.0)], 30.0, base)
    weights = {name: p.detach() for name, p in base.named_parameters()}
    penalty = Penalty({name: torch.full_like(p, 30.0) for name, p in weights.items()}, weights)
    done = newton(model, [owner_of(rows)], rounds=4, penalty=penalty)
    assert done.rounds[-1].rows == pytest.approx(best, rel=2e-2)
    free = regression()
    newton(free, [owner_of(rows)], rounds=4)

    def far(one: nn.Module) -> float:
        return sum(float((p.detach() - weights[name]).square().sum()) for name, p in one.named_parameters())

    assert far(model) < 0.5 * far(free)


def test_losses_fall_from_round_to_round_and_are_those_of_the_model() -> None:
    model, rows, held = perceptron(), classes(90, 1), classes(40, 2)
    done = newton(model, [DataOwner("task", batches(rows), batches(held))], rounds=3)
    judged = [one.judged for one in done.rounds]
    assert judged == sorted(judged, reverse=True) and len(judged) > 1
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(held[0]), held[1], reduction="none").double()
        assert judged[-1] == pytest.approx(float(losses.mean()))
        assert done.rounds[-1].errors["task"] == pytest.approx(float(losses.std()) / 40**0.5, rel=1e-5)
        rows_loss = float(nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="sum"))
    assert done.rounds[-1].rows == pytest.approx(rows_loss)
    assert all(0 < step.length < 100 and step.damping > 0 for one in done.rounds[1:] for step in one.steps)


@pytest.mark.parametrize("method", ["newton", "adamw"])
def test_a_model_at_the_optimum_of_the_rows_held_back_stays_bit_for_bit(method: str) -> None:
    held = classes(60, 1)
    model = regression()
    newton(model, [owner_of(held)], rounds=6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = classes(60, 2)
    done = gm.refine(model, {"a": [(x, (y + 1) % 3)]}, valid={"a": [held]}, method=method, progress=False)
    assert not done.improved and done.stopped
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Hidden:
    """An owner elsewhere: tensors go in, tensors and numbers come out, and nothing else can be asked."""

    held_error = None

    def __init__(self, owner: DataOwner) -> None:
        self.name, self.examples, self.rows = owner.name, owner.examples, owner.rows
        self._ask = {"curvature": owner.curvature, "gradient": owner.gradient}
        self._more = {"along": owner.along, "losses": owner.losses}

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        found = self._ask["curvature"](copy.deepcopy(model))
        assert isinstance(found, KroneckerCurvature)
        return KroneckerCurvature(found.layers, found.diagonal, found.examples, transposed=found.transposed)

    def gradient(self, model: nn.Module) -> Gradient:
        found = self._ask["gradient"](copy.deepcopy(model))
        assert isinstance(found, Gradient)
        return Gradient(dict(found), found.examples, found.loss)

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        found: Tensor = self._more["along"](copy.deepcopy(model), [dict(d) for d in directions])  # type: ignore[operator]
        return found

    def losses(
        self, model: nn.Module, directions: Sequence[Point] = (), points: Tensor | None = None, *, held: bool
    ) -> list[float]:
        found: list[float] = self._more["losses"](copy.deepcopy(model), directions, points, held=held)  # type: ignore[operator]
        return found


def test_owners_that_hide_their_rows_give_the_same_model() -> None:
    rows, held = [classes(60, 1), classes(60, 2, shift=0.5)], classes(40, 3)
    here, there = perceptron(), perceptron()
    owners = [DataOwner(str(i), batches(one), batches(held)) for i, one in enumerate(rows)]
    local = newton(here, owners, rounds=2)
    remote = newton(there, [Hidden(one) for one in owners], rounds=2)
    assert [one.judged for one in local.rounds] == [one.judged for one in remote.rounds]
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["newton", "adamw"])
def test_the_same_call_gives_the_same_bits(method: str) -> None:
    found = []
    for _ in range(2):
        model = perceptron().float()
        x, y = classes(80)
        gm.refine(model, {"a": [(x.float(), y)]}, method=method, progress=False)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["newton", "adamw"])
def test_both_methods_lower_the_loss_of_rows_that_nobody_was_given(method: str) -> None:
    model = perceptron().float()
    x, y = classes(200, 1)
    test = classes(300, 7)

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(test[0].float()), test[1]))

    before = loss()
    data = [(a.float(), b) for a, b in batches((x, y), 20)]
    done = gm.refine(model, {"a": data}, method=method, rounds=4, progress=False)
    assert done.model is model and done.improved
    assert loss() < 0.9 * before


@pytest.mark.parametrize("method", ["newton", "adamw"])
def test_labels_that_are_noise_leave_the_model_as_it_is(method: str) -> None:
    """Although a model that is less sure of itself has a lower loss on them."""
    model = regression().float()
    with torch.no_grad():
        model[0].weight *= 10  # type: ignore[index, union-attr, operator]
    before = [p.detach().clone() for p in model.parameters()]
    x, _ = classes(200, 1)
    noise = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(1))
    done = gm.refine(model, {"a": [(x.float(), noise)]}, method=method, progress=False)
    assert not done.improved and "a" in done.notes[0]
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_task_that_is_new_to_the_model_is_learned() -> None:
    """Labels that it cannot tell from chance at first are no noise if it can afterwards."""
    model, (x, y) = regression().float(), classes(200, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    done = gm.refine(model, {"a": [(x.float(), y)]}, progress=False)
    assert done.doubted == ["a"] and done.improved
    assert done.rounds[-1].judged < 0.7 * done.rounds[0].judged


def test_frozen_parameters_stay() -> None:
    model = perceptron()
    model[0].requires_grad_(False)  # type: ignore[operator]
    before = model[0].weight.clone()  # type: ignore[index, union-attr, operator]
    done = newton(model, [owner_of(classes())], rounds=1)
    assert done.improved
    assert torch.equal(model[0].weight, before)  # type: ignore[index, union-attr, arg-type]


def test_passes_are_counted_and_the_search_costs_few() -> None:
    model = perceptron()
    asked: list[str] = []

    class Counting(DataOwner):
        def curvature(self, model: nn.Module) -> KroneckerCurvature:
            asked.append("curvature")
            return super().curvature(model)

        def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
            asked.extend(["along"] * len(directions))
            return super().along(model, directions)

        def losses(self, model: nn.Module, directions: Any = (), points: Any = None, *, held: bool) -> list[float]:
            asked.extend(["held" if held else "rows"] * (1 if points is None else len(points)))
            return super().losses(model, directions, points, held=held)

    rows = classes()
    done = newton(model, [Counting("task", batches(rows), batches(rows))], rounds=2)
    for what in ("curvature", "along", "rows", "held"):
        assert done.passes[what] == asked.count(what)
    steps = sum(len(one.steps) for one in done.rounds)
    assert steps <= 6 and done.passes["curvature"] == done.passes["gradient"] <= steps + 1
    assert done.passes["rows"] <= 2 * steps + 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": {}}, "no data"),
        ({"rounds": 0}, "at least one"),
        ({"method": "sgd"}, "known are newton, adamw"),
        ({"valid": {"b": []}}, "no --data of that name"),
        ({"examples": {"a": 0}}, "at least one example"),
        ({"data": {"a": [(torch.zeros(1, 4), torch.zeros(1).long())]}}, "no validation row"),
        ({"data": {"a": []}}, "there are no rows"),
        ({"data": {"a": "rows.jsonl"}}, "batches in memory"),
        ({"out": "somewhere"}, "for a model on disk"),
        ({"device": "cpu"}, "for a model on disk"),
        ({"penalty": {}}, "go together"),
        ({"data": {"a": [(torch.zeros(9, 4), torch.full((9,), 7))]}}, "not one of the model's 3 classes"),
        ({"output": "class"}, "known are"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    x, y = classes(20)
    given = {"data": {"a": [(x.float(), y)]}} | change
    data = given.pop("data")
    with pytest.raises(gm.InputError, match=says):
        gm.refine(perceptron().float(), data, progress=False, **given)  # type: ignore[arg-type]


def test_a_model_without_anything_to_refine_is_refused() -> None:
    model = perceptron().float().requires_grad_(False)
    x, y = classes(20)
    with pytest.raises(gm.InputError, match="nothing to refine"):
        gm.refine(model, {"a": [(x.float(), y)]}, progress=False)


def test_a_layer_that_no_gradient_comes_to_is_named() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    model = nn.Sequential(nn.Linear(4, 5), Cut(), nn.Linear(5, 3))
    x, y = classes(20)
    with pytest.raises(gm.InputError, match=r"0\.weight"):
        gm.refine(model, {"a": [(x.float(), y)]}, progress=False)
