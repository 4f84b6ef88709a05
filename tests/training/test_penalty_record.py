"""The record of the penalty: where training converges, ∇ Σ ℓ_i + P Δ = 0 with the P that a merge reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import default_data_collator

import gradmerge as gm

from ..curvature.training import arguments, examples, fresh

RECORD = "gradmerge_penalty.json"


def problem(rows: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64) + 0.3


class LinearRegression(nn.Module):
    """Returns its loss, a mean over the batch, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        with torch.no_grad():
            self.linear.weight.fill_(0.1)
            self.linear.bias.zero_()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.linear(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def recorded(folder: Path) -> Any:
    return json.loads((folder / RECORD).read_text())["penalty"]


def penalty_in(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    value = recorded(folder)
    if isinstance(value, dict):
        return {name: torch.full_like(p, value["identity"]) for name, p in model.named_parameters()}
    found = gm.Curvature.load(folder / value)
    assert found.examples == 1
    return {name: found[name].double() for name, _ in model.named_parameters()}


def residual(model: Any, start: nn.Module, penalty: dict[str, Tensor]) -> float:
    """‖∇ Σ ℓ_i + P Δ‖ / ‖P Δ‖."""
    x, y = problem()
    gradients = torch.autograd.grad((model.linear(x) - y).square().sum(), list(model.parameters()))
    pulls = [
        penalty[n] * (p - q).detach() for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
    ]
    difference = sum(float((g + p).square().sum()) for g, p in zip(gradients, pulls, strict=True))
    whole = sum(float(p.square().sum()) for p in pulls)
    assert whole > 0.01
    return float((difference / whole) ** 0.5)


def random_prior(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: 0.2 + torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "eps", "mean"),
    [
        ({"coupling": "adam", "prior": "random", "strength": 0.7, "damping": 0.1}, 1e-8, True),
        ({"coupling": "adam", "prior": 0.5, "strength": 0.8}, 1e-8, False),
        ({"coupling": "decoupled", "prior": "random", "strength": 0.3}, 3.0, True),
    ],
)
def test_loss_and_recorded_penalty_balance(tmp_path: Path, options: dict[str, Any], eps: float, mean: bool) -> None:
    model = LinearRegression()
    start, (x, y) = copy.deepcopy(model), problem()
    options = options | ({"prior": random_prior(model)} if options["prior"] == "random" else {})
    optimizer = gm.PriorAdamW(model, lr=0.3, betas=(0.8, 0.9), eps=eps, weight_decay=0.0, **options)
    for step in range(500):
        optimizer.param_groups[0]["lr"] = 0.3 * 0.99**step
        loss = (model.linear(x) - y).square()
        optimizer.zero_grad()
        (loss.mean() if mean else loss.sum()).backward()
        optimizer.step()
    optimizer.record_penalty(tmp_path, mean_over=len(x) if mean else 1)
    assert residual(model, start, penalty_in(tmp_path, model)) < 1e-3
    assert recorded(tmp_path) == ({"identity": 0.4} if options["prior"] == 0.5 else "penalty")
    optimizer.record_penalty(tmp_path, mean_over=5)  # replaces the first record
    assert residual(model, start, penalty_in(tmp_path, model)) > 0.05


def test_the_trainer_records_it_in_checkpoints_and_beside_the_model(tmp_path: Path) -> None:
    model = LinearRegression()
    start = copy.deepcopy(model)
    data = [{"x": x, "labels": y} for x, y in zip(*problem(), strict=True)]
    prior = gm.Curvature({n: 100 * v.float() for n, v in random_prior(model).items()}, 100)
    sizes: Any = {"per_device_train_batch_size": 24, "max_steps": 250, "save_strategy": "steps", "save_steps": 250}
    adam: Any = {"learning_rate": 0.2, "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta1": 0.8}
    settings = arguments(tmp_path, **sizes, **adam)
    trainer = gm.PriorTrainer(model, settings, train_dataset=data, prior=prior, strength=0.5, coupling="adam")
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "checkpoint-250", tmp_path / "final"):
        assert residual(model, start, penalty_in(folder, model)) < 1e-3


@pytest.mark.parametrize(("family", "accumulated", "terms"), [("bert", 1, 10), ("bert", 2, 5), ("gpt2", 1, 50)])
def test_the_mean_is_over_examples_or_labeled_tokens(family: str, accumulated: int, terms: int, tmp_path: Path) -> None:
    """BERT's loss is a mean over its own batch: two accumulated batches give twice the mean's gradient."""
    sizes: Any = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    settings = arguments(tmp_path, **sizes, num_train_epochs=1)
    trainer = gm.PriorTrainer(
        fresh(family), settings, train_dataset=examples(family, 10), strength=2.0, coupling="adam"
    )
    trainer.train()
    trainer.save_model()
    assert recorded(tmp_path)["identity"] == pytest.approx(2.0 * terms)


def test_names_are_those_of_files_and_untrained_weights_have_no_penalty(tmp_path: Path) -> None:
    model: Any = fresh("vit")
    model.vit.embeddings.requires_grad_(False)
    optimizer = gm.PriorAdamW(model, lr=1e-3, prior="identity", strength=2.0)
    batch = default_data_collator(examples("vit", 4))
    model(**batch).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    optimizer.record_penalty(tmp_path, 4)
    found = gm.Curvature.load(tmp_path / "penalty")
    weights = load_file(tmp_path / "model.safetensors")
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in weights.items()}
    nonzero = {name for name, value in found.items() if bool(value.any())}
    assert nonzero and not any("embeddings" in name for name in nonzero)


def test_strength_0_is_recorded_as_none_and_invalid_requests_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = LinearRegression()
    gm.PriorAdamW(model, strength=0.0).record_penalty(tmp_path, 10)
    assert recorded(tmp_path) == "none"
    optimizer = gm.PriorAdamW(model.parameters())
    optimizer.record_penalty(tmp_path, 10, model)
    for arguments_ in (
        (tmp_path, 10),
        (tmp_path, 0, model),
        (tmp_path, float("nan"), model),
        (tmp_path / "nowhere", 10, model),
        (tmp_path, 10, nn.Linear(2, 2)),
    ):
        with pytest.raises(gm.InputError):
            optimizer.record_penalty(*arguments_)
    adapted = get_peft_model(fresh("bert"), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(gm.InputError):
        gm.PriorAdamW(adapted).record_penalty(tmp_path, 10)
    settings = arguments(tmp_path / "out", max_steps=1)
    trainer = gm.PriorTrainer(adapted, settings, train_dataset=examples("bert", 4))
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "out" / RECORD).exists()
