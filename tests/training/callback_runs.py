"""Tiny models trained by a Trainer with a CurvatureCallback, and slow references of its result."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, default_data_collator

import gradmerge as gm

from ..checkpoints.families import make
from ..curvature import slow
from ..curvature.training import Batch, arguments, examples


def bert(dropout: float = 0.0, **changes: Any) -> Any:
    return make("bert", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **changes)


def sentences(number: int, seed: int = 0) -> list[Batch]:
    return examples("bert", number, seed)


class Watch(TrainerCallback):
    """Records the weights before every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.weights.append({name: value.detach().clone() for name, value in model.state_dict().items()})


def trainer_for(
    folder: Path,
    model: Any,
    data: Any,
    callback: TrainerCallback | None,
    *more: TrainerCallback,
    **changes: Any,
) -> Trainer:
    own = {
        name: value for name, value in changes.items() if name in ("optimizers", "compute_loss_func", "eval_dataset")
    }
    settings = {name: value for name, value in changes.items() if name not in own}
    callbacks = [*([callback] if callback is not None else []), *more]
    return Trainer(
        model,
        arguments(folder, **{"save_strategy": "steps", "save_steps": 2} | settings),
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=callbacks,
        **own,
    )


def squares(model: nn.Module, rows: Sequence[Batch], output: str = "classes") -> dict[str, Tensor]:
    """Σ_i [∇ℓ_i]² in float64, example by example."""
    exact = copy.deepcopy(model).double().eval()
    return slow.empirical(exact, rows, output)


def read(folder: Path) -> gm.Curvature:
    return gm.Curvature.load(folder / "curvature")


def same_bytes(one: Path, two: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(p.name for p in two.iterdir()) and all(
        (one / name).read_bytes() == (two / name).read_bytes() for name in names
    )
