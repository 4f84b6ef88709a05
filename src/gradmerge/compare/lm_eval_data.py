"""Tasks of the lm-evaluation-harness as tasks that merges are compared on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..curvature.losses import LOSSES
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..tasks import LoadedTask, LoadOptions
from ..tasks.lm_eval import LMEval, language_model
from .in_memory import Rows, TaskData, check_vocabulary
from .scores import headline, higher_is_better


@dataclass(frozen=True)
class HarnessTasks:
    """Which tasks of the harness merges are evaluated on."""

    names: Sequence[str] | str
    folder: str | Path | None = None


class _NoRows:
    """Stands where data would be: the harness has its own."""

    loss = LOSSES["next-token"]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def notes(self) -> list[str]:
        return []


class HarnessData(TaskData):
    """One task of the harness, with a model that can take any weights."""

    def __init__(self, loaded: LoadedTask, harness: LMEval, tokenizer: Any) -> None:
        super().__init__(harness.names[0], loaded)
        self._harness, self._tokenizer = harness, tokenizer

    def evaluate_rows(self, model: nn.Module) -> tuple[dict[str, Any], Rows]:
        found = self._harness.evaluate(model, self._tokenizer)[self.name]
        self.loaded.examples = found.examples
        summary = found.summary()
        for metric, higher in found.higher_is_better.items():
            if higher is not higher_is_better(metric):  # a metric that is not known here to be better when it is small
                del summary[metric]
        if not set(summary) & set(found.metrics):
            raise InputError(f"--lm-eval {self.name}: none of {', '.join(found.metrics)} can be compared here")
        first = headline(summary)
        if not math.isfinite(summary[first]):
            raise InputError(f"--lm-eval {self.name}: {first} is {summary[first]:g}, no number to compare")
        return summary, {first: found.rows[first]} if first in found.rows else {}


def harness_data(
    recipe: Recipe, wanted: HarnessTasks, loading: LoadOptions, known: dict[str, TaskData]
) -> dict[str, TaskData]:
    """Every task of the harness, on the model that the data of others is for, or on that of the base."""
    check_vocabulary(recipe)
    reference = recipe.base.model if recipe.base is not None else recipe.models[0].model
    path = local_path(reference, recipe.folder)
    given = next((one.loaded for one in known.values()), None)
    model, tokenizer, device = language_model(str(path) if path.exists() else reference, loading, given)
    found: dict[str, TaskData] = {}
    for name in LMEval.parse_names(wanted.names):
        if name in known:
            raise InputError(f"--lm-eval {name}: a task of the recipe has this name too; rename its model's folder")
        harness = LMEval(name, wanted.folder, loading["limit"], loading["batch_size"])
        nothing = LoadedTask(model, "lm-eval", _NoRows.loss, 0, device, {}, [], _NoRows(), [])
        found[name] = HarnessData(nothing, harness, tokenizer)
    return found
