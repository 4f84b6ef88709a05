"""Negative preference optimization (Zhang et al., 2024), with the usual loss on rows of the retain set."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.data import Collate
from ..common.training import Training
from .workload import Rows, row_losses

BETA = 0.1


def preference_loss(forget: Tensor, reference: Tensor, retain: Tensor) -> Tensor:
    """Return 2/β · E log(1 + (π_θ/π_ref)^β) on the forget set − E ln π_θ on the retain set, from the losses of rows."""
    return 2 / BETA * F.softplus(BETA * (reference - forget)).mean() + retain.mean()


def optimize(
    model: Any,
    forget: Rows,
    retain: Rows,
    collate: Collate,
    training: Training,
    *,
    seed: int,
    after_step: Callable[[int, int], None],
) -> None:
    """Train a model in place with AdamW, with as many retained rows as forgotten ones in every batch.

    ``after_step`` gets the number of steps so far, and of all steps. As in π_ref, there is no dropout.
    """
    size, chance = training.batch_size, random.Random(seed)
    model.eval()
    with torch.no_grad():
        parts = [collate(forget[first : first + size]) for first in range(0, len(forget), size)]
        reference = torch.cat([row_losses(model, part) for part in parts])
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate, weight_decay=training.weight_decay)
    orders = [chance.sample(range(len(forget)), len(forget)) for _ in range(int(training.epochs))]
    batches = [order[first : first + size] for order in orders for first in range(0, len(order), size)]
    retained = chain.from_iterable(chance.sample(range(len(retain)), len(retain)) for _ in repeat(None))
    for step, rows in enumerate(batches, start=1):
        forgotten = row_losses(model, collate([forget[row] for row in rows]))
        kept = row_losses(model, collate([retain[next(retained)] for _ in rows]))
        optimizer.zero_grad()
        preference_loss(forgotten, reference[rows], kept).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip or float("inf"))
        optimizer.step()
        after_step(step, len(batches))
