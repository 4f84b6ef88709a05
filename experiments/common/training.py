"""Fine-tuning with transformers' Trainer, as the experiments do it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    accumulate: int = 1
    """Batches that make one step: ``batch_size`` is that of a single one."""
    coupling: str = "decoupled"
    """How the penalty goes with Adam: "decoupled", or "adam" for the minimiser of loss and penalty.

    See ``gm.PriorAdamW``.
    """
    optimizer: str = "AdamW"
    """Or "Adafactor", whose steps are as large as a tensor's own entries, times the rate.

    T5 was trained so: its embeddings are a hundred times as large as its queries, and one rate does not fit both. There
    is no penalty with it.
    """


def _has_bfloat16(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported()


def half_precision(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 arithmetic on a GPU that has it, as in training."""
    return torch.autocast(device.type, torch.bfloat16, enabled=_has_bfloat16(device))


@contextmanager
def quick_products() -> Iterator[None]:
    """19-bit products of float32 on GPUs that have them: plenty for an accuracy, and more than training has."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Rows(Dataset[Mapping[str, Any]]):
    """Examples in memory, ready for the collator."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._rows[place]


def fine_tune(
    model: torch.nn.Module,
    rows: Sequence[Mapping[str, Any]],
    collate: Callable[[list[Any]], dict[str, Any]],
    folder: Path,
    training: Training,
    *,
    seed: int,
    device: str,
    prior: Any = "identity",
) -> dict[str, Any]:
    """Train a model in place on prepared examples; what it took, and the mean loss of the last tenth of the steps.

    ``folder`` is where the trainer may write. ``prior`` is the H_0 of the penalty (see ``gm.PriorAdamW``) where
    ``training.strength`` is not 0.
    """
    scratch = folder / "trainer"
    arguments = TrainingArguments(
        output_dir=str(scratch),
        learning_rate=training.learning_rate,
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=training.schedule,
        max_grad_norm=training.clip,
        weight_decay=training.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        seed=seed,
        data_seed=seed,
        bf16=_has_bfloat16(device),  # of the arithmetic; weights and Adam's state are float32 always
        use_cpu=device == "cpu",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    common = {"model": model, "args": arguments, "train_dataset": Rows(rows), "data_collator": collate}
    if training.strength:
        trainer: Trainer = gm.PriorTrainer(
            **common, prior=prior, strength=training.strength, coupling=training.coupling
        )
    elif training.optimizer == "Adafactor":
        trainer = Trainer(
            **common, optimizers=(torch.optim.Adafactor(model.parameters(), training.learning_rate), None)
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
