"""Gradients, compared with a loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_gradient

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import Example


def by_hand(model: nn.Module, examples: list[Example], output: str) -> dict[str, Tensor]:
    """Σ ∇ℓ_i, one example after the other, without padding."""
    total = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    for example in examples:
        one = slow.loss_of(slow.logits_of(model, example), example["labels"], output)
        for name, value in slow.gradients(model, one).items():
            total[name] += value
    return total


def assert_near(got: Any, want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    largest = max(float(value.abs().max()) for value in want.values())
    for name, value in want.items():
        error = float((got[name].double() - value).abs().max())
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gradient_is_the_sum_over_single_examples_whatever_the_batches(name: str) -> None:
    family = FAMILIES[name]
    model, examples = family.model(), family.examples()
    want = by_hand(model, examples, family.output)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train()
    for batches in ([batch_of(examples)], batches_of(examples, (2, 1, 2), longer=1)):
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            model.eval()
        got = estimate_gradient(model, batches, output=family.output)
        assert_near(got, want, max(family.tolerance, EXACT))
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in model.named_parameters())


def test_nothing_to_differentiate_is_an_error() -> None:
    model, batch = FAMILIES["gpt2"].model(), batch_of(FAMILIES["gpt2"].examples())
    masked = batch | {"labels": torch.full_like(batch["labels"], slow.MASKED)}
    for each, batches in ((model, []), (model, [masked]), (FAMILIES["gpt2"].model().requires_grad_(False), [batch])):
        with pytest.raises(gm.InputError):
            estimate_gradient(each, batches)
    model.transformer.wte.weight.data.fill_(torch.nan)
    with pytest.raises(gm.InputError):
        estimate_gradient(model, [batch])
