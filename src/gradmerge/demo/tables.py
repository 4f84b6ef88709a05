"""The tables of the demonstration: accuracies and losses of all models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tasks.metrics import standard_error
from .digits import BASE, REMOVED, TASKS

EVERY = (BASE, *TASKS)
REST = tuple(task for task in EVERY if task != REMOVED)
#: Folder → name in the table of removals.
REMOVAL_MODELS = {
    "models/joint": "before",
    "removed/negation": "negation",
    "removed/removal": "gradient matching",
    "removed/influence": "influence function",
    f"models/without-{REMOVED}": "trained without it (target)",
}


def merging_models(weight: float, unlabeled: int) -> dict[str, str]:
    """Return folder → name in the table of merges."""
    return {
        "models/base": "base",
        **{f"models/{task}": f"fine-tuned on {task}" for task in TASKS},
        "merged/average": "average",
        "merged/task-arithmetic": "task-arithmetic, weight 1",
        "merged/task-arithmetic-tuned": f"task-arithmetic, tuned: {weight:g}",
        "merged/ties": "ties",
        "merged/regmean": "regmean",
        "merged/fisher-averaging": "fisher-averaging",
        "merged/gradient-matching": "gradient-matching, weight 1",
        "improved/calibrated": f"gradient-matching + calibrate, {unlabeled} unlabeled images",
        "improved/distilled": "… + distill, the same images",
        "models/joint": "trained on all (target)",
    }


def row(
    name: str, folder: str, predicted: Mapping[str, Mapping[str, Tensor]], labels: Tensor, tasks: Sequence[str]
) -> dict[str, Any]:
    """Return one model in a table, from ln p of every class for the test images of each task.

    The mean is over ``tasks``. Its standard error is over digits, each of which is in every task.
    """
    found, target = predicted[folder], predicted[f"models/without-{REMOVED}"][REMOVED]
    right = {task: (logs.argmax(1) == labels).double() for task, logs in found.items()}
    losses = {task: float(F.nll_loss(logs, labels)) for task, logs in found.items()}
    by_digit = torch.stack([right[task] for task in tasks]).mean(0)
    return {
        "name": name,
        "folder": folder,
        "scores": {task: float(rows.mean()) for task, rows in right.items()},
        "losses": losses,
        "mean": float(by_digit.mean()),
        "mean_error": standard_error(by_digit),
        "mean_loss": sum(losses[task] for task in tasks) / len(tasks),
        "kl": float(F.kl_div(found[REMOVED], target, reduction="batchmean", log_target=True)),
    }


def merge_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells: accuracies in percent, and the mean loss."""
    columns = ["model", *EVERY, "mean ± error", "loss"]
    return columns, [_cells(row, EVERY) for row in results["merging"]]


def removal_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells, the removed task first; mean and loss are those of the other tasks."""
    columns = ["model", REMOVED, *REST, "rest, mean ± error", "rest, loss", "KL"]
    return columns, [[*_cells(row, (REMOVED, *REST)), f"{row['kl']:.3f}"] for row in results["removal"]]


def _cells(row: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    scores = [f"{100 * row['scores'][task]:.1f}" for task in tasks]
    return [row["name"], *scores, f"{100 * row['mean']:.1f} ± {100 * row['mean_error']:.1f}", f"{row['mean_loss']:.3f}"]
