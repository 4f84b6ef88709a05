"""The curvature along directions is the Gauss-Newton matrix's, by dual numbers and by differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from gradmerge.curvature.losses import LOSSES, labels_of
from gradmerge.refinement import along
from gradmerge.refinement.owners import DataOwner
from gradmerge.refinement.points import trained

from ..curvature.families import FAMILIES, batch_of
from .making import batches, classes, perceptron


def explicit(model: nn.Module, rows: Any, output: str) -> Tensor:
    """Σ_i J_iᵀ H_i J_i over all parameters, entry by entry."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in weights.items()}
    flat = torch.cat([p.flatten() for p in weights.values()])

    def logits(values: Tensor, x: Tensor) -> Tensor:
        parts = values.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return functional_call(model, named, (x,))

    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for x, y in zip(*rows, strict=True):
        jacobian = jacrev(lambda v, x=x: logits(v, x[None])[0])(flat)

        def loss(z: Tensor, y: Tensor = y) -> Tensor:
            return LOSSES[output].losses(z[None], y[None])[0]

        total += jacobian.T @ hessian(loss)(logits(flat, x[None])[0]) @ jacobian
    return total


def random_directions(model: nn.Module, count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for n, p in trained(model).items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("output", ["classes", "labels", "squared"])
def test_it_is_the_explicit_gauss_newton_matrix_along_the_directions(output: str) -> None:
    model, (x, y) = perceptron(), classes(30)
    targets = {"classes": y, "labels": nn.functional.one_hot(y, 3), "squared": torch.randn(30, 3).double()}
    rows = (x, targets[output])
    owner = DataOwner("task", batches(rows, 7), batches(rows, 7), output=LOSSES[output])
    directions = random_directions(model)
    matrix = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in directions])
    want = matrix @ explicit(model, rows, output) @ matrix.T
    torch.testing.assert_close(owner.along(model, directions), want, rtol=1e-10, atol=1e-10)


def test_batches_are_cut_where_logits_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = perceptron(), classes(30)
    owner, directions = DataOwner("task", batches(rows), batches(rows)), random_directions(model)
    whole = owner.along(model, directions)
    monkeypatch.setattr(along, "MOST_NUMBERS", 3 * 7 * 4)
    torch.testing.assert_close(owner.along(model, directions), whole)


class _Opaque(torch.autograd.Function):
    """tanh without a forward-mode derivative, as a fused kernel."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        context.save_for_backward(y)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (y,) = context.saved_tensors
        return gradient * (1 - y * y)


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Opaque.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 2e-3)])
def test_operations_without_forward_derivatives_are_differenced(dtype: torch.dtype, tolerance: float) -> None:
    plain, rows = perceptron(), classes(30)
    fused = perceptron()
    fused[1] = Fused()  # type: ignore[operator]
    given = (rows[0].to(dtype), rows[1])
    directions = random_directions(plain)
    want = DataOwner("task", batches(rows), batches(rows)).along(plain, directions)
    before = {name: p.clone() for name, p in fused.to(dtype).named_parameters()}
    got = DataOwner("task", batches(given), batches(given)).along(fused, directions)
    assert float((got - want).abs().max() / want.abs().max()) < tolerance
    assert all(torch.equal(p, before[name]) for name, p in fused.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "mixtral", "vit"])
def test_transformers_agree_with_differences(family: str) -> None:
    found = FAMILIES[family]
    model = found.model()
    batch = batch_of(found.examples())
    owner, directions = DataOwner("task", [batch], [batch]), random_directions(model, 2)
    dual = owner.along(model, directions)
    with torch.no_grad():
        logits, changes = along._by_differences(model, batch, directions)
    want = along._form(model, batch, logits, changes, lambda m, z, b: owner._loss(m, b).losses(z, labels_of(b)))
    assert float((dual - want).abs().max() / want.abs().max()) < 1e-3
