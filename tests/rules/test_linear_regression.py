"""Linear regression, where every model and every curvature is known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradmerge.rules import METHODS

from ..compare.test_identities import FEATURES, Loss, make_loss, numbers, trained
from .full_matrices import gradient_matching_full, removal_full

RIDGE = numbers(9, FEATURES, FEATURES)
PRIOR = RIDGE @ RIDGE.T + torch.eye(FEATURES, dtype=torch.float64)


def relative(found: Tensor, target: Tensor, base: Tensor) -> float:
    """The error as a multiple of how far the target is from the base."""
    return float((found - target).norm() / (target - base).norm())


@pytest.mark.parametrize("weights", [[1.0, 0.7, 1.2], [1.0, -0.1, 0.5]])
@pytest.mark.parametrize("held_by", ["nothing", "H_0", "another P", "a P of each"])
def test_with_the_penalty_that_the_models_were_tuned_under_the_merge_is_the_jointly_trained_model(
    held_by: str, weights: list[float]
) -> None:
    """H̄ has H_0, which the target is held by; P is what the models were held by. With any other P it is far off."""
    base, tasks = numbers(3, FEATURES), [make_loss("linear", seed) for seed in range(3)]
    hold = 100 * PRIOR
    eye = torch.eye(FEATURES, dtype=torch.float64)
    penalties = {
        "nothing": [0 * eye] * 3,
        "H_0": [hold] * 3,
        "another P": [7 * eye] * 3,
        "a P of each": [0 * eye, 7 * eye, hold],
    }
    tuned = [trained([(1.0, task)], own, base) for task, own in zip(tasks, penalties[held_by], strict=True)]
    target = trained(list(zip(weights, tasks, strict=True)), hold, base)
    curvature = [task.hessian(base) for task in tasks]

    def merged(penalty: list[Tensor]) -> Tensor:
        return gradient_matching_full(base, tuned, hold, curvature, weights, penalty)

    assert relative(merged(penalties[held_by]), target, base) < 1e-11
    for other, penalty in penalties.items():
        if other != held_by:
            assert relative(merged(penalty), target, base) > 0.05, other
    if held_by == "nothing":
        assert relative(merged(penalties["H_0"]), target, base) > 5
    if held_by == "H_0":
        assert torch.equal(gradient_matching_full(base, tuned, hold, curvature, weights), merged([hold] * 3))


def test_removal_of_one_row_is_cooks_influence_formula() -> None:
    """θ₋ᵢ = θ − (XᵀX)⁻¹ xᵢ eᵢ / (1 − hᵢ), the classical formula for a row left out."""
    whole = make_loss("linear", 4)
    x, y = whole.x, whole.y
    nothing = torch.zeros(FEATURES, FEATURES, dtype=torch.float64)
    base = trained([(1.0, whole)], nothing, torch.zeros(FEATURES, dtype=torch.float64))
    row, residual = x[3], y[3] - x[3] @ base
    inverse = torch.linalg.inv(x.T @ x)
    cook = base - inverse @ row * residual / (1 - row @ inverse @ row)
    tuned = trained([(1.0, Loss("linear", x[3:4], y[3:4]))], PRIOR, base)
    rest = x.T @ x - torch.outer(row, row)
    assert torch.allclose(removal_full(base, [tuned], rest, PRIOR, [torch.outer(row, row)]), cook, rtol=1e-9)


def test_diagonal_rules_equal_the_full_ones_for_diagonal_matrices() -> None:
    generator = torch.Generator().manual_seed(5)

    def positive() -> Tensor:
        return torch.rand(FEATURES, generator=generator, dtype=torch.float64) + 0.1

    base = positive()
    tuned, prior, curvature = [base + positive(), base - positive()], positive(), [positive(), positive()]
    weights = [0.4, 1.3]
    diagonal = METHODS["gradient-matching"](base, tuned, weights, prior, curvature, 0.2)
    full = gradient_matching_full(base, tuned, torch.diag(prior + 0.2), [torch.diag(c) for c in curvature], weights)
    assert torch.allclose(diagonal, full, rtol=1e-12)

    penalty = positive()
    big = prior + 10
    diagonal = METHODS["removal"](base, tuned, weights, big, curvature, 0.2, penalty, base_saw_removed=True, cap="none")
    rest = big - weights[0] * curvature[0] - weights[1] * curvature[1] + 0.2
    full = removal_full(base, tuned, torch.diag(rest), torch.diag(penalty), [torch.diag(c) for c in curvature], weights)
    assert torch.allclose(diagonal, full, rtol=1e-12)
