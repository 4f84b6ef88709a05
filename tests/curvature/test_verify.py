"""One model that is measured again and again: its layers are tried out once, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradmerge.curvature.estimate import estimate_curvature, verify_formulas
from gradmerge.curvature.verify import Formulas

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import assert_same
from .test_accumulate import UNKNOWN, Body, tokens_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_reused_formulas_are_right_or_corrected(kind: type[Body], sizes: tuple[int, ...]) -> None:
    model, examples = kind(), tokens_of(0)
    batches = list(batches_of(examples, sizes))
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


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama, tied", "vit"])
def test_reused_formulas_are_not_verified_again(name: str) -> None:
    model, batch = FAMILIES[name].model(), batch_of(FAMILIES[name].examples())
    formulas = verify_formulas(model, batch, CPU)
    assert formulas.conclusive
    assert passes(model, batch, None) > 1
    assert passes(model, batch, formulas) == 1


@pytest.fixture(params=["of all", "of one kind"])
def few_bits(request: pytest.FixtureRequest) -> Iterator[str]:
    """float32 is multiplied in fewer bits, as either of PyTorch's settings has it."""
    if request.param == "of all":
        torch.set_float32_matmul_precision("high")
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_layers_are_tried_out_in_all_bits_and_measured_in_as_many_as_the_user_has_set(few_bits: str) -> None:
    model, batch = FAMILIES["bert"].model(), batch_of(FAMILIES["bert"].examples())
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    estimate_curvature(model, [batch])
    assert few_bits == "tf32" and set(seen[:-1]) == {"ieee"} and seen[-1] == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_gradient_of_zero_is_not_conclusive() -> None:
    model, batch = FAMILIES["bert"].model(), batch_of(FAMILIES["bert"].examples())
    model.classifier.weight.data.zero_()
    assert not verify_formulas(model, batch, CPU).conclusive
