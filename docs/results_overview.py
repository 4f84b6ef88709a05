"""What merges keep of joint training, in one table and one figure, from the JSON of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.common.figures import figure
from experiments.common.tables import shown
from experiments.refinement import report as refinement
from experiments.sentiment import report as sentiment
from experiments.vision import report as vision

from .results_tables import demo_runs, numbers, read

FIGURE = Path(__file__).parent / "results" / "overview.svg"
REFINED, SAME_ROWS = "refined with labelled rows", "base tuned on the same rows"
#: The methods, from what needs nothing to what needs most.
METHODS = (
    "average",
    "task arithmetic, weight 1",
    "task arithmetic, weight tuned",
    "TIES",
    "RegMean",
    "Iso-C",
    "gradient matching, weight 1",
    REFINED,
    SAME_ROWS,
)
Point = tuple[float, float]
"""Accuracy, in per cent, and loss, both means over the tasks' test sets."""
Shares = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Case:
    """One experiment: every method's point on every seed, with those of its limits, ``base`` and ``joint``."""

    title: str
    points: Mapping[str, Sequence[Point]]

    def shares(self) -> dict[str, list[Point]]:
        """Of what joint training gains over the base, what each method has, in per cent of accuracy and of loss."""
        return {
            method: [
                (100 * (here[0] - low[0]) / (top[0] - low[0]), 100 * (here[1] - low[1]) / (top[1] - low[1]))
                for here, low, top in zip(self.points[method], self.points["base"], self.points["joint"], strict=True)
            ]
            for method in METHODS
            if method in self.points
        }


def cases() -> list[Case]:
    return [Case(title, dict(points())) for title, points in CASES.items()]


def _demo() -> Iterator[tuple[str, list[Point]]]:
    named = {
        "base": "base",
        "joint": "trained on all",
        "average": "average",
        "task arithmetic, weight 1": "task-arithmetic, weight 1",
        "task arithmetic, weight tuned": "task-arithmetic, tuned",
        "TIES": "ties",
        "RegMean": "regmean",
        "gradient matching, weight 1": "gradient-matching, weight 1",
        REFINED: "the last, refined",
    }
    for method, name in named.items():
        found = [next(one for one in run["merging"] if one["name"].startswith(name)) for run in demo_runs()]
        yield method, [(100 * one["mean"], one["mean_loss"]) for one in found]


def _sentiment() -> Iterator[tuple[str, list[Point]]]:
    results = read("sentiment")
    seeds, weights = results["seeds"], results["settings"]["weights"]

    def points(scores: Sequence[Any]) -> list[Point]:
        return [(sentiment.average(one), sentiment.average_loss(one)) for one in scores]

    named = {"base": "imdb", "joint": "all-data", "average": "average", "TIES": "ties", "RegMean": "regmean"}
    for method, name in {**named, "gradient matching, weight 1": "gradient-matching-mean"}.items():
        yield method, points([seed["scores"][name] for seed in seeds])
    arithmetic = "task-arithmetic"
    best = [sentiment.best_weight(seed, weights, arithmetic, "dev") for seed in seeds]
    for title, chosen in (("weight 1", [1.0] * len(seeds)), ("weight tuned", best)):
        at = [sentiment.at_weight(seed, weights, arithmetic, w) for seed, w in zip(seeds, chosen, strict=True)]
        yield f"task arithmetic, {title}", points(at)
    yield from _refined("text", "newton, 2048 rows", "base tuned on the same 2048 rows")


def _deit() -> Iterator[tuple[str, list[Point]]]:
    results = read("vision", "deit-tiny")
    seeds, weights = list(results["seeds"].values()), results["settings"]["weights"]

    def points(found: Sequence[Any]) -> list[Point]:
        return [(vision.over_tasks(one["test"]), vision.over_tasks(one["loss"])) for one in found]

    for name in ("base", "joint"):
        yield name, points([seed["references"][name] for seed in seeds])
    for method, name in (("average", "average"), ("RegMean", "regmean")):
        yield method, points([seed["fixed"][name] for seed in seeds])
    matching = "gradient-matching, Fisher of the base, no penalty, sampled labels"
    named = {
        "task arithmetic, weight 1": ("task-arithmetic", False),
        "task arithmetic, weight tuned": ("task-arithmetic", True),
        "TIES": ("ties", False),
        "Iso-C": ("iso-c", False),
        "gradient matching, weight 1": (matching, False),
    }
    for method, (name, tuned) in named.items():
        curves = [seed["curves"][name] for seed in seeds]
        places = [vision.best(curve["validation"]) if tuned else weights.index(1.0) for curve in curves]
        at = [
            {part: vision.at(curve[part], place) for part in ("test", "loss")}
            for curve, place in zip(curves, places, strict=True)
        ]
        yield method, points(at)
    yield from _refined("deit-tiny", "adamw, 1024 rows", "base tuned on the same 1024 rows")


def _refined(name: str, refined: str, same: str) -> Iterator[tuple[str, list[Point]]]:
    seeds = read("refinement", name)["seeds"]
    for method, model in ((REFINED, refined), (SAME_ROWS, same)):
        means = [[refinement.mean(seed["scores"][model], what) for what in ("accuracy", "loss")] for seed in seeds]
        yield method, [(100 * accuracy, loss) for accuracy, loss in means]


CASES: dict[str, Callable[[], Iterator[tuple[str, list[Point]]]]] = {
    "demo: 4 kinds of digits, small ViT, 200 rows": _demo,
    "5 sentiment sets, MiniLM, 2,048 rows": _sentiment,
    "8 image sets, DeiT-tiny, 1,024 rows": _deit,
}


def overview() -> str:
    """The table: shares of accuracy and loss."""
    found = [case.shares() for case in cases()]
    header = ["share of joint training's gain over the base, %"]
    for title in CASES:
        header += [f"{title}: accuracy", "loss"]
    rows = []
    for method in METHODS:
        row = [method]
        for shares in found:
            points = shares.get(method)
            row += ["", ""] if points is None else [shown([point[part] for point in points], 0) for part in (0, 1)]
        rows.append(tuple(row))
    return numbers(tuple(header), rows)


def draw(path: Path = FIGURE) -> None:
    with figure(path, 11.0, 3.6, panels=len(CASES)) as panels:
        for axes, case in zip(panels, cases(), strict=True):
            shares = case.shares()
            for place, method in enumerate(METHODS):
                if method not in shares:
                    continue
                for part, look in ((0, {"color": "#0072B2", "marker": "o"}), (1, {"color": "#D55E00", "marker": "D"})):
                    values = [point[part] for point in shares[method]]
                    axes.errorbar(
                        max(fmean(values), -20.0),
                        place + (part - 0.5) * 0.3,
                        xerr=stdev(values) if fmean(values) > -20 else 0,
                        markersize=5,
                        capsize=2,
                        linestyle="none",
                        **look,
                        label=("accuracy", "loss")[part] if place == 0 else None,
                    )
                    if fmean(values) < -20:
                        axes.annotate(f"← {fmean(values):.0f}", (-20, place), fontsize=8, va="center", xytext=(6, 0),
                                      textcoords="offset points") if part == 0 else None
            axes.axvline(0, color="#767676", linewidth=1)
            axes.axvline(100, color="#767676", linewidth=1)
            axes.set_xlim(-25, 115)
            axes.set_yticks(range(len(METHODS)), METHODS if axes is panels[0] else [])
            axes.set_ylim(len(METHODS) - 0.5, -0.5)
            axes.set_title(case.title, fontsize=10)
            axes.set_xlabel("0: base        100: joint training")
        panels[0].legend(loc="lower left", fontsize=8)


if __name__ == "__main__":
    draw()
