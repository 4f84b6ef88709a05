"""Tables and a figure, from results.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.figures import figure
from ..common.tables import markdown, shown
from .study import MERGE


def mean(scores: Mapping[str, Mapping[str, float]], what: str) -> float:
    """Over the tasks."""
    return fmean(one[what] for one in scores.values())


def share(seed: Mapping[str, Any], name: str, what: str) -> float:
    """The part of the distance from the merge to the jointly trained model that is gone, in per cent."""
    start, here, end = (mean(seed["scores"][each], what) for each in (MERGE, name, "joint"))
    return 100 * (here - start) / (end - start)


def rows_of(results: Mapping[str, Any]) -> list[str]:
    """Models that are shown: all but those of single tasks."""
    return [name for name in results["seeds"][0]["scores"] if name not in results["tasks"]]


def tables(results: Mapping[str, Any]) -> str:
    """results.md."""
    seeds = results["seeds"]
    columns = ["model", "accuracy, %", "loss", "share of the gap in loss, %", "seconds"]
    rows = []
    for name in rows_of(results):
        told = [seed["refinements"][name]["seconds"] for seed in seeds if name in seed["refinements"]]
        gone = shown([share(seed, name, "loss") for seed in seeds], 0) if name not in (MERGE, "joint") else ""
        accuracies = [100 * mean(seed["scores"][name], "accuracy") for seed in seeds]
        losses = [mean(seed["scores"][name], "loss") for seed in seeds]
        rows.append([name, shown(accuracies, 2), shown(losses, 4), gone, shown(told, 0) if told else ""])
    return f"""# Refinement with a few rows per task

`{results["command"]}`, on {results["machine"]["device"]}; {len(seeds)} seeds, mean ± standard deviation. Mean over the
test sets of {", ".join(results["tasks"])}.

{markdown(columns, rows)}
The merge that is refined is `{MERGE}` (averaged curvature, labels drawn from the model). The gap is that from it to
`joint`, which was trained on all rows of all tasks. A refinement is given so many labelled rows per task, a tenth of
which it holds back to judge by.

![Loss of every model](figures/losses.svg)
"""


def draw(results: Mapping[str, Any], folder: Path) -> None:
    names = rows_of(results)
    with figure(folder / "losses.svg", height=0.6 + 0.3 * len(names)) as axes:
        for place, name in enumerate(names):
            losses = [mean(seed["scores"][name], "loss") for seed in results["seeds"]]
            axes.plot(losses, [place] * len(losses), "o", color="#767676", markersize=4, markerfacecolor="white")
            axes.plot([fmean(losses)], [place], "|", color="#0072B2", markersize=14, markeredgewidth=2)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("mean test loss; each seed, and the mean of all")
