"""Which tensors are measured, and models that are refused before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from gradmerge.errors import InputError
from gradmerge.training.curvature_targets import measured_tensors

from .callback_runs import bert


def ia3() -> Any:
    return get_peft_model(bert(), IA3Config(target_modules=["query"], feedforward_modules=[]))


def lora(**changes: Any) -> Any:
    return get_peft_model(bert(), LoraConfig(r=2, target_modules=["query"], **changes))


def quantised() -> Any:
    model = lora()
    layer = model.base_model.model.bert.encoder.layer[0].attention.self.key
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (ia3, "for LORA adapters, whose weights are W .* this one is IA3"),
        (lambda: lora(init_lora_weights="olora"), "initialised with olora, which changed the base's weights"),
        (quantised, "weights of the base are quantised"),
    ],
)
def test_full_weights_under_an_adapter_that_cannot_be_had_are_refused(make_model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measured_tensors(make_model(), adapted=True)


def test_a_model_that_is_not_trained_has_nothing_to_measure() -> None:
    with pytest.raises(InputError, match="nothing to estimate"):
        measured_tensors(bert().requires_grad_(False), adapted=False)


def test_only_measured_parameters_ask_for_a_gradient_inside() -> None:
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    measured = measured_tensors(model, adapted=False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    with measured.chosen():
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert not any(p.requires_grad for p in model.parameters())
