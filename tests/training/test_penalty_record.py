"""The record of the penalty: at rest, ∇ Σ ℓ_i + P Δ = 0 with what is read back from beside the model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import logging

import gradmerge as gm

from ..curvature.training import examples, fresh

RECORD = "gradmerge_penalty.json"


def problem(seed: int = 0, rows: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64) + 0.3


class Line(nn.Module):
    """A linear regression that gives its loss, a mean over the batch, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        with torch.no_grad():
            self.linear.weight.fill_(0.1)
            self.linear.bias.zero_()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.linear(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def penalty_in(folder: Path, like: nn.Module) -> dict[str, Tensor]:
    """P, read as a merge reads it."""
    record = json.loads((folder / RECORD).read_text())
    assert set(record) == {"format", "penalty"} and record["format"] == "gradmerge-penalty/1"
    value = record["penalty"]
    if isinstance(value, dict):
        return {name: torch.full_like(p, value["identity"]) for name, p in like.named_parameters()}
    assert value == "penalty"
    found = gm.Curvature.load(folder / value)
    assert found.examples == 1
    return {name: found[name].double() for name, _ in like.named_parameters()}


def residual(model: Any, start: nn.Module, penalty: dict[str, Tensor]) -> float:
    """‖∇ Σ ℓ_i + P Δ‖ / ‖P Δ‖, by hand."""
    x, y = problem()
    total = (model.linear(x) - y).square().sum()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    pulls = [
        penalty[n] * (p - q).detach() for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
    ]
    off = sum(float((g + p).square().sum()) for g, p in zip(gradients, pulls, strict=True))
    whole = sum(float(p.square().sum()) for p in pulls)
    assert whole > 0.01
    return float((off / whole) ** 0.5)


def uneven(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: 0.2 + torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "eps", "mean"),
    [
        ({"coupling": "adam", "prior": "uneven", "strength": 0.7, "damping": 0.1}, 1e-8, True),
        ({"coupling": "adam", "prior": 0.5, "strength": 0.8}, 1e-8, True),
        ({"coupling": "adam", "prior": 0.5, "strength": 0.8}, 1e-8, False),
        ({"coupling": "decoupled", "prior": "uneven", "strength": 0.3}, 3.0, True),
        ({"coupling": "decoupled", "prior": 1.0, "strength": 0.3}, 3.0, True),
    ],
)
def test_at_rest_loss_and_recorded_penalty_balance(
    tmp_path: Path, options: dict[str, Any], eps: float, mean: bool
) -> None:
    model = Line()
    start, (x, y) = copy.deepcopy(model), problem()
    options = options | ({"prior": uneven(model)} if options["prior"] == "uneven" else {})
    optimizer = gm.PriorAdamW(model, lr=0.3, betas=(0.8, 0.9), eps=eps, weight_decay=0.0, **options)
    for step in range(500):
        optimizer.param_groups[0]["lr"] = 0.3 * 0.99**step
        loss = (model.linear(x) - y).square()
        optimizer.zero_grad()
        (loss.mean() if mean else loss.sum()).backward()
        optimizer.step()
    optimizer.record_penalty(tmp_path, mean_over=len(x) if mean else 1)
    assert residual(model, start, penalty_in(tmp_path, model)) < 1e-3
    kind = json.loads((tmp_path / RECORD).read_text())["penalty"]
    assert kind == ({"identity": 0.4 * (24 if mean else 1)} if options["prior"] == 0.5 else "penalty")
    optimizer.record_penalty(tmp_path, mean_over=5)  # again, over what is there
    assert residual(model, start, penalty_in(tmp_path, model)) > 0.05


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    logging.set_verbosity_error()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 24,
        "max_steps": 250,
        "learning_rate": 0.2,
        "weight_decay": 0.0,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return TrainingArguments(output_dir=str(folder), **settings | changes)


def test_the_trainer_records_it_with_checkpoints_and_with_the_model(tmp_path: Path) -> None:
    model = Line()
    start = copy.deepcopy(model)
    data = [{"x": x, "labels": y} for x, y in zip(*problem(), strict=True)]
    prior = gm.Curvature({n: 100 * v.float() for n, v in uneven(model).items()}, 100)
    settings = arguments(tmp_path, save_strategy="steps", save_steps=250)
    trainer = gm.PriorTrainer(model, settings, train_dataset=data, prior=prior, strength=0.5, coupling="adam")
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "checkpoint-250", tmp_path / "final"):
        assert residual(model, start, penalty_in(folder, model)) < 1e-3
    want = {name: 24 * 0.5 * value for name, value in uneven(model).items()}
    assert all(torch.allclose(penalty_in(tmp_path / "final", model)[n], v, rtol=1e-6) for n, v in want.items())


def identity(folder: Path) -> float:
    return float(json.loads((folder / RECORD).read_text())["penalty"]["identity"])


def test_the_mean_is_over_examples_or_over_tokens_that_count(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 1, "learning_rate": 1e-3}
    for family, wanted in (("bert", 10.0), ("gpt2", None)):
        data = examples(family, 10)
        if wanted is None:
            wanted = float(sum(int(row["labels"][1:].ne(-100).sum()) for row in map(_tensors, data)))
            assert wanted > 20
        trainer = gm.PriorTrainer(
            fresh(family), arguments(tmp_path / family, **settings), train_dataset=data, strength=2.0, coupling="adam"
        )
        trainer.train()
        trainer.save_model()
        assert identity(tmp_path / family) == pytest.approx(2.0 * wanted)


def _tensors(row: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in row.items()}


def test_batches_whose_losses_are_added_up_count_as_what_the_optimizer_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT takes the mean of its own batch, whatever the Trainer says: two batches give twice the mean's gradient."""
    settings = arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=1e-3
    )
    given: list[Tensor] = []
    model = fresh("bert").eval()
    trainer = gm.PriorTrainer(model, settings, train_dataset=examples("bert", 4), strength=1.0, coupling="adam")
    plain = trainer.training_step

    def noted(*arguments: Any) -> Tensor:
        result = plain(*arguments)
        given.append(model.classifier.bias.grad.clone())
        return result

    monkeypatch.setattr(trainer, "training_step", noted)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    before = copy.deepcopy(model)
    trainer.train()
    trainer.save_model()
    batch = {key: torch.stack([_tensors(row)[key] for row in examples("bert", 4)]) for key in examples("bert", 1)[0]}
    (mean,) = torch.autograd.grad(before(**batch).loss, [before.classifier.bias])
    ratio = float(given[1].norm() / mean.norm())  # after both batches of the first step
    assert identity(tmp_path) == pytest.approx(4 / ratio, rel=1e-3)


def test_names_are_those_of_files_and_what_is_not_trained_is_zero(tmp_path: Path) -> None:
    model: Any = fresh("vit")
    model.vit.embeddings.requires_grad_(False)
    optimizer = gm.PriorAdamW(model, lr=1e-3, prior="identity", strength=2.0)
    batch = {key: torch.stack([_tensors(row)[key] for row in examples("vit", 4)]) for key in examples("vit", 1)[0]}
    model(**batch).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "model")
    optimizer.record_penalty(tmp_path / "model", 4)
    found = gm.Curvature.load(tmp_path / "model" / "penalty")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in stored.items()}
    moved = {name for name, value in found.items() if bool(value.any())}
    assert moved and not any("embeddings" in name for name in moved)


def test_no_strength_is_no_penalty_and_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = Line()
    gm.PriorAdamW(model, strength=0.0).record_penalty(tmp_path, 10)
    assert json.loads((tmp_path / RECORD).read_text())["penalty"] == "none"
    optimizer = gm.PriorAdamW(model.parameters())
    with pytest.raises(gm.InputError, match="model="):
        optimizer.record_penalty(tmp_path, 10)
    optimizer.record_penalty(tmp_path, 10, model)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(gm.InputError, match="mean_over"):
            optimizer.record_penalty(tmp_path, wrong, model)
    with pytest.raises(gm.InputError, match="nowhere"):
        optimizer.record_penalty(tmp_path / "nowhere", 10, model)
    with pytest.raises(gm.InputError, match="2 parameters"):
        optimizer.record_penalty(tmp_path, 10, nn.Linear(2, 2))
    adapted = get_peft_model(fresh("bert"), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(gm.InputError, match="factors"):
        gm.PriorAdamW(adapted).record_penalty(tmp_path, 10)
    settings = arguments(tmp_path / "out", max_steps=1, per_device_train_batch_size=4)
    trainer = gm.PriorTrainer(adapted, settings, train_dataset=examples("bert", 4))
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "out" / RECORD).exists()
