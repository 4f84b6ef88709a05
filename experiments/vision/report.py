"""Tables and figures of the vision experiment, with the paper's curve next to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.report import STYLES, Report, Results, band, figure, markdown, spread

Curve = Mapping[str, Sequence[float]]
"""Task → accuracy at each weight."""

MAIN = ("task-arithmetic", "gradient-matching")
#: Figure fig:scaling of the paper, left panel: CLIP ViT-B/32, accuracy averaged over eight test sets.
PAPER_WEIGHTS = tuple(n / 10 for n in range(11))
PAPER = {
    "task-arithmetic": (46.1, 59.4, 65.2, 65.9, 60.8, 52.8, 44.4, 38.6, 34.2, 30.3, 26.5),
    "gradient-matching": (46.1, 58.7, 64.2, 65.3, 66.1, 66.4, 66.2, 65.4, 64.4, 63.6, 62.6),
}
#: Name in results.json → name in tables.
NAMES = {
    "average": "average",
    "fisher-averaging, mean": "Fisher averaging",
    "fisher-averaging, mean, sampled labels": "Fisher averaging, drawn labels",
    "regmean": "RegMean",
    "ties": "TIES",
    "tsv": "TSV",
    "iso-c": "Iso-C",
    "task-arithmetic": "task arithmetic",
    "gradient-matching": "gradient matching, H_0 = c · I",
    "gradient-matching, sampled labels": "gradient matching, H_0 = c · I, drawn labels",
    "gradient-matching, 0.01 · c": "gradient matching, H_0 = 0.01 · c · I",
    "gradient-matching, 0.1 · c": "gradient matching, H_0 = 0.1 · c · I",
    "gradient-matching, 10 · c": "gradient matching, H_0 = 10 · c · I",
    "gradient-matching, 100 · c": "gradient matching, H_0 = 100 · c · I",
    "gradient-matching, Fisher of the base": "gradient matching, H_0 = the base's Fisher",
    "gradient-matching, Fisher of the base, sampled labels": "gradient matching, H_0 = F_0, drawn labels",
    "gradient-matching, Fisher of the base, no penalty": "gradient matching, H_0 = F_0, `penalty: none`",
    "gradient-matching, Fisher of the base, no penalty, sampled labels": "gradient matching, H_0 = F_0, drawn labels, "
    "`penalty: none`",
}


def seeds_of(results: Results) -> list[Any]:
    """Return the results of every seed; earlier versions wrote them as a mapping."""
    seeds = results["seeds"]
    return list(seeds.values()) if isinstance(seeds, Mapping) else list(seeds)


def over_tasks(point: Mapping[str, float]) -> float:
    """Return the mean over the tasks, as in the paper's figure."""
    return fmean(point.values())


def mean_curve(curve: Curve) -> list[float]:
    """Return the mean over tasks at each weight."""
    return [fmean(column) for column in zip(*curve.values(), strict=True)]


def best(curve: Curve) -> int:
    """Return the index of the weight with the highest mean accuracy, of the smallest if several are as good."""
    means = mean_curve(curve)
    return max(range(len(means)), key=lambda index: (means[index], -index))


def at(curve: Mapping[str, Curve], index: int) -> dict[str, dict[str, float]]:
    """Return every part of a curve at one weight: accuracy by split, and loss, by task."""
    return {part: {task: values[index] for task, values in one.items()} for part, one in curve.items()}


def points_of(results: Results, name: str, tuned: bool = False) -> list[Any]:
    """Return every seed's accuracies of a merge: at weight 1, or ``tuned`` on validation rows."""
    seeds, weights = seeds_of(results), results["settings"]["weights"]
    if name in seeds[0]["fixed"]:
        return [seed["fixed"][name] for seed in seeds]
    curves = [seed["curves"][name] for seed in seeds]
    return [at(curve, best(curve["validation"]) if tuned else weights.index(1.0)) for curve in curves]


def merging_table(results: Results) -> str:
    """Return the mean accuracy, and where it was measured the loss, of references and merges."""
    seeds = seeds_of(results)
    with_loss = "loss" in seeds[0]["references"]["base"]

    def cells(found: Sequence[Any]) -> list[str]:
        accuracy = spread([over_tasks(one["test"]) for one in found])
        return [accuracy, spread([over_tasks(one["loss"]) for one in found], 3)] if with_loss else [accuracy]

    empty = [""] * (1 + with_loss)
    limits = {"base": "base", "individual": "each task's own model", "joint": "trained on all tasks"}
    rows = [[title, *cells([s["references"][name] for s in seeds]), *empty] for name, title in limits.items()]
    for name, title in NAMES.items():
        if name in seeds[0]["fixed"]:
            rows.append([title, *cells(points_of(results, name)), *empty])
        elif name in seeds[0]["curves"]:
            rows.append([title, *cells(points_of(results, name)), *cells(points_of(results, name, tuned=True))])
    loss = ["loss"] * with_loss
    tuned = "at the weight tuned on validation rows"
    return markdown(["mean of the test sets", "as it is, or at weight 1", *loss, tuned, *loss], rows)


def by_task_table(results: Results) -> str:
    """Return the accuracy on every test set, at the weights tuned on validation rows."""
    seeds, tasks = seeds_of(results), results["settings"]["tasks"]
    found = {name: [s["references"][name] for s in seeds] for name in ("base", "individual", "joint")}
    kept = [name for name in NAMES if name in seeds[0]["fixed"] or name in seeds[0]["curves"]]
    found |= {NAMES[name]: points_of(results, name, tuned=True) for name in kept}
    rows = [[name, *(spread([p["test"][task] for p in points]) for task in tasks)] for name, points in found.items()]
    return markdown(["accuracy, %", *tasks], rows)


def weights_table(results: Results) -> str:
    """Return the accuracy over the weight of all tasks, ours and the paper's."""
    rows = []
    for index, weight in enumerate(results["settings"]["weights"]):
        known = weight in PAPER_WEIGHTS
        cells = [spread([mean_curve(s["curves"][m]["test"])[index] for s in seeds_of(results)]) for m in MAIN]
        cells += [f"{PAPER[m][PAPER_WEIGHTS.index(weight)]}" if known else "" for m in MAIN]
        rows.append([f"{weight:g}", *cells])
    names = [str(STYLES[method]["label"]) for method in MAIN]
    return markdown(["weight", *names, *(f"paper: {name}" for name in names)], rows)


def draw_scaling(results: Results, path: Path) -> None:
    """Draw accuracy over the weight of all tasks, in the paper and here."""
    seeds, weights = seeds_of(results), results["settings"]["weights"]
    with figure(path, 8.4, 3.4, panels=2) as (left, right):
        for name in MAIN:
            band(left, PAPER_WEIGHTS, [PAPER[name]], **STYLES[name])
            band(right, weights, [mean_curve(s["curves"][name]["test"]) for s in seeds], **STYLES[name])
        left.set_title("in the paper: CLIP ViT-B/32", loc="left", fontsize=10)
        right.set_title(f"here: {results.get('model') or 'pre-trained here'}", loc="left", fontsize=10)
        base = fmean(over_tasks(s["references"]["base"]["test"]) for s in seeds)
        for axes, height in ((left, PAPER["task-arithmetic"][0]), (right, base)):
            axes.axhline(height, color="#767676", linestyle="--", linewidth=1, label="base alone", zorder=1)
            axes.set_xlabel("weight of every task")
        left.set_ylabel("accuracy in %, mean of 8 test sets")
        right.legend(loc="best")


def draw_priors(results: Results, path: Path) -> None:
    """Draw accuracy over the weight for every H_0."""
    seeds, weights = seeds_of(results), results["settings"]["weights"]
    names = [name for name in NAMES if name in seeds[0]["curves"] and name.startswith(MAIN) and "sampled" not in name]
    with figure(path, 7.6, 3.8) as axes:
        for name in names:
            runs = [mean_curve(s["curves"][name]["test"]) for s in seeds]
            label = NAMES[name].removeprefix("gradient matching, ").replace("`", "")
            style = STYLES[name] | {"label": label} if name in STYLES else {"label": label}
            axes.plot(weights, [fmean(column) for column in zip(*runs, strict=True)], linewidth=1.6, **style)
        axes.set_xlabel("weight of every task")
        axes.set_ylabel("accuracy in %, mean of 8 test sets")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


REPORT = Report(
    "Eight image tasks merged into a vision transformer",
    "Accuracies are percentages on test sets. Curvature is the mean of squared gradients of single examples, at the "
    "data's labels or at labels drawn from the model. c is the mean entry of the tasks' curvature, which is not tuned. "
    "Tuned weights are the best on validation rows that no model was trained on. Data, model and size differ from the "
    "paper's: compare the shapes of the curves, not their heights.",
    {
        "Merged models": merging_table,
        "Every test set, at tuned weights": by_task_table,
        "Over the weight": weights_table,
    },
    {"scaling": draw_scaling, "prior": draw_priors},
)
