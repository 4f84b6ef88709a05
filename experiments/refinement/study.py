"""What is compared, on either kind of task: merges, refinements of one of them, and their limits."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradmerge as gm

from ..common.states import State

#: The merge that is refined.
MERGE = "gradient matching"
METHODS = ("newton", "adamw")


class Study(ABC):
    """One seed: models that are trained and measured already, and what is made of them here."""

    tasks: Sequence[str]
    sizes: Sequence[int]
    """Labelled rows per task that a refinement is given; a tenth of them it holds back by itself."""

    @abstractmethod
    def states(self) -> dict[str, State]:
        """Weights of ``base`` and ``joint``, and of one model per task under its name."""

    @abstractmethod
    def curvature(self, kind: str) -> tuple[Any, list[Any]]:
        """Curvature of the base and of every task's model on the rows that they were trained on."""

    @abstractmethod
    def module(self, state: State) -> nn.Module:
        """A model with these weights, on the device."""

    @abstractmethod
    def rows(self, task: str, first: int) -> list[Any]:
        """The first training rows of a task, in batches."""

    @abstractmethod
    def score(self, module: nn.Module) -> dict[str, dict[str, float]]:
        """Task → mean loss and accuracy, a share, on its test rows."""

    def compare(self) -> dict[str, Any]:
        """Name → scores of every task; and how long each refinement took, and what its rounds did."""
        states = self.states()
        base, tuned = states["base"], [states[task] for task in self.tasks if task in states]
        merged = self._merged(base, tuned)
        scores = {name: self.score(self.module(state)) for name, state in (states | merged).items()}
        told: dict[str, Any] = {}
        for first in self.sizes:
            rows = {task: self.rows(task, first) for task in self.tasks}
            starts = {f"{method}, {first} rows": (method, merged[MERGE]) for method in METHODS}
            starts[f"base tuned on the same {first} rows"] = "adamw", base
            starts[f"newton, noise labels, {first} rows"] = "newton", merged[MERGE]
            for name, (method, start) in starts.items():
                module = self.module(start)
                given = {task: noisy(part) for task, part in rows.items()} if "noise" in name else rows
                begun = time.perf_counter()
                found = gm.refine(module, given, method=method, progress=False)
                told[name] = {
                    "seconds": time.perf_counter() - begun,
                    "held_back": [one.judged for one in found.rounds],
                    "lengths": [[step.length for step in one.steps] for one in found.rounds],
                    "passes": dict(found.passes),
                    "stopped": found.stopped,
                }
                scores[name] = self.score(module)
        return {"scores": scores, "refinements": told}

    def _merged(self, base: State, tuned: Sequence[State]) -> dict[str, dict[str, Tensor]]:
        prior, curvature = self.curvature("diagonal")
        wide_prior, wide = self.curvature("kronecker")
        of_diagonal = {"prior": prior, "curvature": curvature, "reduction": "mean"}
        of_factors = {"prior": wide_prior, "curvature": wide, "reduction": "mean"}
        return {
            "average": gm.merge_state_dicts(base, tuned, "average", threads=2),
            MERGE: gm.merge_state_dicts(base, tuned, "gradient-matching", threads=2, **of_diagonal),
            f"{MERGE}, penalty none": gm.merge_state_dicts(
                base, tuned, "gradient-matching", threads=2, penalty="none", **of_diagonal
            ),
            f"{MERGE}, Kronecker": gm.merge_state_dicts(base, tuned, "gradient-matching", threads=2, **of_factors),
            f"{MERGE}, Kronecker, penalty none": gm.merge_state_dicts(
                base, tuned, "gradient-matching", threads=2, penalty="none", **of_factors
            ),
        }


def noisy(batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same rows with their labels exchanged at random."""
    labels = torch.cat([batch["labels"] for batch in batches])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    made, begin = [], 0
    for batch in batches:
        changed = dict(copy.copy(batch))
        changed["labels"] = labels[begin : begin + len(batch["labels"])]
        begin += len(batch["labels"])
        made.append(changed)
    return made
