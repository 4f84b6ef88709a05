"""The basis solves with what it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.kronecker import KroneckerCurvature
from gradmerge.refinement.basis import Basis

from ..curvature.families import FAMILIES, batch_of
from .making import batches, classes, perceptron


def dense(tasks: list[KroneckerCurvature], scales: list[float], name: str) -> Tensor:
    """S of one layer as a matrix over [W b], row by row: what is on the diagonal in the common eigenvectors."""
    layers = [task.layers[name] for task in tasks]
    left = torch.linalg.eigh(torch.stack([layer.outputs / layer.outputs.trace() for layer in layers]).sum(0))[1]
    right = torch.linalg.eigh(torch.stack([layer.inputs / layer.tokens for layer in layers]).sum(0))[1]
    vectors = torch.kron(left, right)
    whole = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for scale, layer in zip(scales, layers, strict=True):
        whole += scale * torch.kron(layer.outputs, layer.inputs) / layer.tokens
    return vectors @ torch.diag((vectors.T @ whole @ vectors).diagonal()) @ vectors.T


def test_solving_is_a_dense_solve_in_the_common_basis() -> None:
    model = perceptron()
    tasks = [estimate_curvature(model, batches(classes(50, seed)), "exact", structure="kronecker") for seed in (1, 2)]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    found = Basis(tasks, [1.0, 3.0], shapes).solve(gradient, 0.7)
    for name in ("0", "2"):
        g = torch.cat([gradient[f"{name}.weight"], gradient[f"{name}.bias"][:, None]], 1)
        matrix = dense(tasks, [1.0, 3.0], f"{name}.weight")
        want = torch.linalg.solve(matrix + 0.7 * torch.eye(len(matrix)).double(), g.flatten()).view(g.shape)
        torch.testing.assert_close(found[f"{name}.weight"], want[:, :-1])
        torch.testing.assert_close(found[f"{name}.bias"], want[:, -1])


def test_one_task_is_solved_with_its_own_kronecker_matrix() -> None:
    model = perceptron()
    task = estimate_curvature(model, batches(classes(50)), "exact", structure="kronecker")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    found = Basis([task], [2.0], shapes).solve(gradient, 0.1)
    layer = task.layers["0.weight"]
    matrix = 2 * torch.kron(layer.outputs, layer.inputs) / layer.tokens
    g = torch.cat([gradient["0.weight"], gradient["0.bias"][:, None]], 1)
    want = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix)).double(), g.flatten()).view(g.shape)
    torch.testing.assert_close(found["0.weight"], want[:, :-1])


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_every_parameter_of_a_transformer_gets_a_direction_of_its_shape(family: str) -> None:
    found = FAMILIES[family]
    model = found.model()
    task = estimate_curvature(model, [batch_of(found.examples())], "sampled", structure="kronecker")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solved = Basis([task], [1.0], shapes).solve(gradient, 1e9)
    assert {name: value.shape for name, value in solved.items()} == shapes
    for name, value in solved.items():  # with a damping beyond all curvature, nothing but the damping is left
        torch.testing.assert_close(value * 1e9, gradient[name], rtol=1e-4, atol=1e-4)
