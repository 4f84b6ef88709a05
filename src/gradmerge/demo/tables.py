"""The tables of the demonstration: accuracies of all models, as data and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..tasks.metrics import difference, standard_error
from .demo_settings import BASE, REMOVED, TASKS
from .recipes import CALIBRATED, DISTILLED, INFLUENCE, MATCHING, NEGATION, REMOVAL, TUNED

EVERY = (BASE, *TASKS)
REST = tuple(task for task in EVERY if task != REMOVED)

Measurements = Mapping[str, Mapping[str, Mapping[str, Tensor]]]
"""Model folder → task → accuracy and loss_per_example → one number per image, the same images for every task."""


@dataclass(frozen=True)
class TableRow:
    """One model in a table."""

    name: str
    folder: str
    scores: Mapping[str, float]
    """Task → accuracy."""
    losses: Mapping[str, float]
    """Task → mean of −ln p of the right class."""
    mean: float
    """Mean accuracy over all tasks; for a removal over the others."""
    mean_error: float
    """Its standard error over digits; each digit is in every task."""
    mean_loss: float
    tied: str = ""
    """Of merges: `best`, or `tied` with it: the means differ by at most two standard errors on the same digits."""
    kl: float = 0.0
    """Of removals: mean KL(target ‖ model) on the removed task."""


def merge_rows(found: Measurements, merged: Sequence[str], weight: float, unlabeled: int) -> list[TableRow]:
    """Return the rows of the base, the fine-tuned models, all merges, and the model trained on all tasks."""
    names = {
        "task-arithmetic": "task-arithmetic, weight 1",
        TUNED: f"task-arithmetic, tuned: {weight:g}",
        MATCHING: "gradient-matching, weight 1",
    }
    folders = {"models/base": "base"} | {f"models/{task}": f"fine-tuned on {task}" for task in TASKS}
    folders |= {f"merged/{name}": names.get(name, name) for name in merged}
    folders[f"improved/{CALIBRATED}"] = f"{MATCHING} + calibrate, {unlabeled} unlabeled images"
    folders[f"improved/{DISTILLED}"] = "… + distill, the same images"
    folders["models/joint"] = "trained on all (target)"
    rows = [_row(name, folder, found[folder], EVERY) for folder, name in folders.items()]
    merges = [row for row in rows if row.folder.startswith("merged/")]
    best = max(merges, key=lambda row: row.mean).folder

    def mark(row: TableRow) -> str:
        if row not in merges:
            return ""
        apart = difference(_by_digit(found[row.folder], EVERY), _by_digit(found[best], EVERY))
        return "best" if row.folder == best else "tied" if apart.tied else ""

    return [replace(row, tied=mark(row)) for row in rows]


def removal_rows(found: Measurements, kl: Mapping[str, float]) -> list[TableRow]:
    """Return the rows of the joint model, the removals, and the model trained without the removed task."""
    folders = {
        "models/joint": "before",
        f"removed/{NEGATION}": "negation",
        f"removed/{REMOVAL}": "gradient matching",
        f"removed/{INFLUENCE}": "influence function",
        f"models/without-{REMOVED}": "trained without it (target)",
    }
    return [replace(_row(name, folder, found[folder], REST), kl=kl[folder]) for folder, name in folders.items()]


def _row(name: str, folder: str, found: Mapping[str, Mapping[str, Tensor]], tasks: Sequence[str]) -> TableRow:
    losses = {task: float(values["loss_per_example"].mean()) for task, values in found.items()}
    mean = _by_digit(found, tasks)
    return TableRow(
        name,
        folder,
        {task: float(values["accuracy"].mean()) for task, values in found.items()},
        losses,
        float(mean.mean()),
        standard_error(mean),
        sum(losses[task] for task in tasks) / len(tasks),
    )


def _by_digit(found: Mapping[str, Mapping[str, Tensor]], tasks: Sequence[str]) -> Tensor:
    """Return the accuracy of each digit, the mean over tasks."""
    return torch.stack([found[task]["accuracy"] for task in tasks]).mean(0)


def merge_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells: accuracies in percent, and the mean loss."""
    columns = ["model", *EVERY, "mean ± error", "loss", "merges"]
    return columns, [[*_cells(row, EVERY), row.tied] for row in rows]


def removal_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells, the removed task first; mean and loss are those of the other tasks."""
    columns = ["model", REMOVED, *REST, "rest, mean ± error", "rest, loss", "KL"]
    return columns, [[*_cells(row, (REMOVED, *REST)), f"{row.kl:.3f}"] for row in rows]


def _cells(row: TableRow, tasks: Sequence[str]) -> list[str]:
    scores = [_percent(row.scores[task]) for task in tasks]
    return [row.name, *scores, f"{_percent(row.mean)} ± {_percent(row.mean_error)}", f"{row.mean_loss:.3f}"]


def weight_lines(results: Mapping[str, Any]) -> list[str]:
    """Return a line per method of the preview: the best weight, and the weights tied with it."""
    lines = []
    for method, best in results["preview"].items():
        score = f"{_percent(best['mean_accuracy'])} ± {_percent(best['standard_error'])}"
        low, high = best["tied"]
        lines.append(f"{method}: {score} at weight {best['weight']:g}; weights from {low:g} to {high:g} are tied.")
    return lines


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def page(results: Mapping[str, Any], merging: Sequence[TableRow], removal: Sequence[TableRow]) -> str:
    """Return `results.md`."""
    images = results["images"]
    return f"""# Results of gradmerge demo

Accuracy in percent on {images["test"]} test images per task, seed {results["seed"]}. The base is a small vision
transformer, trained on {images["train"]} digits (`{BASE}`) and fine-tuned on the same digits
{", ".join(f"`{task}`" for task in TASKS)}.

{markdown(*merge_table(merging))}
± is a standard error. Merges marked `tied` differ from the `best` by at most two standard errors of the difference on
the same images. Methods have their default options. The tuned weight is the best on {images["valid"]} validation
images per task. `calibrate` and `distill` use {results["unlabeled"]} unlabeled training images per task.

## Choose the weight

Mean accuracy on the validation images, with one weight for all tasks (`preview/report.html` has the curves):

{chr(10).join("- " + line for line in weight_lines(results))}

## Remove {REMOVED}

`negation` and `gradient matching` subtract what fine-tuning the joint model on `{REMOVED}` changed. The `influence
function` needs no fine-tuned model. `KL` is the distance of the predictions on `{REMOVED}` from those of the target, in
nats. A good removal is close to the last row, a model that never saw `{REMOVED}`.

{markdown(*removal_table(removal))}
`recipes/` has the recipes, `commands.sh` the commands that repeat each step, and `results.json` these numbers. Reports
are `preview/report.html`, `diagnose/report.html` and those in `improved/`.
"""
