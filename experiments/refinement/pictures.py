"""Eight image sets: an encoder that saw a little of each, tuned on each in full, with fixed heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradmerge as gm

from ..common.states import State
from ..vision import run
from .study import MERGE, Study


class PictureSeed(run.Seed, Study):
    def __init__(self, seed: int, run: Any) -> None:
        super().__init__(seed, run.shared)
        self.device, self.sizes, self.tasks = run.device, run.sizes, self.settings.tasks
        if self.settings.pretraining is None:
            # The base's H_0 is larger than the tasks' curvature here: with its penalty the merge is a ruined model.
            self.start, self.structures = f"{MERGE}, penalty none", ("diagonal",)
        self.trained = ["base", "joint", *(f"tuned-{task}" for task in self.tasks)]

    def results(self) -> dict[str, Any]:
        return {"seed": self.seed, "refined": self.start, "trained": self.train(), **self.compare()}

    def states(self) -> dict[str, State]:
        tuned = {task: self._state(f"tuned-{task}") for task in self.tasks}
        return {"base": self._state("base"), "joint": self._state("joint"), **tuned}

    def curvature(self, kind: str) -> tuple[Any, list[Any]]:
        if kind == "diagonal":
            measured = self.measure("sampled")
            return measured.base, list(measured.tasks)
        base = self._estimated("base", self.tasks, self.settings.base_rows, kind)
        first = self.settings.curvature_rows
        return base, [self._estimated(f"tuned-{task}", [task], first, kind) for task in self.tasks]

    def _estimated(self, stage: str, tasks: Any, first: int | None, kind: str) -> Any:
        def make(folder: Path) -> int:
            batches = list(self._images(tasks, "train", first).batches(self.settings.curvature_batch))
            module = self.module(self._state(stage))
            found = gm.estimate_curvature(
                module, batches, "sampled", structure=kind, device=self.run.device, progress=False
            )
            found.save(folder / "curvature", force=True)
            return int(found.examples)

        self.stages.run(f"{kind}-{stage}", make, after=[stage])
        return gm.KroneckerCurvature.load(self.stages.path(f"{kind}-{stage}") / "curvature")

    def module(self, state: State) -> nn.Module:
        classifier = self._classifier()
        classifier.put(state)
        return classifier.eval()

    def rows(self, task: str, first: int | None, *, unseen: bool = False) -> list[Any]:
        # A base that was trained here knows the first rows by heart: they say nothing about what a merge has lost.
        images = self._images([task], "validation" if unseen else "train")
        known = self.settings.base_rows if self.settings.pretraining is not None and not unseen else 0
        order = torch.randperm(len(images) - known, generator=torch.Generator().manual_seed(self.seed))[:first]
        return [images.batch(rows.tolist()) for rows in (known + order).split(128)]

    @torch.no_grad()
    def score(self, module: nn.Module) -> dict[str, dict[str, float]]:
        found = {}
        for task in self.tasks:
            rows, right, loss = self._images([task], "test"), 0, 0.0
            for batch in rows.batches(self.settings.evaluation_batch):
                labels = batch["labels"].to(self.run.device)
                logits = module(batch["pixels"].to(self.run.device), batch["task"].to(self.run.device))
                right += int((logits.argmax(-1) == labels).sum())
                loss += float(F.cross_entropy(logits.float(), labels, reduction="sum"))
            found[task] = {"loss": loss / len(rows), "accuracy": right / len(rows)}
        return found
