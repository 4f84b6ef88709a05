"""What a run would fetch and train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..common.plan import Data, Model, Plan, Step, rows_of, total
from .settings import HUB, Settings, epochs_on


def plan(settings: Settings, model: str | None, data_dir: Path | None) -> Plan:
    splits = ("train", "test")
    if data_dir is None:
        data = [Data(HUB[task], ("image", "label"), splits) for task in settings.tasks]
    else:
        data = [Data(f"{data_dir}: {task}", ("image", "label"), splits, local=True) for task in settings.tasks]

    def rows(task: str) -> int | None:
        known = settings.train_most or (rows_of(HUB[task]) if data_dir is None else None)
        if known is None:
            return None
        return known - min(max(1, round(settings.validation_share * known)), settings.validation_most)

    counts = {task: rows(task) for task in settings.tasks}
    trained = [
        Step(task, "the base", count, replace(settings.fine_tuning, epochs=epochs_on(settings, count or 0)))
        for task, count in counts.items()
    ]
    trained.append(Step("joint", "the base", total(list(counts.values())), settings.joint))
    if settings.pretraining is not None:
        count = settings.base_rows * len(settings.tasks)
        trained.insert(0, Step("base, with its heads", "random weights", count, settings.pretraining))
    then = [
        f"curvature of {len(settings.tasks) + 1} models by the data's labels and by drawn ones, and Gram matrices",
        f"merges by every method, most of them at {len(settings.weights)} weights",
    ]
    return Plan([Model(model, "the encoder that is fine-tuned")] if model else [], data, trained, then)
