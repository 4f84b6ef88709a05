"""The two summary tables of docs/results.md: merges and removals of all experiments on one scale.

For merges, 0 % is the base model and 100 % is joint training. For removals, 0 % is the model before the removal and
100 % is the model that was retrained without the removed data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.common import removal_report
from experiments.common.tables import shown
from experiments.results_tables import demo_row, demo_runs, numbers, read
from experiments.sentiment import report as sentiment
from experiments.vision import report as vision

METHODS = (
    "average",
    "task arithmetic, weight 1",
    "task arithmetic, weight tuned",
    "TIES",
    "RegMean",
    "Iso-C",
    "Fisher averaging",
    "gradient matching, weight 1",
)
WAYS = {
    "negation": "negation",
    "gradient matching": "matching",
    "negation, tuned under H_0": "negation-theory",
    "gradient matching, tuned under H_0": "matching-theory",
    "influence steps": "influence-kronecker",
    "NPO": "npo",
}
"""Title of a removal method → its name in results.json."""
RETRAINED = "retrained with another seed"

Point = tuple[float, float]
"""Accuracy in percent and loss, both averaged over the test sets of the tasks."""
Points = Mapping[str, Sequence[Point]]
"""Method → its points, one per seed."""


def merging_table() -> str:
    experiments = {
        "demo: 4 kinds of digits, small ViT": _demo,
        "5 sentiment sets, MiniLM": _sentiment,
        "8 image sets, DeiT-tiny": _deit_tiny,
    }
    shares = {title: _shares(points()) for title, points in experiments.items()}
    return _table("of what joint training gains over the base, %", shares, METHODS, "accuracy")


def removal_table() -> str:
    shares = {
        "demo: tilted digits, small ViT": _demo_removal(),
        "toxic comments, GPT-2 from scratch": _removal("toxicity"),
        "swapped knowledge, small T5": _removal("hallucination"),
    }
    return _table("of the distance to the retrained model, removed, %", shares, (*WAYS, RETRAINED), "KL")


def _shares(points: Points) -> dict[str, list[Point]]:
    """The points of each method as shares of the way from the base to joint training, in percent."""

    def share(value: float, base: float, joint: float) -> float:
        return 100 * (value - base) / (joint - base)

    return {
        method: [
            (share(one[0], base[0], joint[0]), share(one[1], base[1], joint[1]))
            for one, base, joint in zip(points[method], points["base"], points["joint"], strict=True)
        ]
        for method in METHODS
        if method in points
    }


def _demo() -> Points:
    prefixes = {
        "base": "base",
        "joint": "trained on all",
        "average": "average",
        "task arithmetic, weight 1": "task-arithmetic, weight 1",
        "task arithmetic, weight tuned": "task-arithmetic, tuned",
        "TIES": "ties",
        "RegMean": "regmean",
        "Fisher averaging": "fisher-averaging",
        "gradient matching, weight 1": "gradient-matching, weight 1",
    }
    points = {}
    for method, prefix in prefixes.items():
        rows = [demo_row(run, prefix) for run in demo_runs()]
        points[method] = [(100 * row["mean"], row["mean_loss"]) for row in rows]
    return points


def _sentiment() -> Points:
    results = read("sentiment")
    seeds, weights = results["seeds"], results["settings"]["weights"]

    def averages(scores: Sequence[Any]) -> list[Point]:
        return [(sentiment.average(one), sentiment.average_loss(one)) for one in scores]

    # The average, RegMean and Fisher averaging merge the four fine-tuned models without the base, as elsewhere.
    names = {
        "base": "imdb",
        "joint": "all-data",
        "average": "average of four",
        "TIES": "ties",
        "RegMean": "regmean of four",
        "Fisher averaging": "fisher-averaging-mean of four",
        "gradient matching, weight 1": "gradient-matching-mean",
    }
    points = {method: averages([seed["scores"][name] for seed in seeds]) for method, name in names.items()}
    arithmetic = "task-arithmetic"
    tuned = [sentiment.best_weight(seed, weights, arithmetic, "dev") for seed in seeds]
    for title, chosen in (("weight 1", [1.0] * len(seeds)), ("weight tuned", tuned)):
        pairs = zip(seeds, chosen, strict=True)
        scores = [sentiment.at_weight(seed, weights, arithmetic, weight) for seed, weight in pairs]
        points[f"task arithmetic, {title}"] = averages(scores)
    return points


def _deit_tiny() -> Points:
    results = read("vision", "deit-tiny")
    seeds, weights = list(results["seeds"].values()), results["settings"]["weights"]

    def averages(scores: Sequence[Any]) -> list[Point]:
        return [(vision.over_tasks(one["test"]), vision.over_tasks(one["loss"])) for one in scores]

    points = {name: averages([seed["references"][name] for seed in seeds]) for name in ("base", "joint")}
    fisher = "fisher-averaging, mean, sampled labels"
    for method, name in (("average", "average"), ("RegMean", "regmean"), ("Fisher averaging", fisher)):
        points[method] = averages([seed["fixed"][name] for seed in seeds])
    matching = "gradient-matching, Fisher of the base, no penalty, sampled labels"
    curves = {
        "task arithmetic, weight 1": ("task-arithmetic", False),
        "task arithmetic, weight tuned": ("task-arithmetic", True),
        "TIES": ("ties", False),
        "Iso-C": ("iso-c", False),
        "gradient matching, weight 1": (matching, False),
    }
    for method, (name, tuned) in curves.items():
        scores = []
        for curve in (seed["curves"][name] for seed in seeds):
            index = vision.best(curve["validation"]) if tuned else weights.index(1.0)
            scores.append({part: vision.at(curve[part], index) for part in ("test", "loss")})
        points[method] = averages(scores)
    return points


def _demo_removal() -> Points:
    shares: dict[str, list[Point]] = {}
    for run in demo_runs():
        rows = {row["name"]: {"kl_forget": row["kl"], "forget": row["losses"]["tilted"]} for row in run["removal"]}
        for way in ("negation", "gradient matching", "influence steps"):
            closed = removal_report.closed(rows[way], rows["before"], rows["trained without it (target)"])
            shares.setdefault(way, []).append(closed)
    return shares


def _removal(folder: str) -> Points:
    results = read(folder)
    known = removal_report.ways_of(results)
    shares = {title: removal_report.both(results, name) for title, name in WAYS.items() if name in known}
    return {**shares, RETRAINED: removal_report.both(results, None)}


def _table(what: str, experiments: Mapping[str, Points], rows: Sequence[str], first: str) -> str:
    header = [what, *(cell for title in experiments for cell in (f"{title}: {first}", "loss"))]
    cells = []
    for row in rows:
        every = [points.get(row, ()) for points in experiments.values()]
        shares = [shown([point[part] for point in points], 0) if points else "" for points in every for part in (0, 1)]
        cells.append((row, *shares))
    return numbers(tuple(header), cells)


TABLES: dict[str, Callable[[], str]] = {"results-merging": merging_table, "results-removal": removal_table}
