"""Formulas are verified once, on two examples; later batches that use a layer in another way are noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_curvature

from . import slow
from .families import EXACT, FAMILIES, batch_of
from .slow import Example, assert_same
from .test_accumulate import WIDTH, Body

LONG = 4


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_formulas_are_verified_in_full_precision(tf32: None) -> None:
    model, batch = FAMILIES["bert"].model(), batch_of(FAMILIES["bert"].examples())
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    estimate_curvature(model, [batch])
    assert set(seen[:-1]) == {"ieee"} and seen[-1] == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


class OutsideWhenLong(Body):
    """The weight is also used outside its module, for long inputs only."""

    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + F.linear(x, self.layer.weight).sin() if x.shape[1] > LONG else y


class TwiceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.layer(y.tanh()) if x.shape[1] > LONG else y


class OnceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if x.shape[1] > LONG else self.layer(y.tanh())


def batches_of_lengths(lengths: Sequence[int], size: int = 3) -> tuple[list[Example], list[Any]]:
    generator = torch.Generator().manual_seed(1)
    examples: list[Example] = []
    batches: list[Any] = []
    for number, length in enumerate(lengths):
        x = torch.randn(size, length, WIDTH, generator=generator, dtype=torch.float64)
        rows = [{"0": row, "labels": torch.tensor((number + n) % 3)} for n, row in enumerate(x)]
        examples += rows
        batches.append(batch_of(rows))
    return examples, batches


@pytest.mark.parametrize("likelihood", ["empirical", "exact"])
@pytest.mark.parametrize("kind", [TwiceWhenLong, OnceWhenLong])
def test_another_use_in_a_later_batch_is_noticed(kind: type[Body], likelihood: str) -> None:
    examples, batches = batches_of_lengths((3, 1, 5, 6, 2))
    model = kind()
    want = getattr(slow, likelihood)(model, examples, "classes")
    assert_same(estimate_curvature(model, iter(batches), likelihood), want, EXACT)


def test_a_later_use_outside_of_the_module_is_an_error_that_leaves_the_model_alone() -> None:
    model = OutsideWhenLong()
    gradients = {p: torch.full_like(p, 3.0) for p in model.parameters()}
    for p, gradient in gradients.items():
        p.grad = gradient
    _, batches = batches_of_lengths((3, 1, 5))
    with pytest.raises(gm.InputError, match=r"layer\.weight"):
        estimate_curvature(model, iter(batches))
    for p, gradient in gradients.items():
        assert p.grad is gradient and bool((gradient == 3).all()) and p.requires_grad
    assert "weight" not in model.layer.__dict__
