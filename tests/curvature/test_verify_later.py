"""Formulas that fit the first examples and not the later ones: noticed, and measured right all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradmerge.curvature.estimate import estimate_curvature

from . import slow
from .families import EXACT, batch_of
from .slow import Example, assert_same
from .test_accumulate import WIDTH, Body

LONG = 4


class OutsideWhenLong(Body):
    """The weight is used outside its module too, for long inputs only."""

    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + F.linear(x, self.layer.weight).sin() if x.shape[1] > LONG else y


class OutsideWhenMarked(Body):
    """The same, where a mark occurs: which batch that is, no shape tells."""

    def inner(self, x: Tensor) -> Tensor:
        y, marked = self.layer(x), (x[:, :, 0] > 5).any(1)[:, None, None]
        return y + marked * F.linear(x, self.layer.weight).sin() if marked.any() else y


class OutsideOnlyWhenMarked(Body):
    """Marked examples go by the weight alone: the module is not even called when all are marked."""

    def inner(self, x: Tensor) -> Tensor:
        marked = (x[:, :, 0] > 5).any(1)[:, None, None]
        if marked.all():
            return F.linear(x, self.layer.weight).sin()
        return (
            torch.where(marked, F.linear(x, self.layer.weight).sin(), self.layer(x)) if marked.any() else self.layer(x)
        )


class TwiceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.layer(y.tanh()) if x.shape[1] > LONG else y


class OnceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if x.shape[1] > LONG else self.layer(y.tanh())


KINDS = [OutsideWhenLong, OutsideWhenMarked, OutsideOnlyWhenMarked, TwiceWhenLong, OnceWhenLong]


def batches_of(lengths: Sequence[int], marked: Sequence[int] = (), size: int = 3) -> tuple[list[Example], list[Any]]:
    """Batches of these lengths; of those whose numbers are ``marked``, the last two examples have a mark."""
    generator = torch.Generator().manual_seed(1)
    examples: list[Example] = []
    batches: list[Any] = []
    for number, length in enumerate(lengths):
        x = torch.randn(size, length, WIDTH, generator=generator, dtype=torch.float64)
        if number in marked:
            x[1:, -1, 0] = 6.0
        some = [{"0": one, "labels": torch.tensor((number + n) % 3)} for n, one in enumerate(x)]
        examples += some
        batches.append(batch_of(some))
    return examples, batches


def check(model: nn.Module, examples: list[Example], batches: Any, likelihood: str = "empirical") -> None:
    twin = slow.empirical if likelihood == "empirical" else slow.exact
    assert_same(estimate_curvature(model, batches, likelihood), twin(model, examples, "classes"), EXACT)


@pytest.mark.parametrize("likelihood", ["empirical", "exact"])
@pytest.mark.parametrize("lengths", [(1, 1, 5), (3, 1, 5, 6, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_a_way_does_not_fit_is_noticed_as_it_comes(
    kind: type[Body], lengths: tuple[int, ...], likelihood: str
) -> None:
    examples, batches = batches_of(lengths)
    check(kind(), examples, iter(batches), likelihood)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [OutsideWhenMarked, OutsideOnlyWhenMarked])
def test_a_use_outside_the_module_is_noticed_in_the_batch_that_has_it(kind: type[Body], size: int) -> None:
    """Batches of all shapes have been checked long before; they can be gone through only once."""
    examples, batches = batches_of([3] * 7, marked=[4, 6], size=size)
    if size == 1:
        batches[4][0][:, -1, 0] = 6.0
        examples[4]["0"][-1, 0] = 6.0
    check(kind(), examples, iter(batches))


def test_a_use_outside_the_module_leaves_the_models_gradients_alone() -> None:
    model = OutsideWhenMarked()
    mine = {p: torch.full_like(p, 3.0) for p in model.parameters()}
    for p, gradient in mine.items():
        p.grad = gradient
    examples, batches = batches_of([3] * 3, marked=[2])
    check(model, examples, batches)
    for p, gradient in mine.items():
        assert p.grad is gradient
        assert bool((gradient == 3).all())
        assert p.requires_grad
    assert "weight" not in model.layer.__dict__
