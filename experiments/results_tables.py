"""Tables of the pages in results/, made from the JSON files in results/.

`python -m docs.pages` writes them into the pages. In the summary tables, for merges 0 % is the base model and 100 % is
joint training; for removals 0 % is the model before, and 100 % the model that was retrained without the removed data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.report import markdown, spread
from experiments.recovery.report import read_results, share_of
from experiments.removal import report as removal
from experiments.sentiment import report as sentiment
from experiments.vision import report as vision

RESULTS = Path(__file__).parent / "results"
#: Titles of the rows of the demo's table, by the beginning of their names: the weight that may follow differs.
DEMO = {
    "base": "base",
    "average": "average",
    "task-arithmetic, weight 1": "task arithmetic, weight 1",
    "task-arithmetic, tuned": "task arithmetic, weight tuned",
    "ties": "TIES",
    "regmean": "RegMean",
    "fisher-averaging": "Fisher averaging",
    "gradient-matching, weight 1": "gradient matching, weight 1",
    "trained on all": "joint",
}
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
#: Title of a removal method → its name in results.json.
WAYS = {
    "negation": "negation",
    "gradient matching": "matching",
    "negation, tuned under H_0": "negation-theory",
    "gradient matching, tuned under H_0": "matching-theory",
    "influence steps": "influence-kronecker",
    "NPO": "npo",
}
RETRAINED = "retrained with another seed"

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Method → accuracy in percent, or a share, and loss; one pair per seed."""


def read(*parts: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.joinpath(*parts, "results.json").read_text("utf-8"))
    return found


def demo_runs() -> list[dict[str, Any]]:
    """Return the demo's results of five seeds."""
    return [json.loads(file.read_text("utf-8")) for file in sorted((RESULTS / "demo").glob("seed-*.json"))]


def demo_points() -> Points:
    """Return accuracy and loss of the demo's merges."""
    points = {}
    for prefix, title in DEMO.items():
        rows = [next(row for row in run["merging"] if row["name"].startswith(prefix)) for run in demo_runs()]
        points[title] = [(100 * row["mean"], row["mean_loss"]) for row in rows]
    return points


def demo_table() -> str:
    rows = []
    for title, found in demo_points().items():
        accuracies, losses = zip(*found, strict=True)
        rows.append([title, f"{accuracies[0]:.1f}", spread(accuracies), spread(losses, 3)])
    return markdown(["", "seed 0", "five seeds", "loss, five seeds"], rows)


def _sentiment() -> Points:
    results = read("sentiment")

    def points(scores: Sequence[Any]) -> list[tuple[float, float]]:
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
    found = {method: points([seed["scores"][name] for seed in results["seeds"]]) for method, name in names.items()}
    for title, split in (("weight 1", None), ("weight tuned", "dev")):
        found[f"task arithmetic, {title}"] = points(sentiment.tuned_scores(results, "task-arithmetic", split))
    return found


def _deit_tiny() -> Points:
    results = read("vision", "deit-tiny")

    def points(scores: Sequence[Any]) -> list[tuple[float, float]]:
        return [(vision.over_tasks(one["test"]), vision.over_tasks(one["loss"])) for one in scores]

    found = {
        name: points([seed["references"][name] for seed in vision.seeds_of(results)]) for name in ("base", "joint")
    }
    names = {
        "average": "average",
        "RegMean": "regmean",
        "Fisher averaging": "fisher-averaging, mean, sampled labels",
        "task arithmetic, weight 1": "task-arithmetic",
        "TIES": "ties",
        "Iso-C": "iso-c",
        "gradient matching, weight 1": "gradient-matching, Fisher of the base, no penalty, sampled labels",
    }
    found |= {method: points(vision.points_of(results, name)) for method, name in names.items()}
    found["task arithmetic, weight tuned"] = points(vision.points_of(results, "task-arithmetic", tuned=True))
    return found


def _shares(points: Points) -> Points:
    """Return the points of each method as percentages of the way from the base to joint training."""
    ends = list(zip(points["base"], points["joint"], strict=True))
    return {
        method: [
            (100 * (a - base[0]) / (joint[0] - base[0]), 100 * (loss - base[1]) / (joint[1] - base[1]))
            for (a, loss), (base, joint) in zip(points[method], ends, strict=True)
        ]
        for method in METHODS
        if method in points
    }


def merging_shares() -> dict[str, Points]:
    """Return experiment → method → shares of joint training's gain in accuracy and in loss."""
    experiments = {
        "demo: 4 kinds of digits, small ViT": demo_points(),
        "5 sentiment sets, MiniLM": _sentiment(),
        "8 image sets, DeiT-tiny": _deit_tiny(),
    }
    return {title: _shares(points) for title, points in experiments.items()}


def merging_summary() -> str:
    return _summary("of what joint training gains over the base, %", merging_shares(), METHODS, "accuracy")


def _demo_removal() -> Points:
    shares: dict[str, list[tuple[float, float]]] = {}
    for run in demo_runs():
        rows = {row["name"]: {"kl_forget": row["kl"], "forget": row["losses"]["tilted"]} for row in run["removal"]}
        for way in ("negation", "gradient matching", "influence steps"):
            found = removal.removed(rows[way], rows["before"], rows["trained without it (target)"])
            shares.setdefault(way, []).append(found)
    return shares


def _removal(task: str) -> Points:
    results = read("removal", task)
    ways = {title: removal.shares(results, name) for title, name in WAYS.items() if name in removal.ways_of(results)}
    return {**ways, RETRAINED: removal.shares(results, None)}


def removal_shares() -> dict[str, Points]:
    """Return experiment → method → shares of the distance to the retrained model, in KL and in loss."""
    return {
        "demo: tilted digits, small ViT": _demo_removal(),
        "toxic comments, GPT-2 from scratch": _removal("toxicity"),
        "swapped knowledge, small T5": _removal("hallucination"),
    }


def removal_summary() -> str:
    what = "of the distance to the retrained model, removed, %"
    return _summary(what, removal_shares(), (*WAYS, RETRAINED), "KL")


def _summary(what: str, experiments: Mapping[str, Points], rows: Sequence[str], first: str) -> str:
    header = [what, *(cell for title in experiments for cell in (f"{title}: {first}", "loss"))]
    cells = []
    for row in rows:
        every = [points.get(row, ()) for points in experiments.values()]
        parts = [spread([point[part] for point in points], 0) if points else "" for points in every for part in (0, 1)]
        cells.append([row, *parts])
    return markdown(header, cells)


#: Step of the recovery experiment → its name in the JSON files.
RECOVERY_STEPS = {
    "average": "average",
    "task arithmetic, weight chosen on validation rows": "task arithmetic, weight chosen on validation rows",
    "TIES": "ties",
    "Fisher averaging": "fisher-averaging",
    "RegMean": "regmean",
    "Iso-C": "iso-c",
    "TSV": "tsv",
    "gradient matching": "gradient-matching",
    "`calibrate --curvature none`": "calibrate --curvature none",
    "`calibrate`": "calibrate",
    "`distill` without calibration": "distill",
    "`calibrate --curvature none`, then `distill`": "calibrate --curvature none, distill",
    "each fine-tuned model on its own task": "fine-tuned, each on its own task",
}
#: Workload of the recovery experiment → its title.
RECOVERY_WORKLOADS = {
    "language-model": "SmolLM2-135M, five tasks: loss",
    "sentiment": "MPNet, five sentiment sets: accuracy",
    "sentiment-small": "MiniLM, five sentiment sets, CPU scale: accuracy",
    "images-small": "DeiT-tiny, eight image sets, CPU scale: accuracy",
}


def recovery_table() -> str:
    """Return how much of joint training's gain merges, calibration and distillation keep."""
    results = read_results(RESULTS / "recovery")
    header = [f"{title}, {_seeds(len(results[name]))}" for name, title in RECOVERY_WORKLOADS.items()]
    rows = [
        [title, *(share_of(results[workload], step) for workload in RECOVERY_WORKLOADS)]
        for title, step in RECOVERY_STEPS.items()
    ]
    return markdown(["of joint training's gain", *header], rows)


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _of(table: Callable[..., str], *parts: str, **options: Any) -> Callable[[], str]:
    """Return a function that reads results and makes a table of them."""
    return lambda: table(read(*parts), **options)


#: What a page may ask for, by the name that it uses.
TABLES: dict[str, Callable[[], str]] = {
    "results-recovery": recovery_table,
    "results-merging": merging_summary,
    "results-removal": removal_summary,
    "results-demo": demo_table,
    "results-sentiment": _of(sentiment.merging_table, "sentiment"),
}
