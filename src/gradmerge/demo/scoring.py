"""Accuracy of many models on the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..tasks import evaluate_model, load_model, load_task

Scores = dict[str, float]
"""Task → accuracy, the share of test images whose most likely class is right."""


def accuracies(models: Iterable[str], tasks: Sequence[str], advance: Callable[[int], None]) -> dict[str, Scores]:
    """Model folder → task → accuracy on `data/TASK.npz:test`, as `gradmerge evaluate` has it; files are read once."""
    models = list(models)
    loaded = {task: load_task(models[0], f"data/{task}.npz:test", task="image", device="cpu") for task in tasks}
    batches = {task: list(one.batches(256)) for task, one in loaded.items()}
    found: dict[str, Scores] = {}
    for folder in models:
        model, _ = load_model(folder, "image", device="cpu")
        found[folder] = {
            task: float(evaluate_model(model, batches[task], loaded[task].output)["accuracy"] or 0) for task in tasks
        }
        advance(1)
    return found
