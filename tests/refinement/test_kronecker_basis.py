"""Solving in the Kronecker basis against a dense solve."""

from __future__ import annotations

import pytest
import torch

from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.refinement.kronecker_basis import KroneckerBasis

from ..curvature.families import FAMILIES, batch_of
from .making import batches, classes, perceptron


def test_solving_is_a_dense_solve_with_every_layers_kronecker_matrix() -> None:
    model = perceptron()
    curvature = estimate_curvature(model, batches(classes(50)), "exact", kind="kronecker")
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    basis = KroneckerBasis(curvature, 2.0)
    solution, eigenvalues = basis.solve(gradient, 0.1), []
    for name in ("0", "2"):
        layer = curvature.layers[f"{name}.weight"]
        matrix = 2 * torch.kron(layer.outputs, layer.inputs) / layer.tokens
        eigenvalues.append(torch.linalg.eigvalsh(matrix))
        g = torch.cat([gradient[f"{name}.weight"], gradient[f"{name}.bias"][:, None]], 1)
        want = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix)).double(), g.flatten()).view(g.shape)
        torch.testing.assert_close(solution[f"{name}.weight"], want[:, :-1])
        torch.testing.assert_close(solution[f"{name}.bias"], want[:, -1])
    assert basis.mean() == pytest.approx(float(torch.cat(eigenvalues).mean()))


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_every_parameter_of_a_transformer_gets_a_solution_of_its_shape(family: str) -> None:
    found = FAMILIES[family]
    model = found.model()
    curvature = estimate_curvature(model, [batch_of(found.examples())], "sampled", kind="kronecker")
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solution = KroneckerBasis(curvature).solve(gradient, 1e9)
    assert solution.keys() == gradient.keys()
    for name, value in solution.items():  # the damping is far larger than the curvature
        torch.testing.assert_close(value * 1e9, gradient[name], rtol=1e-4, atol=1e-4)
