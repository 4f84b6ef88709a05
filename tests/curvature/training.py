"""Tiny models trained by a real Trainer on the CPU, in float64, and the same training written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertForMaskedLM, Trainer, TrainingArguments, default_data_collator
from transformers.utils import logging

from ..checkpoints.families import make, moved

Batch = dict[str, Tensor]


@dataclass
class Run:
    """A training run: its checkpoint, the model before and after, and the batches in their order."""

    checkpoint: Path
    start: nn.Module
    end: nn.Module
    batches: list[Batch]
    arguments: TrainingArguments

    @property
    def weights(self) -> dict[str, Tensor]:
        return stored_weights(self.checkpoint)

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return as_stored(self.checkpoint, self.end, tensors)


def stored_weights(checkpoint: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(checkpoint.glob("*model*.safetensors")) for n, t in load_file(path).items()}


def as_stored(checkpoint: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of a model's parameters to the names of its files, by comparing the values of weights."""
    weights, parameters, found = stored_weights(checkpoint), dict(model.named_parameters()), {}
    for name, value in tensors.items():
        [stored] = [n for n, w in weights.items() if torch.equal(w, parameters[name])]
        found[stored] = value
    return found


def examples(family: str, number: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        images = torch.randn(number, 3, 8, 8, generator=generator, dtype=torch.float64)
        return [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    tokens = torch.randint(5, 60, (number, 6), generator=generator)
    if family == "bert":
        return [{"input_ids": t, "labels": torch.tensor(i % 3)} for i, t in enumerate(tokens)]
    return [{"input_ids": t, "labels": t} for t in tokens]


def fresh(family: str) -> Any:
    """A random model in float64, without dropout; `bert-mlm` ties its decoder to its embeddings."""
    if family != "bert-mlm":
        return make(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()
    config = copy.deepcopy(fresh("bert").config)
    torch.manual_seed(0)
    return moved(BertForMaskedLM(config), 7).double()


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Training on the CPU: 2 epochs in steps of 4 examples, with weight decay, without clipping or checkpoints."""
    logging.set_verbosity_error()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "adam_beta2": 0.9,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **settings | changes)


def train(folder: Path, family: str, number: int = 10, model: Any = None, **changes: Any) -> Run:
    """Train a model, with a checkpoint at the end."""
    model = model or fresh(family)
    start = copy.deepcopy(model)
    batches: list[Batch] = []

    def collate(items: list[Batch]) -> Batch:
        batches.append(default_data_collator(items))
        return batches[-1]

    settings: Any = {"learning_rate": 1e-3, "save_strategy": "epoch", "save_total_limit": 1}
    args = arguments(folder, **settings | changes)
    trainer = Trainer(model, args, train_dataset=examples(family, number), data_collator=collate)
    trainer.train()
    (checkpoint,) = folder.glob("checkpoint-*")
    return Run(checkpoint, start, model, batches, args)


def moments_by_hand(run: Run) -> dict[str, Tensor]:
    """v̂ by name, from AdamW as it is defined, entry by entry of the recorded batches."""
    model, settings = copy.deepcopy(run.start).train(), run.arguments
    parameters = dict(model.named_parameters())
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    for step, batch in enumerate(run.batches, 1):
        model.zero_grad()
        model(**batch).loss.backward()
        with torch.no_grad():
            for name, p in parameters.items():
                decays = "bias" not in name and "norm" not in name.lower()
                first[name] = b1 * first[name] + (1 - b1) * p.grad
                second[name] = b2 * second[name] + (1 - b2) * p.grad**2
                m, v = first[name] / (1 - b1**step), second[name] / (1 - b2**step)
                p -= settings.learning_rate * (settings.weight_decay * p if decays else 0)
                p -= settings.learning_rate * m / (v.sqrt() + settings.adam_epsilon)
    return {n: v / (1 - b2 ** len(run.batches)) for n, v in second.items()}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Equal names, and equal entries up to a share of each tensor's largest."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        difference = (got[name].double() - value.double()).abs().max()
        # A softmax does not feel the bias of its keys: there the gradient is rounding error.
        assert difference <= tolerance * value.abs().max() + 1e-24, name
