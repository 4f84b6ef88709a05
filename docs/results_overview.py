"""Merges and removals between their limits, in two tables and one figure, from the JSON of the runs.

`python -m docs.results_overview` draws the figure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.tables import RESULTS as BENCHMARKS
from experiments.common import removal_report
from experiments.common.figures import figure
from experiments.common.tables import shown
from experiments.refinement import report as refinement
from experiments.sentiment import report as sentiment
from experiments.vision import report as vision

from .results_tables import demo_runs, numbers, read, refined_seeds

FIGURE = Path(__file__).parent / "results" / "overview.svg"
REFINED, SAME_ROWS = "refined with labelled rows", "base tuned on the same rows"
TAUGHT, SAME_TAUGHT = "refined, taught by the tasks' models", "base taught on the same rows"
#: The methods, from what needs nothing to what needs most.
METHODS = (
    "average",
    "task arithmetic, weight 1",
    "task arithmetic, weight tuned",
    "TIES",
    "RegMean",
    "Iso-C",
    "Fisher averaging",
    "gradient matching, weight 1",
    REFINED,
    TAUGHT,
    SAME_ROWS,
    SAME_TAUGHT,
)
INFLUENCE, FLOOR = "influence steps", "retrained with another seed"
#: Ways of removal, and what they are called in JSON.
WAYS = {
    "negation": "negation",
    "gradient matching": "matching",
    "negation, tuned under H_0": "negation-theory",
    "gradient matching, tuned under H_0": "matching-theory",
    INFLUENCE: "influence-kronecker",
    "NPO": "npo",
}
#: Where the figure begins and ends, in per cent.
LEFT, RIGHT = -25.0, 130.0
Point = tuple[float, float]
"""Accuracy, in per cent, and loss, both means over the tasks' test sets; or two shares."""
Found = Mapping[str, Mapping[str, Sequence[Point]]]
"""Experiment → method → shares, seed by seed."""


@dataclass(frozen=True)
class Case:
    """One experiment: every method's point on every seed, with those of its limits, ``base`` and ``joint``.

    Methods may be of models that were trained anew, with limits of their own, ``base, METHOD`` and ``joint, METHOD``.
    """

    title: str
    points: Mapping[str, Sequence[Point]]

    def shares(self) -> dict[str, list[Point]]:
        """Of what joint training gains over the base, what each method has, in per cent of accuracy and of loss."""
        found = {}
        for method in (name for name in METHODS if name in self.points):
            limits = (self.points.get(f"{limit}, {method}", self.points[limit]) for limit in ("base", "joint"))
            found[method] = [
                (100 * (here[0] - low[0]) / (top[0] - low[0]), 100 * (here[1] - low[1]) / (top[1] - low[1]))
                for here, low, top in zip(self.points[method], *limits, strict=True)
            ]
        return found


def cases() -> list[Case]:
    return [Case(title, dict(points())) for title, points in CASES.items()]


def _demo() -> Iterator[tuple[str, Sequence[Point]]]:
    named = {
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
    for method, name in named.items():
        found = [next(one for one in run["merging"] if one["name"].startswith(name)) for run in demo_runs()]
        yield method, [(100 * one["mean"], one["mean_loss"]) for one in found]
    every = json.loads((BENCHMARKS / "teachers.json").read_text("utf-8"))["cases"]
    for method, name in (
        (REFINED, "newton, 200 rows, teaching 0"),
        (TAUGHT, "newton, 200 rows, teaching 0.5"),
        (SAME_ROWS, "base, newton, 200 rows, teaching 0"),
        (SAME_TAUGHT, "base, newton, 200 rows, teaching 0.5"),
    ):
        found = [every[f"demo, seed {run['seed']}"][name] for run in demo_runs()]
        yield method, [(100 * one["accuracy"], one["loss"]) for one in found]


def _sentiment() -> Iterator[tuple[str, Sequence[Point]]]:
    results = read("sentiment")
    seeds, weights = results["seeds"], results["settings"]["weights"]

    def points(scores: Sequence[Any]) -> list[Point]:
        return [(sentiment.average(one), sentiment.average_loss(one)) for one in scores]

    # Of the tuned models alone, as in the other experiments: with the base among them all three are worse.
    named = {
        "base": "imdb",
        "joint": "all-data",
        "average": "average of four",
        "TIES": "ties",
        "RegMean": "regmean of four",
        "Fisher averaging": "fisher-averaging-mean of four",
        "gradient matching, weight 1": "gradient-matching-mean",
    }
    for method, name in named.items():
        yield method, points([seed["scores"][name] for seed in seeds])
    arithmetic = "task-arithmetic"
    best = [sentiment.best_weight(seed, weights, arithmetic, "dev") for seed in seeds]
    for title, chosen in (("weight 1", [1.0] * len(seeds)), ("weight tuned", best)):
        at = [sentiment.at_weight(seed, weights, arithmetic, w) for seed, w in zip(seeds, chosen, strict=True)]
        yield f"task arithmetic, {title}", points(at)
    yield from _refined("text", "newton", "2048 rows")


def _deit() -> Iterator[tuple[str, Sequence[Point]]]:
    results = read("vision", "deit-tiny")
    seeds, weights = list(results["seeds"].values()), results["settings"]["weights"]

    def points(found: Sequence[Any]) -> list[Point]:
        return [(vision.over_tasks(one["test"]), vision.over_tasks(one["loss"])) for one in found]

    for name in ("base", "joint"):
        yield name, points([seed["references"][name] for seed in seeds])
    fisher = "fisher-averaging, mean, sampled labels"
    for method, name in (("average", "average"), ("RegMean", "regmean"), ("Fisher averaging", fisher)):
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
    yield from _refined("deit-tiny", "adamw", "1024 rows")


def _refined(name: str, by_labels: str, rows: str) -> Iterator[tuple[str, list[Point]]]:
    """Refinements and their controls, each with the limits of the run that it is of."""
    models = {
        REFINED: f"{by_labels}, {rows}",
        TAUGHT: f"adamw, taught, {rows}",
        SAME_ROWS: f"base tuned on the same {rows}",
        SAME_TAUGHT: f"base taught on the same {rows}",
    }
    for method, model in models.items():
        every = [seed["scores"] for seed in refined_seeds(name, model)]
        for title, own in ((method, model), (f"base, {method}", "base"), (f"joint, {method}", "joint")):
            means = [[refinement.mean(scores[own], what) for what in ("accuracy", "loss")] for scores in every]
            yield title, [(100 * accuracy, loss) for accuracy, loss in means]


CASES: dict[str, Callable[[], Iterator[tuple[str, Sequence[Point]]]]] = {
    "demo: 4 kinds of digits, small ViT": _demo,
    "5 sentiment sets, MiniLM": _sentiment,
    "8 image sets, DeiT-tiny": _deit,
}
DIGITS = "demo: tilted digits, small ViT"
REMOVALS = {"toxic comments, GPT-2 from scratch": "toxicity", "swapped knowledge, small T5": "hallucination"}


def removals() -> Found:
    """What is gone of KL to the retrained model, and of the gap in loss to it, both on what is removed, in per cent."""
    demo: dict[str, list[Point]] = {}
    for run in demo_runs():
        found = {one["name"]: {"kl_forget": one["kl"], "forget": one["losses"]["tilted"]} for one in run["removal"]}
        before, target = found["before"], found["trained without it (target)"]
        for way in ("negation", "gradient matching", INFLUENCE):
            demo.setdefault(way, []).append(removal_report.closed(found[way], before, target))
    every = {DIGITS: demo}
    for title, folder in REMOVALS.items():
        results = read(folder)
        known, own = removal_report.ways_of(results), every.setdefault(title, {})
        own |= {way: removal_report.both(results, name) for way, name in WAYS.items() if name in known}
        own[FLOOR] = removal_report.both(results, None)
    return every


def merging_table() -> str:
    found = {case.title: case.shares() for case in cases()}
    return _table("of what joint training gains over the base, %", found, METHODS, "accuracy")


def removal_table() -> str:
    found = removals()
    return _table("of the distance to the retrained model, gone, %", found, (*_known(found), FLOOR), "KL")


def _table(what: str, found: Found, rows: Sequence[str], first: str) -> str:
    header = [what, *(cell for title in found for cell in (f"{title}: {first}", "loss"))]
    cells = []
    for row in rows:
        every = [own.get(row, ()) for own in found.values()]
        shares = [shown([point[part] for point in points], 0) if points else "" for points in every for part in (0, 1)]
        cells.append((row, *shares))
    return numbers(tuple(header), cells)


def _known(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The ways that some experiment has."""
    return tuple(way for way in WAYS if any(way in own for own in found.values()))


def draw(path: Path = FIGURE) -> None:
    """Merges above, removals below; 0 is the model that it starts from, 100 the one that is wanted."""
    gone = removals()
    with figure(path, 11.0, 6.0, panels=3, rows=2) as panels:
        merged = {case.title: case.shares() for case in cases()}
        _fill(panels[:3], merged, METHODS, "accuracy", ("base", "joint training"))
        _fill(panels[3:], gone, _known(gone), "KL to the retrained model", ("before", "retrained"))


def _fill(panels: Sequence[Any], found: Found, rows: Sequence[str], first: str, limits: tuple[str, str]) -> None:
    looks: list[dict[str, Any]] = [{"color": "#0072B2", "marker": "o"}, {"color": "#D55E00", "marker": "D"}]
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for axes, (title, own) in zip(panels, found.items(), strict=False):
        for row, points in own.items():
            for part, look in enumerate(looks):
                values = [point[part] for point in points]
                if row != FLOOR:
                    _mark(axes, rows.index(row) + (part - 0.5) * 0.3, values, **look)
                elif part == 0:
                    axes.axvline(fmean(values), color=look["color"], linestyle=":", linewidth=1.5)
                    axes.text(fmean(values) + 3, 0.5, "another seed", fontsize=8, va="center", color=look["color"])
        for limit in (0, 100):
            axes.axvline(limit, color="#767676", linewidth=1)
        axes.set_xlim(LEFT - 3, RIGHT)
        axes.set_yticks(range(len(rows)), rows if axes is panels[0] else [])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"0: {limits[0]}, 100: {limits[1]}")
    for name, look in zip((first, "loss"), looks, strict=True):
        panels[0].plot([], [], linestyle="none", label=name, **look)
    panels[0].legend(fontsize=8, loc="lower left")


def _mark(axes: Any, place: float, values: Sequence[float], **look: Any) -> None:
    """Mean ± standard deviation; a mean that lies far to the left is named at the edge."""
    mean = fmean(values)
    if mean < LEFT:
        axes.annotate(f"← {mean:.0f}", (LEFT, place), fontsize=7, va="center", color=look["color"])
    else:
        axes.errorbar(mean, place, xerr=stdev(values), markersize=5, capsize=2, linestyle="none", **look)


if __name__ == "__main__":
    draw()
