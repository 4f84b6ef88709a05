"""The merges that are compared, and how good an encoder is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gradmerge as gm

from ..common.states import State, mean_entry
from ..common.training import half_precision
from .data import Images
from .models import Classifier
from .settings import SCALED


@dataclass(frozen=True)
class Merge:
    """A way to merge, over weights or, without ``weights``, as it is."""

    name: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[float] = ()


#: Whose labels gradients are taken at: the data's, or some drawn from the model, as the authors' code does.
LABELS = ("empirical", "sampled")


@dataclass(frozen=True)
class Measures:
    """Curvature by one kind of labels."""

    base: gm.Curvature
    tasks: Sequence[gm.Curvature]


def merges(
    measures: Mapping[str, Measures],
    grams: Sequence[gm.Curvature],
    weights: Sequence[float],
    factors: Sequence[float],
    reductions: Sequence[str] = ("mean", "sum"),
) -> Iterator[Merge]:
    """Everything that is compared."""
    curvature, base_curvature = measures["empirical"].tasks, measures["empirical"].base
    yield Merge("task-arithmetic", "task-arithmetic", weights=weights)
    for reduction in reductions:
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
    for labels, own in measures.items():
        kind = "" if labels == "empirical" else ", sampled labels"
        given = {"curvature": own.tasks, "reduction": "mean"}
        fisher = {"prior": own.base}
        if kind:
            scalar = prior_scalar(own.tasks, "mean")
            yield Merge(f"gradient-matching{kind}", "gradient-matching", given | {"prior": scalar}, weights)
            yield Merge(f"gradient-matching, Fisher of the base{kind}", "gradient-matching", given | fisher, weights)
            yield Merge(f"fisher-averaging, mean{kind}", "fisher-averaging", given)
        name = f"gradient-matching, Fisher of the base, no penalty{kind}"
        yield Merge(name, "gradient-matching", given | fisher | {"penalty": "none"}, weights)
    yield Merge("average", "average")
    yield Merge("regmean", "regmean", {"curvature": grams})
    for method in SCALED:
        yield Merge(method, method, weights=weights)


def prior_scalar(curvature: Sequence[gm.Curvature], reduction: str) -> float:
    """c = (1 / T P) Σ_t Σ_j H_t,j: the mean over tasks and parameters of the (summed or averaged) squared gradients.

    c · I is the identity with the trace of the tasks' mean curvature. The base counts as much as one of the tasks, and
    nothing is tuned.
    """
    means = [mean_entry(one) / (one.examples if reduction == "mean" else 1) for one in curvature]
    return sum(means) / len(means)


def merged(base: State, tuned: Sequence[State], merge: Merge, weight: float | None) -> dict[str, Tensor]:
    """The merged encoder; some take the weight as the scale of what is left, as in their papers."""
    arguments = dict(merge.arguments)
    if weight is not None:
        arguments |= {"options": {"scale": weight}} if merge.method in SCALED else {"weights": [weight] * len(tuned)}
    return gm.merge_state_dicts(base, tuned, merge.method, threads=4, **arguments)


@torch.no_grad()
def scores(
    classifier: Classifier, images: Mapping[str, Images], batch_size: int, device: str
) -> dict[str, dict[str, float]]:
    """Percent of each task's images that are put into the right class (`accuracy`), and their mean `loss` in nats."""
    classifier.eval()
    found = {}
    for task, rows in images.items():
        hits = torch.zeros((), dtype=torch.long, device=device)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for batch in rows.batches(batch_size):
            labels = batch["labels"].to(device)
            with half_precision(torch.device(device)) if classifier.enlarges else nullcontext():
                logits = classifier(batch["pixels"].to(device), batch["task"].to(device))
            hits += (logits.argmax(-1) == labels).sum()
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
        found[task] = {"accuracy": 100 * int(hits) / len(rows), "loss": float(loss) / len(rows)}
    return found
