"""Five sentiment sets: a model of IMDB, tuned on four more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradmerge.tasks.models import model_with

from ..common.states import State
from ..sentiment import run
from ..sentiment.data import BASE, SETS, TASKS
from ..sentiment.settings import ALL_DATA
from .study import Study

#: Texts of a batch that is measured at once; the steps of AdamW have their own number.
BATCH = 256


class TextSeed(run.Seed, Study):
    tasks = SETS
    trained = (*SETS, ALL_DATA)

    def __init__(self, seed: int, run: Any) -> None:
        super().__init__(seed, run.shared)
        self.device, self.sizes = run.device, run.sizes

    def results(self) -> dict[str, Any]:
        trained = {name: self._train(name) for name in self.trained}
        return {"seed": self.seed, "refined": self.start, "trained": trained, **self.compare()}

    def states(self) -> dict[str, State]:
        return {
            "base": self._state(BASE),
            "joint": self._state(ALL_DATA),
            **{name: self._state(name) for name in TASKS},
        }

    def curvature(self, kind: str) -> tuple[Any, list[Any]]:
        found = {name: self.estimated(name, labels="sampled", structure=kind) for name in SETS}
        return found[BASE], [found[name] for name in TASKS]

    def module(self, state: State) -> nn.Module:
        # The model's weights may be the very tensors that it is given, and refining changes them.
        model: nn.Module = model_with(self._template, {name: value.clone() for name, value in state.items()})
        return model

    def rows(self, task: str, first: int | None, *, unseen: bool = False) -> list[Any]:
        examples = self._examples(task, "dev" if unseen else "train")
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.seed))[:first].tolist()
        chosen = [examples[place] for place in order]
        return [self._kind.collate(chosen[begin : begin + BATCH]) for begin in range(0, len(chosen), BATCH)]

    def score(self, module: Any) -> dict[str, dict[str, float]]:
        found = {}
        for name in SETS:
            one = self.scored(module, name, "test")
            found[name] = {"loss": one["loss"], "accuracy": one["right"] / one["rows"]}
        return found
