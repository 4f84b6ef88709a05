"""The merges of the sentiment experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import gradmerge as gm

from .settings import BASE, SETS, TASKS

MATCHING, ARITHMETIC = "gradient-matching", "task-arithmetic"
#: These are merged at many weights; at weight 1 they are rows of the tables too.
SWEPT = (ARITHMETIC, MATCHING)


@dataclass(frozen=True)
class Merge:
    """A merge of the four fine-tuned models."""

    method: str
    curvature: str = ""
    """``identity`` (N · I), ``diagonal``, ``kronecker`` or ``gram``; empty for methods without curvature."""
    labels: str = "empirical"
    """The labels of the gradients: the data's, ``sampled`` from the model (the authors' code), or all (``exact``)."""
    reduction: str = "sum"
    """``sum`` or ``mean`` over the measured rows, or ``N · mean`` of a sample."""
    penalty: str = "H_0"
    weight: float = 1.0
    base_counts: bool = True
    """The base is one of the averaged models."""

    @property
    def measured(self) -> dict[str, Any]:
        """Arguments of the estimate of its curvature."""
        return {"kind": self.curvature, "labels": self.labels, "sample": self.reduction == "N · mean"}

    @property
    def stage(self) -> str:
        """The name of the stage that scores it."""
        words = [self.method, self.curvature, self.labels, self.reduction, self.penalty, f"{self.weight:g}"]
        return "-".join([*words, *(["of four"] if not self.base_counts else [])]).replace(" · ", "-").replace(" ", "-")


def _averages() -> dict[str, Merge]:
    found = {}
    for base_counts in (True, False):
        end = "" if base_counts else " of four"
        found[f"average{end}"] = Merge("average", base_counts=base_counts)
        for reduction in ("mean", "sum"):
            merge = Merge("fisher-averaging", "diagonal", reduction=reduction, base_counts=base_counts)
            found[f"fisher-averaging-{reduction}{end}"] = merge
        found[f"regmean{end}"] = Merge("regmean", "gram", base_counts=base_counts)
    return found


#: Name in results.json → merge.
MERGES = {
    **_averages(),
    "ties": Merge("ties"),
    "gradient-matching-identity": Merge(MATCHING, "identity"),
    "gradient-matching-mean": Merge(MATCHING, "diagonal", reduction="mean"),
}


def swept(method: str, weight: float) -> Merge:
    """Return task arithmetic, or gradient matching with summed curvature, with one weight for all tasks."""
    return Merge(method, "diagonal" if method == MATCHING else "", weight=weight)


def grid() -> list[Merge]:
    """Return the paper's table of Hessians; Kronecker factors are estimated with sampled labels only."""
    kinds = [("identity", "", "")]
    kinds += [("diagonal", a, b) for a in ("empirical", "sampled", "exact") for b in ("sum", "mean", "N · mean")]
    kinds += [("kronecker", "sampled", reduction) for reduction in ("sum", "mean")]
    return [Merge(MATCHING, *kind, penalty) for kind in kinds for penalty in ("H_0", "none")]


def merge_models(
    merge: Merge,
    states: Mapping[str, Mapping[str, Tensor]],
    curvature: Callable[..., Any],
    rows: Mapping[str, int],
    damping: float,
    density: float,
) -> dict[str, Tensor]:
    """Return the merged weights.

    Args:
        states: Data set → weights of its model.
        curvature: Returns the curvature of a data set's model, given ``merge.measured``.
        rows: Data set → number of training rows.
    """
    base, tuned = states[BASE], [states[name] for name in TASKS]
    how: dict[str, Any] = {"damping": damping, "threads": 2}
    if merge.method == "regmean":
        models = SETS if merge.base_counts else TASKS
        grams = [curvature(name, **merge.measured) for name in models]
        return gm.merge_state_dicts(base, [states[name] for name in models], "regmean", curvature=grams, **how)
    if merge.method in SWEPT:
        how["weights"] = [merge.weight] * len(tuned)
    if merge.method in ("average", "fisher-averaging"):
        how["options"] = {"include_base": merge.base_counts}
    if merge.method == "ties":
        how["options"] = {"density": density}
    if merge.curvature:
        matrices = [float(rows[name]) for name in SETS]
        if merge.curvature != "identity":
            matrices = [curvature(name, **merge.measured) for name in SETS]
        if merge.reduction == "N · mean":
            matrices = [one.scale(rows[name] / one.examples) for name, one in zip(SETS, matrices, strict=True)]
        how |= {"prior": matrices[0], "curvature": matrices[1:]}
        how["reduction"] = "mean" if merge.reduction == "mean" else "sum"
    if merge.penalty == "none":
        how["penalty"] = "none"
    if merge.curvature == "kronecker":
        # The damping of Kronecker factors is relative to their mean; one this small would leave them as they are.
        how["damping"] = "auto"
    return gm.merge_state_dicts(base, tuned, merge.method, **how)
