"""The paper's table of Hessians (tab:hessians) in full: gradient matching by every curvature, reduction and penalty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import gradmerge as gm

from .data import BASE, TASKS

#: Whose labels gradients are taken at: the data's, drawn from the model (as in the authors' code), or all, weighted.
LABELS = ("empirical", "sampled", "exact")
#: Over the rows that are measured; and N times the mean of a sample, N being the number of training rows.
REDUCTIONS = ("sum", "mean", "N · mean")
#: P in the numerator: that of the models' training in theory, H_0, or none.
PENALTIES = ("H_0", "none")
#: Plain AdamW, or with the penalty ½‖θ − θ_0‖² in the norm of H_0, which the theory asks for.
TUNINGS = ("plain", "prior")


@dataclass(frozen=True)
class Cell:
    """One merge, at weight 1."""

    tuning: str
    curvature: str
    """task-arithmetic (which is without), identity (N · I), diagonal or kronecker."""
    labels: str = ""
    reduction: str = ""
    penalty: str = ""

    @property
    def name(self) -> str:
        """Of its stage."""
        words = (self.tuning, self.curvature, self.labels, self.reduction, self.penalty)
        return "-".join(word.replace(" · ", "-times-") for word in ("grid", *words) if word)

    @property
    def models(self) -> list[str]:
        """Stages of the tuned models."""
        return [model_name(task, self.tuning) for task in TASKS]

    @property
    def measured(self) -> list[dict[str, Any]]:
        """What is measured for it, of the base and of every tuned model: arguments of ``Seed.estimated``."""
        if self.curvature not in ("diagonal", "kronecker"):
            return []
        how = {"labels": self.labels, "kind": self.curvature, "sample": self.reduction == "N · mean"}
        return [{"model": model, **how} for model in (BASE, *self.models)]


def model_name(task: str, tuning: str) -> str:
    return task if tuning == "plain" else f"{task}-under-prior"


def cells() -> list[Cell]:
    """The whole grid. Kronecker factors are estimated with sampled labels only."""
    kinds = [
        ("identity", "", ""),
        *(("diagonal", labels, reduction) for labels in LABELS for reduction in REDUCTIONS),
        *(("kronecker", "sampled", reduction) for reduction in ("sum", "mean")),
    ]
    found = []
    for tuning in TUNINGS:
        found.append(Cell(tuning, "task-arithmetic"))
        found += [Cell(tuning, *kind, penalty) for kind in kinds for penalty in PENALTIES]
    return found


def merged(
    cell: Cell,
    state: Callable[[str], Mapping[str, Tensor]],
    measured: Sequence[Any],
    rows: Mapping[str, int],
    damping: float,
    **how: Any,
) -> dict[str, Tensor]:
    """The merge of a cell from weights by name and what was measured for it; ``rows`` is N of each training set."""
    base, tuned = state(BASE), [state(model) for model in cell.models]
    if cell.curvature == "task-arithmetic":
        return gm.merge_state_dicts(base, tuned, "task-arithmetic", **how)
    matrices = list(measured)
    if cell.curvature == "identity":
        matrices = [float(rows[name]) for name in (BASE, *TASKS)]
    elif cell.reduction == "N · mean":
        matrices = [one.scale(rows[name] / one.examples) for name, one in zip((BASE, *TASKS), matrices, strict=True)]
    return gm.merge_state_dicts(
        base,
        tuned,
        "gradient-matching",
        prior=matrices[0],
        curvature=matrices[1:],
        penalty=None if cell.penalty == "H_0" else "none",
        reduction="mean" if cell.reduction == "mean" else "sum",
        # What damps Kronecker factors is in units of their own mean; a number this small would leave them as they are.
        damping="auto" if cell.curvature == "kronecker" else damping,
        **how,
    )
