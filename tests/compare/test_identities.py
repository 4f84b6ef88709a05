"""The equations of the paper on linear and logistic regression, where all gradients and Hessians are known; float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare.predict import predict
from gradmerge.compare.settings import BASE

from ..rules.full_matrices import gradient_matching_full, removal_full
from .making import candidates, memory_plan

FEATURES, ROWS = 5, 30
WEIGHTS = [1.0, 0.4, 1.7]


@dataclass
class Loss:
    """ℓ(θ), a sum over rows: ½ (xθ − y)², or log(1 + e^(−y xθ)) with y = ±1."""

    kind: str
    x: Tensor
    y: Tensor

    def value(self, theta: Tensor) -> Tensor:
        if self.kind == "linear":
            return 0.5 * (self.x @ theta - self.y).square().sum()
        return torch.nn.functional.softplus(-self.y * (self.x @ theta)).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        if self.kind == "linear":
            return self.x.T @ (self.x @ theta - self.y)
        return -self.x.T @ (self.y * torch.sigmoid(-self.y * (self.x @ theta)))

    def hessian(self, theta: Tensor) -> Tensor:
        if self.kind == "linear":
            return self.x.T @ self.x
        p = torch.sigmoid(self.x @ theta)
        return self.x.T @ (self.x * (p * (1 - p))[:, None])


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_loss(kind: str, seed: int, diagonal: bool = False) -> Loss:
    """Rows of random data; ``diagonal``: every row has one feature, so that the Hessian is diagonal."""
    x, y = numbers(seed, ROWS, FEATURES), numbers(seed + 100, ROWS)
    if diagonal:
        x = x * torch.eye(FEATURES, dtype=torch.float64).repeat(ROWS // FEATURES, 1)
    return Loss(kind, x, y if kind == "linear" else torch.where(y > 0, 1.0, -1.0).double())


def trained(losses: Sequence[tuple[float, Loss]], penalty: Tensor, centre: Tensor) -> Tensor:
    """argmin Σ α ℓ(θ) + ½‖θ − centre‖²_penalty by Newton's method, to the last digits."""
    theta = centre.clone()
    for _ in range(60):
        gradient = penalty @ (theta - centre) + sum(w * loss.gradient(theta) for w, loss in losses)
        hessian = penalty + sum(w * loss.hessian(theta) for w, loss in losses)
        step = torch.linalg.solve(hessian, gradient)
        theta = theta - step
        if step.norm() < 1e-13:
            break
    assert step.norm() < 1e-13
    return theta


@dataclass
class Case:
    """Three tasks tuned from one base under a penalty, and the model that is trained on all of them."""

    losses: list[Loss]
    base: Tensor
    penalty: Tensor
    tuned: list[Tensor]
    target: Tensor

    @property
    def hessians(self) -> list[Tensor]:
        """H_t at θ_t."""
        return [loss.hessian(theta) for loss, theta in zip(self.losses, self.tuned, strict=True)]

    @property
    def arithmetic(self) -> Tensor:
        return self.base + sum(w * (t - self.base) for w, t in zip(WEIGHTS, self.tuned, strict=True))

    def residual(self, theta: Tensor) -> Tensor:
        """r(θ) = H_0(θ − θ_0) + Σ α_t ∇ℓ_t(θ)."""
        pull = sum(w * loss.gradient(theta) for w, loss in zip(WEIGHTS, self.losses, strict=True))
        return self.penalty @ (theta - self.base) + pull

    @property
    def precision(self) -> Tensor:
        return self.penalty + sum(w * h for w, h in zip(WEIGHTS, self.hessians, strict=True))


def make_case(kind: str, diagonal: bool = False, stiffness: float = 1.0) -> Case:
    losses = [make_loss(kind, seed, diagonal) for seed in range(len(WEIGHTS))]
    base, root = numbers(50, FEATURES) * 0.3, numbers(51, FEATURES, FEATURES)
    penalty = root @ root.T + torch.eye(FEATURES, dtype=torch.float64)
    penalty = stiffness * (torch.diag(penalty.diagonal()) if diagonal else penalty)
    tuned = [trained([(1.0, loss)], penalty, base) for loss in losses]
    target = trained(list(zip(WEIGHTS, losses, strict=True)), penalty, base)
    return Case(losses, base, penalty, tuned, target)


both = pytest.mark.parametrize("kind", ["linear", "logistic"])
shapes = pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])


def as_state(theta: Tensor) -> dict[str, Tensor]:
    """A vector as a state dict of two layers."""
    return {"layers.0.w": theta[:2].clone(), "layers.1.w": theta[2:].clone()}


def diagonals(matrices: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [as_state(matrix.diagonal()) for matrix in matrices]


def as_vector(state: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(state.values()))


@both
@shapes
def test_task_arithmetic_misses_the_target_by_exactly_the_gradient_mismatch(kind: str, diagonal: bool) -> None:
    """target − θ_TA = −Σ α_t H_0⁻¹ [∇ℓ_t(target) − ∇ℓ_t(θ_t)], for any loss."""
    case = make_case(kind, diagonal)
    mismatch = sum(
        w * (loss.gradient(case.target) - loss.gradient(theta))
        for w, loss, theta in zip(WEIGHTS, case.losses, case.tuned, strict=True)
    )
    error = case.target - case.arithmetic
    assert (error + torch.linalg.solve(case.penalty, mismatch)).abs().max() < 1e-10
    assert error.abs().max() > 1e-2


@both
def test_removal_errs_by_the_mismatch_on_what_stays_and_on_what_goes(kind: str) -> None:
    """δ(θ_∖t − θ_0) + α H_0(θ_t − θ_0) = −[∇ℓ_∖t(θ_∖t) − ∇ℓ_∖t(θ_0)] + α [∇ℓ_t(θ_0) − ∇ℓ_t(θ_t)], for any loss."""
    stays, goes, alpha = make_loss(kind, 0), make_loss(kind, 1), 0.6
    ridge, centre = 0.3 * torch.eye(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    penalty = make_case("linear").penalty
    base = trained([(1.0, stays), (alpha, goes)], ridge, centre)
    tuned = trained([(1.0, goes)], penalty, base)
    retrained = trained([(1.0, stays)], ridge, centre)
    left = ridge @ (retrained - base) + alpha * penalty @ (tuned - base)
    right = alpha * (goes.gradient(base) - goes.gradient(tuned)) - (stays.gradient(retrained) - stays.gradient(base))
    assert (left - right).abs().max() < 1e-10


def test_gradient_matching_gives_the_jointly_trained_model_for_quadratics() -> None:
    case = make_case("linear")
    merged = gradient_matching_full(case.base, case.tuned, case.penalty, case.hessians, WEIGHTS)
    assert (merged - case.target).abs().max() < 1e-10
    case = make_case("linear", diagonal=True)
    states = [as_state(theta) for theta in case.tuned]
    prior, *curvature = diagonals([case.penalty, *case.hessians])
    merged = as_vector(
        gm.merge_state_dicts(
            as_state(case.base), states, prior=prior, curvature=curvature, weights=WEIGHTS, damping=0.0
        )
    )
    assert (merged - case.target).abs().max() < 1e-10


def test_gradient_matching_errs_in_second_order_where_task_arithmetic_errs_in_first() -> None:
    """Ten times the penalty moves models a tenth as far: errors shrink 100-fold (by Δ) and 1000-fold (by Δ²)."""
    errors = []
    for stiffness in (100.0, 1000.0):
        case = make_case("logistic", stiffness=stiffness)
        merged = gradient_matching_full(case.base, case.tuned, case.penalty, case.hessians, WEIGHTS)
        errors.append([(case.arithmetic - case.target).norm(), (merged - case.target).norm()])
    (arithmetic, matching), (arithmetic_after, matching_after) = errors
    assert matching < arithmetic / 20
    assert 70 < arithmetic / arithmetic_after < 140
    assert 600 < matching / matching_after < 1500


@both
@shapes
def test_the_stationarity_residual_is_zero_at_the_target_and_only_there(kind: str, diagonal: bool) -> None:
    case = make_case(kind, diagonal)
    assert case.residual(case.target).abs().max() < 1e-11
    assert all(case.residual(theta).abs().max() > 1e-2 for theta in (case.base, case.arithmetic, *case.tuned))


@shapes
def test_the_residual_over_the_merged_precision_is_the_distance_to_the_target_for_quadratics(diagonal: bool) -> None:
    case = make_case("linear", diagonal)
    for theta in (case.base, case.arithmetic, numbers(77, FEATURES)):
        distance = torch.linalg.solve(case.precision, case.residual(theta))
        assert (theta - case.target - distance).abs().max() < 1e-10
        if diagonal:
            by_entry = case.residual(theta) / case.precision.diagonal()
            assert (theta - case.target - by_entry).abs().max() < 1e-10


@pytest.mark.parametrize("parts", [1, 2])
def test_removal_gives_the_retrained_model_for_quadratics(parts: int) -> None:
    stays, goes = make_loss("linear", 0), [make_loss("linear", seed + 1) for seed in range(parts)]
    ridge, centre = 0.3 * torch.eye(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    strengths = WEIGHTS[1 : 1 + parts]
    penalty = make_case("linear").penalty
    base = trained([(1.0, stays), *zip(strengths, goes, strict=True)], ridge, centre)
    tuned = [trained([(1.0, loss)], penalty, base) for loss in goes]
    rest = stays.hessian(base) + ridge
    removed = removal_full(base, tuned, rest, penalty, [loss.hessian(base) for loss in goes], strengths)
    assert (removed - trained([(1.0, stays)], ridge, centre)).abs().max() < 1e-10


@pytest.mark.parametrize("base_saw_removed", [False, True])
@pytest.mark.parametrize("own_penalty", [False, True])
def test_removal_in_memory_gives_the_retrained_model_for_diagonal_designs(
    base_saw_removed: bool, own_penalty: bool
) -> None:
    """The ridge is the damping; the base's curvature is of what stays, or of everything that it was trained on."""
    stays, goes = make_loss("linear", 0, True), [make_loss("linear", seed, True) for seed in (1, 2)]
    delta, strengths = 0.3, [1.0, 0.7]
    ridge, centre = delta * torch.eye(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    base = trained([(1.0, stays), *zip(strengths, goes, strict=True)], ridge, centre)
    curvature = [loss.hessian(base) for loss in goes]
    seen = stays.hessian(base)
    if base_saw_removed:
        seen = seen + sum(s * h for s, h in zip(strengths, curvature, strict=True))
    penalty = make_case("linear", True).penalty if own_penalty else seen + ridge
    tuned = [trained([(1.0, loss)], penalty, base) for loss in goes]
    removed = gm.merge_state_dicts(
        as_state(base),
        [as_state(theta) for theta in tuned],
        "removal",
        prior=as_state(seen.diagonal()),
        curvature=diagonals(curvature),
        penalty=as_state(penalty.diagonal()) if own_penalty else None,
        weights=strengths,
        damping=delta,
        options={"base_saw_removed": base_saw_removed, "cap": "none"},
    )
    assert (as_vector(removed) - trained([(1.0, stays)], ridge, centre)).abs().max() < 1e-10


# What curvature predicts, against the losses themselves. θ_t minimises ℓ_t here, without a penalty: then there is no
# first-order term, and the predicted excess loss is the whole of it.


def minima(kind: str) -> tuple[list[Loss], list[Tensor], Tensor]:
    """Losses with diagonal Hessians, where each is least, and a base that is least for the first."""
    losses = [make_loss(kind, seed, True) for seed in range(4)]
    nothing = torch.zeros(FEATURES, FEATURES, dtype=torch.float64)
    places = [trained([(1.0, loss)], nothing, torch.zeros(FEATURES, dtype=torch.float64)) for loss in losses]
    return losses[1:], places[1:], places[0]


METHODS = ["average", "task-arithmetic", "fisher-averaging", "gradient-matching"]
MERGES = {method: {"method": method} for method in METHODS}


def test_the_predicted_excess_loss_and_mismatch_are_the_true_ones_for_quadratics() -> None:
    losses, tuned, base = minima("linear")
    hessians = [loss.hessian(base) for loss in losses]
    first = make_loss("linear", 0, True)
    states, curvature = [as_state(t) for t in (base, *tuned)], diagonals([first.hessian(base), *hessians])
    plan = memory_plan(states, curvature, WEIGHTS, 0.1)
    found = predict(plan, ["a", "b", "c"], candidates(plan, WEIGHTS, 0.1, MERGES))
    for method in METHODS:
        settings = {} if method == "average" else {"weights": WEIGHTS}
        merged = as_vector(
            gm.merge_state_dicts(
                states[0], states[1:], method, prior=curvature[0], curvature=curvature[1:], damping=0.1, **settings
            )
        )
        for task, loss, place in zip(("a", "b", "c", BASE), (*losses, first), (*tuned, base), strict=True):
            excess = float(loss.value(merged) - loss.value(place))
            assert found.excess(method, task) == pytest.approx(excess, abs=1e-10)
            assert excess > 1e-3
            mismatch = float((loss.gradient(merged) - loss.gradient(place)).norm())
            assert found.mismatch(method, task) == pytest.approx(mismatch, rel=1e-9)


def test_where_the_penalty_is_known_the_predicted_excess_is_the_whole_of_it() -> None:
    """Of every merge, for every task that has a penalty; a task without one is predicted without the first order."""
    case = make_case("linear", diagonal=True)
    states = [as_state(t) for t in (case.base, *case.tuned)]
    known = as_state(case.penalty.diagonal())
    plan = memory_plan(states, diagonals([case.penalty, *case.hessians]), WEIGHTS, 0.0, [known, known, None])
    found = predict(plan, ["a", "b", "c"], candidates(plan, WEIGHTS, 0.0, MERGES))
    for method in METHODS:
        settings = {} if method == "average" else {"weights": WEIGHTS}
        prior, *curvature = diagonals([case.penalty, *case.hessians])
        merged = as_vector(
            gm.merge_state_dicts(
                states[0], states[1:], method, prior=prior, curvature=curvature, damping=0.0, **settings
            )
        )
        for task, loss, theta in zip(("a", "b", "c"), case.losses, case.tuned, strict=True):
            excess = float(loss.value(merged) - loss.value(theta))
            first_order = float(loss.gradient(theta) @ (merged - theta))
            cost = found.cost(method, task)
            assert cost.quadratic == pytest.approx(excess - first_order, abs=1e-10)
            assert cost.first_order == pytest.approx(0.0 if task == "c" else first_order, abs=1e-10)
            assert found.excess(method, task) == pytest.approx(excess - (first_order if task == "c" else 0), abs=1e-10)
            assert abs(first_order) > 1e-3
        assert found.cost(method, BASE).first_order == 0
