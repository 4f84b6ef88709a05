"""What is shown in the end: rows of accuracies, as data and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .demo_settings import BASE, REMOVED, TASKS
from .recipes import INFLUENCE, MATCHING, NEGATION, REFINED, REMOVAL, TUNED

EVERY = (BASE, *TASKS)
REST = tuple(task for task in EVERY if task != REMOVED)

Found = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Model folder → accuracy and loss → task → number."""


@dataclass(frozen=True)
class TableRow:
    """One model in a table."""

    name: str
    folder: str
    scores: Mapping[str, float]
    """Task → accuracy, the share of test images whose most likely class is right."""
    losses: Mapping[str, float]
    """Task → mean of −ln p of the right class."""
    kl: float = 0.0
    """Of removals: mean KL(target ‖ model) on the removed task."""

    def mean(self, tasks: Sequence[str] = EVERY) -> float:
        return sum(self.scores[task] for task in tasks) / len(tasks)

    def mean_loss(self, tasks: Sequence[str] = EVERY) -> float:
        return sum(self.losses[task] for task in tasks) / len(tasks)


def merge_rows(found: Found, merged: Sequence[str], weight: float, refined: int) -> list[TableRow]:
    """The base, the tuned models, every merge, one of them refined, and the model trained on everything."""
    names = {
        "task-arithmetic": "task-arithmetic, weight 1",
        TUNED: f"task-arithmetic, tuned: {weight:g}",
        MATCHING: "gradient-matching, weight 1",
    }
    rows = [("base", "models/base"), *((f"tuned on {task}", f"models/{task}") for task in TASKS)]
    rows += [(names.get(name, name), f"merged/{name}") for name in merged]
    rows += [(f"the last, refined on {refined} images per task", REFINED), ("trained on all (target)", "models/joint")]
    return _rows(rows, found)


def removal_rows(found: Found, apart: Mapping[str, float]) -> list[TableRow]:
    """Before, after, and what it should be."""
    rows = [
        ("before", "models/joint"),
        ("negation", f"removed/{NEGATION}"),
        ("gradient matching", f"removed/{REMOVAL}"),
        ("influence steps", f"removed/{INFLUENCE}"),
        ("trained without it (target)", f"models/without-{REMOVED}"),
    ]
    return [dataclasses.replace(row, kl=apart[row.folder]) for row in _rows(rows, found)]


def _rows(rows: Sequence[tuple[str, str]], found: Found) -> list[TableRow]:
    return [TableRow(name, folder, found[folder]["accuracy"], found[folder]["loss"]) for name, folder in rows]


def merge_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells; accuracies in per cent, and the mean loss."""
    return ["model", *EVERY, "mean", "loss"], _cells(rows, EVERY, EVERY)


def removal_table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """The same, with the removed task first; the loss is that of the others, and KL the distance to the target."""
    cells = _cells(rows, (REMOVED, *REST), REST)
    apart = [f"{row.kl:.3f}" for row in rows]
    return ["model", REMOVED, *REST, "rest, mean", "rest, loss", "KL"], [
        [*line, kl] for line, kl in zip(cells, apart, strict=True)
    ]


def _cells(rows: Sequence[TableRow], tasks: Sequence[str], mean_of: Sequence[str]) -> list[list[str]]:
    return [
        [
            row.name,
            *(_percent(row.scores[task]) for task in tasks),
            _percent(row.mean(mean_of)),
            f"{row.mean_loss(mean_of):.3f}",
        ]
        for row in rows
    ]


def flatness(results: Mapping[str, Any]) -> list[str]:
    """How much each method depends on its weight, one sentence per method."""
    sentences = []
    for method, best in results["preview"].items():
        low, high = best["within_1_percent"]
        over = f"from {low:g} to {high:g}" if low < high else f"{low:g} alone"
        found = f"best at weight {best['weight']:g} with {_percent(best['mean_accuracy'])}"
        sentences.append(f"{method}: {found}; within 1 % of that at weights {over}.")
    return sentences


def rows_of(values: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """Rows as `results.json` has them."""
    return [TableRow(value["name"], value["folder"], value["scores"], value["losses"], value["kl"]) for value in values]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def page(results: Mapping[str, Any]) -> str:
    """`results.md`: both tables, and what is in the folder."""
    images = results["images"]
    return f"""# What gradmerge demo found

Accuracy in per cent on {images["test"]} test images per task, seed {results["seed"]}. The base, a small vision
transformer, was trained on {images["train"]} digits as they are (`{BASE}`), and tuned from there on the same digits
{", ".join(f"`{task}`" for task in TASKS)}. No test image, in whatever form, was trained on.

{markdown(*merge_table(rows_of(results["merging"])))}
Every method has its default options, and weight 1 where nothing else is said. The tuned weight of task arithmetic is
the best of the preview on {images["valid"]} validation images per task; the other rows have seen no labels but those of
the training images, and the refined one {images["refined"]} per task of these again. `slerp` takes two models only, and
`weighted-average` with equal weights is `average`. With `reduction: mean` nothing would change, as every task has the
same number of images.

## How much the weight matters

Mean accuracy on the validation images, one weight for all tasks (`preview/report.html` has the curves):

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
| `refined/` | the merge by gradient matching, refined, with a report |
| `preview/report.html` | accuracy over the weight, on validation images |
| `diagnose/report.html` | what the merge costs, in which layers, beside the jointly trained model |
| `commands.sh` | the commands that repeat each step; run them in this folder |
| `results.json` | the numbers above |
"""
