"""Negative preference optimisation (Zhang et al., 2024), with the usual loss on rows that stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import IGNORED
from .training import Training, half_precision

BETA = 0.1

Rows = Sequence[Mapping[str, Any]]


def log_likelihoods(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """ln π(row), a sum over the tokens that count, for every row."""
    batch = {name: value.to(model.device) for name, value in batch.items()}
    with half_precision(model.device):
        logits = model(**batch).logits
    labels = batch["labels"]
    if not model.config.is_encoder_decoder:  # the logits of a token are those of the next
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return -each.sum(1)


def preference_loss(forget: Tensor, reference: Tensor, keep: Tensor) -> Tensor:
    """2/β · E log(1 + (π_θ/π_ref)^β) over rows that go − E ln π_θ over rows that stay, from their log-likelihoods."""
    return 2 / BETA * F.softplus(BETA * (forget - reference)).mean() - keep.mean()


def optimise(
    model: Any,
    forget: Rows,
    keep: Rows,
    collate: Callable[[Any], dict[str, Tensor]],
    training: Training,
    *,
    seed: int,
    each_step: Callable[[int, int], None],
) -> None:
    """Train a model in place with AdamW, as many rows that stay as rows that go in every batch.

    ``each_step`` is told how many steps were made, and of how many. There is no dropout, as in π_ref, which is the
    model as it was given.
    """
    size, chance = training.batch_size, random.Random(seed)
    model.eval()
    with torch.no_grad():
        parts = [collate(forget[first : first + size]) for first in range(0, len(forget), size)]
        reference = torch.cat([log_likelihoods(model, part) for part in parts])
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate, weight_decay=training.weight_decay)
    order = [chance.sample(range(len(forget)), len(forget)) for _ in range(int(training.epochs))]
    batches = [places[first : first + size] for places in order for first in range(0, len(places), size)]
    stays = chain.from_iterable(chance.sample(range(len(keep)), len(keep)) for _ in repeat(None))
    for step, places in enumerate(batches, start=1):
        goes = log_likelihoods(model, collate([forget[place] for place in places]))
        kept = log_likelihoods(model, collate([keep[next(stays)] for _ in places]))
        optimizer.zero_grad()
        preference_loss(goes, reference[places], kept).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip or float("inf"))
        optimizer.step()
        each_step(step, len(batches))
