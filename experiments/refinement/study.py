"""What is compared, on either kind of task: merges, refinements of one of them, and their limits."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from torch import nn

import gradmerge as gm
from gradmerge.demo.stages import Stages

from ..common.seeds import Run
from ..common.states import State
from ..common.training import quick_products

MERGE = "gradient matching"
METHODS = ("newton", "adamw")
#: Passes of AdamW over few rows; over all of them the two of its search are enough.
PASSES = 8
#: Rows that judge where all training rows are given.
JUDGING = 500


@dataclass(frozen=True)
class Wanted(Run):
    """What the seeds share, and how many rows refinements are given."""

    shared: Any
    sizes: tuple[int | None, ...]


class Study(ABC):
    """One seed: models that are trained and measured already, and what is made of them here."""

    stages: Stages
    device: str
    trained: Sequence[str]
    """Stages of the models that all is made of."""
    tasks: Sequence[str]
    start: str = MERGE
    """The merge that is refined."""
    structures: Sequence[str] = ("diagonal", "kronecker")
    """Of the curvature that merges are made by."""
    sizes: Sequence[int | None]
    """Labelled rows per task that a refinement is given, None for all; a tenth of them is there to judge by."""

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
    def rows(self, task: str, first: int | None, *, unseen: bool = False) -> list[Any]:
        """So many training rows of a task, or of those that no model has seen, drawn by the seed; None is all."""

    @abstractmethod
    def score(self, module: nn.Module) -> dict[str, dict[str, float]]:
        """Task → mean loss and accuracy, a share, on its test rows."""

    def compare(self) -> dict[str, Any]:
        """Name → scores of every task; and how long each refinement took, and what its rounds did."""
        made = self.made()
        # What takes longest comes last: Newton steps, and merges with Kronecker curvature.
        order = sorted(made, key=lambda name: (name.startswith("newton"), "Kronecker" in name))
        found = {name: self.stage(name, made[name]) for name in order}
        found = {name: found[name] for name in made}
        scores = {name: one.pop("scores") for name, one in found.items()}
        return {"scores": scores, "refinements": {name: one for name, one in found.items() if one}}

    def made(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Every model that is compared, by name; a call makes it and scores it."""
        models = self._models()
        made = {name: partial(self._made, make) for name, make in models.items()}
        for first, taught in product(self.sizes, (False, True)):
            rows = "all rows" if first is None else f"{first} rows"
            for method in METHODS:
                name = f"{method}, taught, {rows}" if taught else f"{method}, {rows}"
                made[name] = partial(self._refined, method, self.start, first, taught)
            if taught or first is not None:  # by labels, on all of them, it is what joint training does
                name = f"base {'taught' if taught else 'tuned'} on the same {rows}"
                made[name] = partial(self._refined, "adamw", "base", first, taught)
        return made

    def stage(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = re.sub(r"[^a-z0-9]+", "-", name.lower())
        given = {"passes": PASSES, "judging": JUDGING}
        found: dict[str, Any] = self.stages.run(
            f"compare-{path}", lambda folder: make(), given=given, after=self.trained
        )
        return found

    def _made(self, make: Callable[[], State]) -> dict[str, Any]:
        return self._scored(self.module(make()))

    def _scored(self, module: nn.Module) -> dict[str, Any]:
        return {"scores": self.score(module)}

    def _refined(self, method: str, start: str, first: int | None, taught: bool) -> dict[str, Any]:
        judging = JUDGING if first is None else first // 10
        # The models that were merged know their training rows too well for these to judge by.
        valid = {task: self.rows(task, judging, unseen=True) for task in self.tasks}
        rows = {task: self.rows(task, None if first is None else first - judging) for task in self.tasks}
        module = self.module(self._models()[start]())
        more: dict[str, Any] = {"rounds": PASSES} if method == "adamw" and first is not None else {}
        if taught:  # where the base is of a task, that has no model of its own
            states = self.states()
            more["teachers"] = {task: self.module(states.get(task, states["base"])) for task in self.tasks}
        begun = time.perf_counter()
        with quick_products():
            found = gm.refine(module, rows, valid=valid, method=method, progress=False, **more)
        return self._scored(module) | {
            "seconds": time.perf_counter() - begun,
            "held_back": [one.judged for one in found.rounds],
            "lengths": [[step.length for step in one.steps] for one in found.rounds],
            "passes": dict(found.passes),
            "stopped": found.stopped,
        }

    def _models(self) -> dict[str, Callable[[], State]]:
        """Everything that is not refined, made when it is asked for."""
        states = cache(self.states)
        curvature = cache(self.curvature)

        @cache
        def merge(method: str, kind: str | None = None, penalty: str | None = None) -> State:
            found = states()
            tuned = [found[task] for task in self.tasks if task in found]
            measured: dict[str, Any] = {}
            if kind is not None:
                prior, own = curvature(kind)
                measured = {"prior": prior, "curvature": own, "reduction": "mean", "penalty": penalty}
            return gm.merge_state_dicts(found["base"], tuned, method, threads=2, device=self.device, **measured)

        models: dict[str, Callable[[], State]] = {
            name: lambda name=name: states()[name]
            for name in ("base", "joint")  # type: ignore[misc]
        }
        models["average"] = lambda: merge("average")
        return models | {
            MERGE + (", Kronecker" if kind == "kronecker" else "") + (", penalty none" if penalty else ""): partial(
                merge, "gradient-matching", kind, penalty
            )
            for kind in self.structures
            for penalty in (None, "none")
        }
