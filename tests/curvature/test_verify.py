"""Formulas that are verified once: reused by later estimates, and given up in a batch that they do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradmerge.curvature.estimate import estimate_curvature, verify_formulas
from gradmerge.curvature.verify import Formulas

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import Example, assert_same
from .test_accumulate import UNKNOWN, WIDTH, Body, tokens_of

CPU = torch.device("cpu")
LONG = 4


@pytest.mark.parametrize("kind", UNKNOWN)
def test_reused_formulas_are_right_or_given_up(kind: type[Body]) -> None:
    model, examples = kind(), tokens_of(0)
    batches = list(batches_of(examples, (1, 3, 2)))
    formulas = verify_formulas(model, batches[0], CPU)
    total = {n: torch.zeros_like(p).detach() for n, p in model.named_parameters() if p.requires_grad}
    for batch in batches:
        for name, value in estimate_curvature(model, [batch], formulas=formulas).items():
            total[name] += value
    assert_same(total, slow.empirical(model, examples, "classes"), EXACT)


def passes(model: nn.Module, batch: Any, formulas: Formulas | None) -> int:
    """Return how often the model runs in one estimate."""
    count = 0

    def seen(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = model.register_forward_pre_hook(seen)
    estimate_curvature(model, [batch], formulas=formulas)
    handle.remove()
    return count


@pytest.mark.parametrize("name", ["bert", "llama, tied", "vit"])
def test_reused_formulas_are_not_verified_again(name: str) -> None:
    model, batch = FAMILIES[name].model(), batch_of(FAMILIES[name].examples())
    formulas = verify_formulas(model, batch, CPU)
    assert formulas.conclusive
    assert passes(model, batch, None) > 1
    assert passes(model, batch, formulas) == 1


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


def test_a_gradient_of_zero_is_not_conclusive() -> None:
    model, batch = FAMILIES["bert"].model(), batch_of(FAMILIES["bert"].examples())
    model.classifier.weight.data.zero_()
    assert not verify_formulas(model, batch, CPU).conclusive


class OutsideWhenLong(Body):
    """The weight is also used outside its module, for long inputs only."""

    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + F.linear(x, self.layer.weight).sin() if x.shape[1] > LONG else y


class OutsideOnlyWhenMarked(Body):
    """Marked examples use the weight only outside its module."""

    def inner(self, x: Tensor) -> Tensor:
        marked = (x[:, :, 0] > 5).any(1)[:, None, None]
        if marked.all():
            return F.linear(x, self.layer.weight).sin()
        return torch.where(marked, F.linear(x, self.layer.weight).sin(), self.layer(x))


class TwiceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.layer(y.tanh()) if x.shape[1] > LONG else y


class OnceWhenLong(Body):
    def inner(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if x.shape[1] > LONG else self.layer(y.tanh())


def batches_of_lengths(
    lengths: Sequence[int], marked: Sequence[int] = (), size: int = 3
) -> tuple[list[Example], list[Any]]:
    """Batches of these lengths; the last examples of those in ``marked`` have a mark."""
    generator = torch.Generator().manual_seed(1)
    examples: list[Example] = []
    batches: list[Any] = []
    for number, length in enumerate(lengths):
        x = torch.randn(size, length, WIDTH, generator=generator, dtype=torch.float64)
        if number in marked:
            x[min(1, size - 1) :, -1, 0] = 6.0
        rows = [{"0": row, "labels": torch.tensor((number + n) % 3)} for n, row in enumerate(x)]
        examples += rows
        batches.append(batch_of(rows))
    return examples, batches


@pytest.mark.parametrize("likelihood", ["empirical", "exact"])
@pytest.mark.parametrize("kind", [OutsideWhenLong, TwiceWhenLong, OnceWhenLong])
def test_another_use_in_a_later_batch_is_noticed(kind: type[Body], likelihood: str) -> None:
    examples, batches = batches_of_lengths((3, 1, 5, 6, 2))
    model = kind()
    want = getattr(slow, likelihood)(model, examples, "classes")
    assert_same(estimate_curvature(model, iter(batches), likelihood), want, EXACT)


@pytest.mark.parametrize("size", [1, 3])
def test_a_use_outside_the_module_leaves_the_gradients_of_the_model_alone(size: int) -> None:
    model = OutsideOnlyWhenMarked()
    gradients = {p: torch.full_like(p, 3.0) for p in model.parameters()}
    for p, gradient in gradients.items():
        p.grad = gradient
    examples, batches = batches_of_lengths([3] * 7, marked=[4, 6], size=size)
    assert_same(estimate_curvature(model, iter(batches)), slow.empirical(model, examples, "classes"), EXACT)
    for p, gradient in gradients.items():
        assert p.grad is gradient and bool((gradient == 3).all()) and p.requires_grad
    assert "weight" not in model.layer.__dict__
