"""CurvatureCallback on LoRA adapters: the adapter's own tensors, and the full weights that it changes."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError

from ..checkpoints.families import make, randomise
from ..curvature import slow
from .callback_runs import Watch, as_stored, averaged, bert, read, rows_of, sentences, squares, texts, trainer_for

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


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_adapted_is_what_merging_the_adapter_and_measuring_the_result_gives(tmp_path: Path, family: str) -> None:
    if family == "bert":
        model, data, output = lora(bert()), sentences(8), "classes"
    elif family == "gpt2":
        model = lora(make("gpt2"), target_modules=["c_attn", "c_fc"], modules_to_save=None, fan_in_fan_out=True)
        data, output = texts(8), "next-token"
    else:
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(2))
        data = [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
        make("vit").save_pretrained(tmp_path / "base")  # its files have other names than its parameters
        base = type(make("vit")).from_pretrained(tmp_path / "base")
        model, output = lora(base, target_modules=["q_proj", "fc1"]), "classes"
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    trainer_for(tmp_path / "out", model, data, gm.CurvatureCallback("pass", adapted=True), num_train_epochs=1).train()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    plain = merged(model)
    plain.save_pretrained(tmp_path / "merged")
    want = as_stored(tmp_path / "merged", plain, squares(plain, data, output))
    got = read(tmp_path / "out")
    slow.assert_same(got, want, TOLERANCE)
    assert set(got) == set(load_file(tmp_path / "merged" / "model.safetensors"))


def test_adapted_online_averages_over_the_adapted_weights_of_the_steps(tmp_path: Path) -> None:
    model, watch, batches = lora(bert()), Watch(), []
    start = copy.deepcopy(model)
    callback = gm.CurvatureCallback("online", every=1, decay=0.5, adapted=True)
    trainer_for(tmp_path / "out", model, sentences(8), callback, watch, batches=batches, num_train_epochs=1).train()
    means: list[dict[str, Tensor]] = []
    for weights, batch in zip(watch.weights, batches, strict=True):
        start.load_state_dict(weights)
        means.append({n: v / 4 for n, v in squares(merged(start), rows_of(batch)).items()})
    want = {n: 8 * v for n, v in averaged(means, 0.5).items()}
    plain = merged(model)
    plain.save_pretrained(tmp_path / "merged")
    slow.assert_same(read(tmp_path / "out"), as_stored(tmp_path / "merged", plain, want), TOLERANCE)


@pytest.mark.parametrize(
    ("make_model", "match"),
    [
        (lambda: bert(), "PEFT"),
        (lambda: lora(bert(), use_dora=True), "DoRA"),
        (lambda: lora(make("llama-tied"), target_modules=["embed_tokens"], modules_to_save=None), "tied"),
    ],
)
def test_adapted_weights_that_are_no_base_plus_product_are_refused(tmp_path: Path, make_model: Any, match: str) -> None:
    model = make_model()
    data = texts(8) if "llama" in type(getattr(model, "base_model", model)).__name__.lower() else sentences(8)
    with pytest.raises(InputError, match=match):
        trainer_for(tmp_path / "out", model, data, gm.CurvatureCallback("pass", adapted=True)).train()
