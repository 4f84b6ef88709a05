"""One model that is measured again and again: its layers are tried out once, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.verify import Trial

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import assert_same
from .test_accumulate import UNKNOWN, Body, tokens_of


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_one_measurement_found_out_is_right_or_corrected_in_the_next(
    kind: type[Body], sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model, examples, trial = kind(), tokens_of(0), Trial()
    total = {n: torch.zeros_like(p).detach() for n, p in model.named_parameters() if p.requires_grad}
    for batch in batches_of(examples, sizes):
        for name, value in estimate_curvature(model, [batch], trial=trial).items():
            total[name] += value
    assert_same(total, slow.empirical(model, examples, "classes"), EXACT)
    named = [line.strip() for record in caplog.records for line in record.getMessage().split("\n")[1:]]
    assert len(named) == len(set(named))


def passes(model: nn.Module, batch: Any, trial: Trial | None) -> int:
    """How often the model runs for one measurement."""
    count = 0

    def seen(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = model.register_forward_pre_hook(seen)
    estimate_curvature(model, [batch], trial=trial)
    handle.remove()
    return count


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama, tied", "vit"])
def test_layers_are_tried_out_in_the_first_measurement_only(name: str) -> None:
    model, batch, trial = FAMILIES[name].model(), batch_of(FAMILIES[name].examples()), Trial()
    alone = passes(model, batch, None)
    assert [passes(model, batch, trial) for _ in range(3)] == [alone, 1, 1]
    next(model.parameters()).requires_grad_(False)
    assert passes(model, batch, trial) > 1, "other parameters are measured"


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


def test_a_gradient_of_zero_proves_nothing() -> None:
    model, batch, trial = FAMILIES["bert"].model(), batch_of(FAMILIES["bert"].examples()), Trial()
    head = model.classifier.weight.detach().clone()
    model.classifier.weight.data.zero_()
    assert passes(model, batch, trial) > 1
    model.classifier.weight.data.copy_(head)
    assert passes(model, batch, trial) > 1
    assert passes(model, batch, trial) == 1
