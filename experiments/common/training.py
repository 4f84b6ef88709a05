"""Fine-tuning with transformers' Trainer, as the experiments do it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

import gradmerge as gm


@dataclass(frozen=True)
class Training:
    """How a model is fine-tuned."""

    learning_rate: float
    epochs: float
    batch_size: int
    warmup_steps: int = 0
    schedule: str = "linear"
    clip: float = 1.0
    """Largest norm of a step's gradient; 0 is no limit."""
    weight_decay: float = 0.0
    strength: float = 0.0
    """Of the quadratic penalty towards the start, for the mean loss; 0 is plain AdamW."""
    coupling: str = "decoupled"
    """See ``gm.PriorAdamW``."""


def _has_bfloat16(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported()


def half_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast on a GPU that has it, as in training."""
    return torch.autocast(device.type, torch.bfloat16, enabled=_has_bfloat16(device))


class Rows(Dataset[Any]):
    """Examples in memory, ready for the collator."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


def fine_tune(
    model: torch.nn.Module,
    rows: Sequence[Mapping[str, Any]] | range,
    collate: Callable[[list[Any]], dict[str, Any]],
    folder: Path,
    training: Training,
    *,
    seed: int,
    device: str,
    prior: Any = "identity",
) -> dict[str, Any]:
    """Train a model in place, and return what it took and the mean loss of the last tenth of the steps.

    Args:
        folder: Where the trainer may write.
        prior: H_0 of the penalty (see ``gm.PriorAdamW``), used if ``training.strength`` is not 0.
    """
    scratch = folder / "trainer"
    arguments = TrainingArguments(
        output_dir=str(scratch),
        learning_rate=training.learning_rate,
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=training.schedule,
        max_grad_norm=training.clip,
        weight_decay=training.weight_decay,
        seed=seed,
        data_seed=seed,
        bf16=_has_bfloat16(device),  # of the arithmetic; weights and Adam's state are always float32
        use_cpu=device == "cpu",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    common = {"model": model, "args": arguments, "train_dataset": Rows(rows), "data_collator": collate}
    if training.strength:
        trainer: Trainer = gm.PriorTrainer(
            **common, prior=prior, strength=training.strength, coupling=training.coupling
        )
    else:
        trainer = Trainer(**common)
    trainer.remove_callback(PrinterCallback)
    found = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shutil.rmtree(scratch, ignore_errors=True)
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "examples": len(rows),
        "steps": trainer.state.global_step,
        "seconds": found.metrics["train_runtime"],
        "last_loss": sum(last) / len(last) if last else None,
    }
