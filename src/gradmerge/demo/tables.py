"""What is shown in the end: rows of accuracies, as data and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tasks.standard_errors import difference, standard_error
from .demo_settings import BASE, REMOVED, TASKS
from .recipes import CALIBRATED, DISTILLED, INFLUENCE, MATCHING, NEGATION, REMOVAL, TUNED

EVERY = (BASE, *TASKS)
REST = tuple(task for task in EVERY if task != REMOVED)

Found = Mapping[str, Mapping[str, Mapping[str, Tensor]]]
"""Model folder → task → accuracy and loss_per_example → one number per image, the same images for every task."""


@dataclass(frozen=True)
class TableRow:
    """One model in a table."""

    name: str
    folder: str
    scores: Mapping[str, float]
    """Task → accuracy, the share of test images whose most likely class is right."""
    losses: Mapping[str, float]
    """Task → mean of −ln p of the right class."""
    errors: Mapping[str, float]
    """Task → standard error of the accuracy."""
    mean: float
    """Of the accuracy, over all tasks; of a removal over those that stay."""
    mean_error: float
    """Standard error of that. A digit is in every task, so that it is one over digits, not over images."""
    mean_loss: float
    tied: str = ""
    """Of merges: `best`, or `tied` with it: the means differ by no more than two standard errors on the same digits."""
    kl: float = 0.0
    """Of removals: mean KL(target ‖ model) on the removed task."""


def merge_rows(found: Found, merged: Sequence[str], weight: float, unlabeled: int) -> list[TableRow]:
    """The base, the fine-tuned models, every merge, the improved merge, and the model trained on everything."""
    names = {
        "task-arithmetic": "task-arithmetic, weight 1",
        TUNED: f"task-arithmetic, tuned: {weight:g}",
        MATCHING: "gradient-matching, weight 1",
    }
    rows = [("base", "models/base"), *((f"tuned on {task}", f"models/{task}") for task in TASKS)]
    rows += [(names.get(name, name), f"merged/{name}") for name in merged]
    rows += [(f"{MATCHING} + calibrate, {unlabeled} unlabeled images", f"improved/{CALIBRATED}")]
    rows += [("… + distill, the same images", f"improved/{DISTILLED}")]
    rows += [("trained on all (target)", "models/joint")]
    made = _rows(rows, found, EVERY)
    merges = [row.folder for row in made if row.folder.startswith("merged/")]
    best = max(merges, key=lambda folder: float(_by_digit(found[folder], EVERY).mean()))

    def mark(folder: str) -> str:
        apart = difference(_by_digit(found[folder], EVERY), _by_digit(found[best], EVERY))
        return "best" if folder == best else "tied" if folder in merges and apart.tied else ""

    return [dataclasses.replace(row, tied=mark(row.folder)) for row in made]


def removal_rows(found: Found, apart: Mapping[str, float]) -> list[TableRow]:
    """Before, after, and what it should be."""
    rows = [
        ("before", "models/joint"),
        ("negation", f"removed/{NEGATION}"),
        ("gradient matching", f"removed/{REMOVAL}"),
        ("influence steps", f"removed/{INFLUENCE}"),
        ("trained without it (target)", f"models/without-{REMOVED}"),
    ]
    return [dataclasses.replace(row, kl=apart[row.folder]) for row in _rows(rows, found, REST)]


def _rows(rows: Sequence[tuple[str, str]], found: Found, tasks: Sequence[str]) -> list[TableRow]:
    """One for each model; means are over ``tasks``."""
    made = []
    for name, folder in rows:
        right = {task: one["accuracy"] for task, one in found[folder].items()}
        losses = {task: float(one["loss_per_example"].mean()) for task, one in found[folder].items()}
        errors = {task: standard_error(one, share=True) for task, one in right.items()}
        mean = _by_digit(found[folder], tasks)
        facts = float(mean.mean()), standard_error(mean), sum(losses[task] for task in tasks) / len(tasks)
        made.append(TableRow(name, folder, {t: float(one.mean()) for t, one in right.items()}, losses, errors, *facts))
    return made


def _by_digit(found: Mapping[str, Mapping[str, Tensor]], tasks: Sequence[str]) -> Tensor:
    """The accuracy of each digit, mean over the tasks that it is in."""
    return torch.stack([found[task]["accuracy"] for task in tasks]).mean(0)


def merge_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells; accuracies in per cent, the mean loss, and which merges are tied with the best."""
    cells = [[*line, row.tied] for line, row in zip(_cells(rows, EVERY), rows, strict=True)]
    return ["model", *EVERY, "mean ± error", "loss", "merges"], cells


def removal_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """The same, with the removed task first; the loss is that of the others, and KL the distance to the target."""
    cells = _cells(rows, (REMOVED, *REST))
    apart = [f"{row.kl:.3f}" for row in rows]
    return ["model", REMOVED, *REST, "rest, mean ± error", "rest, loss", "KL"], [
        [*line, kl] for line, kl in zip(cells, apart, strict=True)
    ]


def _cells(rows: Sequence[TableRow], tasks: Sequence[str]) -> list[list[str]]:
    return [
        [
            row.name,
            *(_percent(row.scores[task]) for task in tasks),
            f"{_percent(row.mean)} ± {_percent(row.mean_error)}",
            f"{row.mean_loss:.3f}",
        ]
        for row in rows
    ]


def flatness(results: Mapping[str, Any]) -> list[str]:
    """How much each method depends on its weight, one sentence per method."""
    sentences = []
    for method, best in results["preview"].items():
        low, high = best["tied"]
        over = f"weights from {low:g} to {high:g} are tied" if low < high else "no other weight is tied with it"
        found = f"{_percent(best['mean_accuracy'])} ± {_percent(best['standard_error'])} at weight {best['weight']:g}"
        sentences.append(f"{method}: {found}; {over}.")
    return sentences


def rows_of(values: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """Rows as `results.json` has them."""
    return [TableRow(**value) for value in values]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _largest_error(results: Mapping[str, Any]) -> str:
    """Of the accuracy of one model on one task."""
    return _percent(max(error for row in rows_of(results["merging"]) for error in row.errors.values()))


def page(results: Mapping[str, Any]) -> str:
    """`results.md`: both tables, and what is in the folder."""
    images = results["images"]
    return f"""# What gradmerge demo found

Accuracy in per cent on {images["test"]} test images per task, seed {results["seed"]}. The base, a small vision
transformer, was trained on {images["train"]} digits as they are (`{BASE}`), and tuned from there on the same digits
{", ".join(f"`{task}`" for task in TASKS)}. No test image, in whatever form, was trained on.

{markdown(*merge_table(rows_of(results["merging"])))}
± is a standard error; that of a single accuracy is {_largest_error(results)} at most. Merges are compared on the same
images: those marked `tied` differ from the `best` by no more than two standard errors of the difference.

Every method has its default options, and weight 1 where nothing else is said. The tuned weight of task arithmetic is
the best of the preview on {images["valid"]} validation images per task; the other rows have seen no labels but those of
the training images. `slerp` takes two models only, and `weighted-average` with equal weights is `average`. With
`reduction: mean` nothing would change, as every task has the same number of images.

`calibrate` and `distill` improve the merge of {MATCHING} on {results["unlabeled"]} training images of each task. They
use the fine-tuned models, and no labels.

## How much the weight matters

Mean accuracy on the validation images, one weight for all tasks (`preview/report.html` has the curves). Of weights that
are tied, the recipe's own is taken, or the one with the highest mean:

{chr(10).join("- " + text for text in flatness(results))}

## Taking {REMOVED} out again

`negation` and `gradient matching` subtract what tuning the joint model further on `{REMOVED}` changed. `influence
steps` need no tuned model: they go along the gradient of `{REMOVED}`, as far as the loss on the rest allows. `KL` is
how far the predictions on `{REMOVED}` are from those of the model that never saw it, in nats.

{markdown(*removal_table(rows_of(results["removal"])))}
The closer to the last row the better: `{REMOVED}` should fall to what a model has that never saw it, and the rest
should stay.

## What is here

| | |
|---|---|
| `data/` | the digits, one .npz per task with the splits train, valid and test |
| `models/` | the base, the tuned models, and those trained on several tasks |
| `curvature/`, `gram/`, `curvature-at-delta/` | what was estimated for them |
| `recipes/`, `merged/`, `removed/` | recipes, and the models that they make |
| `improved/` | the merge after calibration, and after distillation; `report.html` in each |
| `preview/report.html` | accuracy over the weight, on validation images |
| `diagnose/report.html` | what the merge costs, in which layers, beside the jointly trained model |
| `commands.sh` | the commands that repeat each step; run them in this folder |
| `results.json` | the numbers above |
"""
