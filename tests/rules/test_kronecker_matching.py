"""Gradient matching with Kronecker curvature, against matrices that are written out and solved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.rules.kronecker_matching import KroneckerFactors, match_layer, mean_eigenvalue, solve

OUT, IN = 4, 6


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors(seed: int, rows: int = 20, size: tuple[int, int] = (OUT, IN)) -> KroneckerFactors:
    y, x = tensor(seed, rows, size[0]), tensor(seed + 1000, rows, size[1])
    return KroneckerFactors(y.T @ y, x.T @ x, 1 / rows)


def written_out(hessian: Any) -> Tensor:
    """The matrix that acts on X, row after row."""
    if isinstance(hessian, KroneckerFactors):
        return torch.kron(hessian.outputs, hessian.inputs) * hessian.scale
    return torch.diag(torch.as_tensor(hessian).double().expand(OUT, IN).reshape(-1))


def slow(base: Tensor, tuned: Any, weights: Any, prior: Any, curvature: Any, damping: float, penalty: Any, rest: bool):
    """As the equations read."""
    h0 = written_out(prior) + damping * torch.eye(base.numel(), dtype=torch.float64)
    every = penalty if isinstance(penalty, list) else [penalty] * len(tuned)
    whole, pull = h0.clone(), torch.zeros(base.numel(), dtype=torch.float64)
    for model, weight, hessian, own in zip(tuned, weights, curvature, every, strict=True):
        h = written_out(hessian)
        whole += 0 if rest else weight * h
        pull += weight * ((h0 if own is None else written_out(own)) + h) @ (model - base).reshape(-1)
    step = torch.linalg.solve(whole, pull).reshape(base.shape)
    return base - step if rest else base + step


PRIORS = {"kronecker": factors(7), "diagonal": tensor(8, OUT, IN).square(), "constant": torch.tensor(0.3).double()}
PENALTIES = {
    "H_0": None,
    "none": torch.zeros((), dtype=torch.float64),
    "kronecker": factors(9),
    "one each": [None, tensor(4, OUT, IN).square(), torch.tensor(2.0).double()],
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("damping", [1e-6, 0.5])
def test_a_layer_is_what_the_equations_give_with_written_out_matrices(prior: str, penalty: str, damping: float) -> None:
    base, tuned = tensor(0, OUT, IN), [tensor(i, OUT, IN) for i in (1, 2, 3)]
    curvature: list[Any] = [factors(11), factors(12), torch.tensor(0.7).double()]
    weights = [1.0, 0.4, 2.0]
    given = (base, tuned, weights, PRIORS[prior], curvature, damping, PENALTIES[penalty])
    for rest in (False, True):
        got, want = match_layer(*given, removes=rest), slow(*given, rest)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_linear_regression_with_several_outputs_gives_the_jointly_trained_layer() -> None:
    """Half the squared error of x̃ᵀXᵀ − y has the curvature I ⊗ A, so that merging is exact."""
    weights, ridge = [1.0, 0.3, 2.0], factors(5)
    base = tensor(0, OUT, IN)
    tasks = [(tensor(20 + i, 15, IN), tensor(30 + i, 15, OUT)) for i in range(3)]

    def trained(parts: list[tuple[float, Tensor, Tensor]]) -> Tensor:
        matrix = written_out(ridge)
        right = matrix @ base.reshape(-1)
        for weight, x, y in parts:
            matrix = matrix + weight * torch.kron(torch.eye(OUT, dtype=torch.float64), x.T @ x)
            right = right + weight * (y.T @ x).reshape(-1)
        return torch.linalg.solve(matrix, right).reshape(OUT, IN)

    tuned = [trained([(1.0, x, y)]) for x, y in tasks]
    joint = trained([(w, x, y) for w, (x, y) in zip(weights, tasks, strict=True)])
    curvature = [KroneckerFactors(torch.eye(OUT, dtype=torch.float64) * len(x), x.T @ x, 1 / len(x)) for x, _ in tasks]
    merged = match_layer(base, tuned, weights, ridge, curvature, 0.0)
    assert float((merged - joint).abs().max()) < 1e-8
    arithmetic = base + sum(w * (t - base) for w, t in zip(weights, tuned, strict=True))
    assert float((arithmetic - joint).abs().max()) > 0.1


def test_one_kronecker_product_and_diagonals_are_solved_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmerge.rules.kronecker_matching.STEPS", 2)
    right = tensor(3, OUT, IN)
    for parts in ([(2.0, factors(1)), (0.1, torch.ones((), dtype=torch.float64))], [(1.0, PRIORS["diagonal"])]):
        whole = sum(weight * written_out(part) for weight, part in parts)
        want = torch.linalg.solve(whole, right.reshape(-1)).reshape(OUT, IN)
        torch.testing.assert_close(solve(parts, right), want, rtol=1e-9, atol=1e-9)


def test_where_nothing_is_known_it_is_task_arithmetic() -> None:
    """A dead layer (A or G is 0), and directions that no input ever took: never NaN, never far away."""
    base, tuned = tensor(0, OUT, IN), [tensor(i, OUT, IN) for i in (1, 2)]
    arithmetic = base + (tuned[0] - base) + 0.5 * (tuned[1] - base)
    none = torch.zeros((), dtype=torch.float64)
    dead = KroneckerFactors(torch.zeros(OUT, OUT).double(), factors(1).inputs, 1.0)
    for curvature in ([dead, dead], [KroneckerFactors(dead.outputs, torch.zeros(IN, IN).double(), 1.0), none]):
        for damping in (0.0, 1e-10):
            merged = match_layer(base, tuned, [1.0, 0.5], none, curvature, damping)
            torch.testing.assert_close(merged, arithmetic)
            removed = match_layer(base, tuned, [1.0, 0.5], none, curvature, damping, removes=True)
            torch.testing.assert_close(removed, 2 * base - arithmetic)
    # Two rows of inputs in six dimensions, rounded to float32, so that half of the zero eigenvalues are negative.
    few = [factors(i, rows=2) for i in (4, 5)]
    rounded = [KroneckerFactors(f.outputs.float().double(), f.inputs.float().double(), f.scale) for f in few]
    merged = match_layer(base, tuned, [1.0, 0.5], none, rounded, 0.0)
    assert float((merged - arithmetic).norm()) < 10 * float((tuned[0] - base).norm())
    seen = torch.linalg.svd(torch.cat([f.inputs for f in few]))[2][4:]
    torch.testing.assert_close(merged @ seen.T, arithmetic @ seen.T, rtol=1e-5, atol=1e-5)


def test_small_eigenvalues_of_a_factor_that_rounding_made_indefinite_are_not_lost() -> None:
    """Zeros become about ±1e-8 of the largest; what is far above that is data, and counts beside little damping."""
    base, tuned = tensor(0, OUT, IN), [tensor(i, OUT, IN) for i in (1, 2)]
    turned = torch.linalg.qr(tensor(3, IN, IN)).Q
    inputs = (turned * torch.tensor([1e4, 1.0, 0.1, 0.005, 0.0, 0.0]).double()) @ turned.T
    inputs = ((inputs + inputs.T) / 2).float().double()
    assert torch.linalg.eigvalsh(inputs)[0] < 0
    curvature: list[Any] = [KroneckerFactors(factors(i).outputs, inputs, 1.0) for i in (1, 2)]
    given = base, tuned, [1.0, 0.5], torch.tensor(0.0).double(), curvature
    for rest in (False, True):
        want = slow(*given, 0.1, torch.tensor(0.0).double(), rest)
        got = match_layer(*given, 0.1, torch.tensor(0.0).double(), removes=rest)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_the_mean_eigenvalue_is_the_trace_over_the_size() -> None:
    curvature: list[Any] = [factors(1), torch.tensor(0.5).double(), PRIORS["diagonal"]]
    whole = 2.0 * written_out(curvature[0]) + written_out(curvature[1]) + 0.3 * written_out(curvature[2])
    assert mean_eigenvalue([2.0, -1.0, 0.3], curvature, OUT * IN) == pytest.approx(float(whole.trace()) / (OUT * IN))


def test_what_has_no_minimum_is_an_error() -> None:
    base, tuned = tensor(0, OUT, IN), [tensor(1, OUT, IN)]
    with pytest.raises(ValueError):
        match_layer(base, tuned, [-1.0], torch.zeros(()).double(), [factors(1)], 1e-3)
