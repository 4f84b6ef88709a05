"""Tables and a figure, from results.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.figures import figure
from ..common.tables import markdown, shown
from .study import JUDGING, MERGE

#: Of the rows that refinements are judged by, in earlier runs and now.
SEEN = "; all are among the rows that the task's own model was tuned on"
UNSEEN = ", which no model has seen; the others are among those that the task's own model was tuned on"


def mean(scores: Mapping[str, Mapping[str, float]], what: str) -> float:
    """Over the tasks."""
    return fmean(one[what] for one in scores.values())


def share(seed: Mapping[str, Any], name: str, what: str) -> float:
    """The part of the distance from the merge to the jointly trained model that is gone, in per cent.

    NaN where there is no distance.
    """
    start, here, end = (mean(seed["scores"][each], what) for each in (refined(seed), name, "joint"))
    return 100 * (here - start) / (end - start) if end != start else math.nan


def refined(seed: Mapping[str, Any]) -> str:
    """The merge that is refined."""
    return str(seed.get("refined", MERGE))


def rows_of(results: Mapping[str, Any]) -> list[str]:
    """Models that are shown: all but those of single tasks. One that some seeds lack is among them."""
    seeds = sorted(results["seeds"], key=lambda seed: -len(seed["scores"]))
    names = dict.fromkeys(name for seed in seeds for name in seed["scores"])
    return [name for name in names if name not in results["tasks"]]


def tables(results: Mapping[str, Any]) -> str:
    """results.md."""
    every = results["seeds"]
    start = refined(every[0])
    columns = ["model", "accuracy, %", "loss", "share of the gap in accuracy, %", "in loss, %", "seconds"]
    rows = []
    for name in rows_of(results):
        seeds = having(results, name)
        accuracies = [100 * mean(seed["scores"][name], "accuracy") for seed in seeds]
        losses = [mean(seed["scores"][name], "loss") for seed in seeds]
        gone = [shown([share(seed, name, what) for seed in seeds], 0) for what in ("accuracy", "loss")]
        seconds = [seed["refinements"][name]["seconds"] for seed in seeds if name in seed["refinements"]]
        rows.append(
            [
                name + (f" ({len(seeds)} of {len(every)} seeds)" if len(seeds) < len(every) else ""),
                shown(accuracies, 2),
                shown(losses, 4),
                *(gone if name not in (start, "joint") else ("", "")),
                " to ".join(dict.fromkeys(f"{one(seconds):.0f}" for one in (min, max))) if seconds else "",
            ]
        )
    judges = UNSEEN if results.get("judged_by_unseen") else SEEN
    return f"""# Refinement with a few rows per task

`{results["command"]}`, on {results["machine"]["device"]}.

{len(every)} seeds, mean ± standard deviation. Mean over the test sets of {", ".join(results["tasks"])}.

{markdown(columns, rows)}
The merge that is refined is `{start}` (averaged curvature, labels drawn from the model). The gap is that from it to
`joint`, which was trained on all rows of all tasks. A refinement is given so many labelled rows per task, a tenth of
which, or {JUDGING} beside all, it is judged by{judges}.
Taught: the answers of the task's own model count as half of a row's loss, and its label as the other. Seconds are the
least and the most over the seeds, which may have shared the device with each other and with more.

![Loss and accuracy of every model](figures/scores.svg)

Circles are the seeds, lines their means.
"""


def having(results: Mapping[str, Any], name: str) -> list[Any]:
    """The seeds that have a model."""
    return [seed for seed in results["seeds"] if name in seed["scores"]]


def draw(results: Mapping[str, Any], folder: Path) -> None:
    names = rows_of(results)
    panels = (("loss", 1, "test loss"), ("accuracy", 100, "test accuracy, %"))
    with figure(folder / "scores.svg", 9.0, 0.8 + 0.3 * len(names), panels=len(panels)) as every:
        for axes, (what, times, label) in zip(every, panels, strict=True):
            for place, name in enumerate(names):
                values = [times * mean(seed["scores"][name], what) for seed in having(results, name)]
                axes.plot(values, [place] * len(values), "o", color="#767676", markersize=4, markerfacecolor="white")
                axes.plot([fmean(values)], [place], "|", color="#0072B2", markersize=14, markeredgewidth=2)
            axes.set_yticks(range(len(names)), names if axes is every[0] else [])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlabel(label)
