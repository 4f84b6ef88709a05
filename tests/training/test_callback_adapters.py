"""CurvatureCallback on LoRA adapters: curvature of the adapter's own tensors."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import gradmerge as gm

from ..checkpoints.families import randomise
from ..curvature import slow
from .callback_runs import Watch, as_stored, averaged, bert, read, rows_of, sentences, squares, trainer_for

TOLERANCE = 2e-4


def lora(model: Any, **changes: Any) -> Any:
    """A model under an adapter whose factors are all random, with dropout."""
    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "lora_dropout": 0.1,
        "target_modules": ["query", "value", "dense"],
        "modules_to_save": ["classifier"],
    }
    adapted = get_peft_model(model, LoraConfig(**settings | changes))
    randomise([p for _, p in sorted(adapted.named_parameters()) if p.requires_grad], 5, 0.1)
    return adapted


def merged(model: Any) -> Any:
    plain = copy.deepcopy(model).merge_and_unload()
    return plain.requires_grad_(True)


@pytest.mark.parametrize("source", ["adam", "online", "pass"])
def test_the_adapters_own_tensors_go_by_the_names_of_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    model, data, watch, batches = lora(bert()), sentences(8), Watch(), []
    start = copy.deepcopy(model)
    options: dict[str, Any] = {"every": 1, "decay": 0.8} if source == "online" else {}
    callback = gm.CurvatureCallback(source, **options)
    with caplog.at_level(logging.WARNING, logger="gradmerge"):
        trainer_for(tmp_path / "out", model, data, callback, watch, batches=batches, num_train_epochs=1).train()
    assert caplog.text
    checkpoint = tmp_path / "out" / "checkpoint-2"
    got = read(checkpoint)
    assert {n: t.shape for n, t in got.items()} == {
        n: t.shape for n, t in load_file(checkpoint / "adapter_model.safetensors").items()
    }
    if source == "online":
        means = []
        for weights, batch in zip(watch.weights, batches, strict=True):
            start.load_state_dict(weights)
            means.append({n: v / 4 for n, v in squares(start, rows_of(batch)).items()})
        want = {n: 8 * v for n, v in averaged(means, 0.8).items()}
    elif source == "pass":
        want = squares(model, data)
    else:
        return
    slow.assert_same(got, as_stored(checkpoint, model, want), TOLERANCE)
