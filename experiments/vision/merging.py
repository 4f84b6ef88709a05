"""The merges that are compared, and how good an encoder is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gradmerge as gm

from ..common.states import State, mean_entry
from .data import Images
from .models import Classifier


@dataclass(frozen=True)
class Merge:
    """A way to merge, over weights or, without ``weights``, as it is."""

    name: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[float] = ()


def merges(
    curvature: Sequence[gm.Curvature],
    base_curvature: gm.Curvature,
    weights: Sequence[float],
    factors: Sequence[float],
) -> Iterator[Merge]:
    """Everything that is compared."""
    yield Merge("task-arithmetic", "task-arithmetic", weights=weights)
    for reduction in ("mean", "sum"):
        measured = {"curvature": curvature, "reduction": reduction}
        scalar = prior_scalar(curvature, reduction)
        name = "gradient-matching" if reduction == "mean" else "gradient-matching, sum"
        yield Merge(name, "gradient-matching", measured | {"prior": scalar}, weights)
        if reduction == "mean":
            for factor in factors:
                prior = {"prior": factor * scalar}
                yield Merge(f"{name}, {factor:g} · c", "gradient-matching", measured | prior, weights)
        yield Merge(f"{name}, Fisher of the base", "gradient-matching", measured | {"prior": base_curvature}, weights)
        yield Merge(f"fisher-averaging, {reduction}", "fisher-averaging", measured)
    yield Merge("average", "average")
    yield Merge("ties", "ties", weights=weights)


def prior_scalar(curvature: Sequence[gm.Curvature], reduction: str) -> float:
    """c = (1 / T P) Σ_t Σ_j H_t,j: the mean over tasks and parameters of the (summed or averaged) squared gradients.

    c · I is the identity with the trace of the tasks' mean curvature. The base counts as much as one of the tasks, and
    nothing is tuned.
    """
    means = [mean_entry(one) / (one.examples if reduction == "mean" else 1) for one in curvature]
    return sum(means) / len(means)


def merged(base: State, tuned: Sequence[State], merge: Merge, weight: float | None) -> dict[str, Tensor]:
    """The merged encoder; TIES takes the weight as the scale of what is left, as in its paper."""
    arguments = dict(merge.arguments)
    if weight is not None:
        arguments |= {"options": {"scale": weight}} if merge.method == "ties" else {"weights": [weight] * len(tuned)}
    return gm.merge_state_dicts(base, tuned, merge.method, threads=2, **arguments)


@torch.no_grad()
def accuracy(classifier: Classifier, images: Mapping[str, Images], batch_size: int, device: str) -> dict[str, float]:
    """Percent of each task's images that are put into the right class."""
    classifier.eval()
    right = {}
    for task, rows in images.items():
        hits = torch.zeros((), dtype=torch.long, device=device)
        for batch in rows.batches(batch_size):
            logits = classifier(batch["pixels"].to(device), batch["task"].to(device))
            hits += (logits.argmax(-1) == batch["labels"].to(device)).sum()
        right[task] = 100 * int(hits) / len(rows)
    return right
