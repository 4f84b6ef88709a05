"""PriorTrainer: its settings, its steps, and resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

import gradmerge as gm

from ..curvature.training import arguments, examples, fresh

STEPS: dict[str, Any] = {"max_steps": 6, "adam_beta1": 0.8, "adam_epsilon": 1e-6}


def positive(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def trained(kind: Any, folder: Path, family: str = "bert", model: Any = None, **options: Any) -> nn.Module:
    changes = options.pop("changes", {})
    model = copy.deepcopy(model) if model is not None else fresh(family)
    kind(model, arguments(folder, **STEPS | changes), train_dataset=examples(family, 10), **options).train()
    result: nn.Module = model
    return result


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_with_strength_zero_the_weights_are_the_trainers_bit_for_bit(tmp_path: Path, optim: str) -> None:
    changes = {"optim": optim, "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    plain = trained(Trainer, tmp_path / "a", changes=changes)
    found = trained(gm.PriorTrainer, tmp_path / "b", changes=changes, prior=positive(plain), strength=0.0)
    for (name, a), b in zip(found.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    prior = positive(fresh("bert"))

    def run(folder: Path, resume: str | None = None, stop: int | None = None) -> Path:
        trainer = gm.PriorTrainer(
            fresh("bert"),
            arguments(folder, save_strategy="steps", save_steps=3, **STEPS),
            train_dataset=examples("bert", 10),
            prior=prior,
            strength=20.0,
            curvature=gm.CurvatureCallback("pass"),
        )
        trainer.args.max_steps = stop or 6
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return folder

    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "parts", stop=3)
    run(parts, resume=str(parts / "checkpoint-3"))
    for path in ("model.safetensors", "checkpoint-6/model.safetensors"):
        assert (whole / path).read_bytes() == (parts / path).read_bytes(), path
    one, two = (gm.Curvature.load(folder / "curvature") for folder in (whole, parts))  # their headers name the folder
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    anchors = torch.load(parts / "checkpoint-6" / "optimizer.pt", weights_only=True)["state"]["anchors"]
    start = dict(fresh("bert").named_parameters())
    assert any(torch.equal(anchor, start["classifier.weight"]) for anchor in anchors[0])


def test_resuming_from_a_checkpoint_without_anchor_is_refused(tmp_path: Path) -> None:
    start = fresh("bert")
    saved = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    trained(gm.PriorTrainer, tmp_path, model=start, changes={"max_steps": 3, **saved})

    def resume(**options: Any) -> nn.Module:
        model = fresh("bert")
        data = examples("bert", 10)
        gm.PriorTrainer(model, arguments(tmp_path, **STEPS, **saved), train_dataset=data, **options).train(
            resume_from_checkpoint=True
        )
        return model

    with pytest.raises(gm.InputError):
        resume()
    held = resume(prior=1e12, anchor=start.state_dict())
    for a, b in zip(held.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = fresh("llama-untied")
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).double()


def lora(folder: Path, model: Any = None, **options: Any) -> Any:
    model = model or adapter()
    trainer = gm.PriorTrainer(model, arguments(folder, **STEPS), train_dataset=examples("llama-untied", 10), **options)
    trainer.train()
    trainer.save_model()
    return model


def test_lora_factors_take_their_own_curvature_but_not_that_of_the_base(tmp_path: Path) -> None:
    with pytest.raises(gm.InputError):
        lora(tmp_path / "a", prior=positive(fresh("llama-untied")))
    first = lora(tmp_path / "a", curvature=gm.CurvatureCallback("pass"))
    held = {n: p.detach().clone() for n, p in first.named_parameters() if p.requires_grad}
    lora(tmp_path / "b", first, prior=tmp_path / "a" / "curvature", damping=1.0, strength=1e9)
    for name, value in held.items():
        torch.testing.assert_close(dict(first.named_parameters())[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, {}),
        ({}, {"optim": "adafactor"}),
        ({"missing": "zeros"}, {}),
        ({"curvature": "adams"}, {}),
        ({"prior": [1]}, {}),
    ],
)
def test_invalid_options(tmp_path: Path, options: Any, changes: Any) -> None:
    with pytest.raises(gm.InputError):
        trained(gm.PriorTrainer, tmp_path, changes=changes, **options)
