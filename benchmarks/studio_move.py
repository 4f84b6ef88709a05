"""A move of a slider on the demo's models: from the new weights to numbers that are measured, in memory.

    gradmerge demo -o demo
    python -m benchmarks.studio_move --demo demo --json benchmarks/results/studio_move.json

The promise is half a second on two cores. Beside it, in the same run: a plain pass of one model over the same rows,
which no measurement can do without, and `gradmerge preview` of one setting, which reads models and data from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gradmerge as gm
from gradmerge.compare.settings import task_names
from gradmerge.studio.explorer import Explorer

LIMIT = 0.5
METHODS = ("gradient-matching", "task-arithmetic", "ties", "fisher-averaging", "dare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="the folder that `gradmerge demo` wrote")
    parser.add_argument("--moves", type=int, default=20, help="of each method")
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    with torch.no_grad():
        torch.ones(64, 64) @ torch.ones(64, 64)  # what is imported and started on first use
    recipe = options.demo / "recipes" / "gradient-matching.yml"
    names = {name: name for name in task_names(gm.load_recipe(recipe))} | {"base": "upright"}
    data = {name: f"{options.demo / 'data' / file}.npz:valid" for name, file in names.items()}
    explorer, opening = timed(lambda: Explorer(recipe, data, batch_size=64))
    with explorer:
        seconds: dict[str, list[float]] = {"plain pass": []}
        rows = sum(explorer.examples.values())
        explorer.measure(explorer.own)
        for move in range(options.moves):
            seconds["plain pass"].append(timed(lambda: plain_pass(explorer))[1])
            for method in METHODS:
                weights = {name: 0.3 + 0.01 * (move + place) for place, name in enumerate(explorer.models)}
                moved = timed(lambda m=method, w=weights: explorer.measure(explorer.setting(m, w)))[1]
                seconds.setdefault(method, []).append(moved)
                predicted = timed(lambda w=weights: explorer.predict(explorer.setting(None, w)))[1]
                seconds.setdefault("prediction", []).append(predicted)
    torch.set_num_threads(1)  # as an exploration of small models does
    one: dict[str, Any] = {"weights": "0.5", "data": data, "batch_size": 64, "progress": False}
    seconds["gradmerge preview"] = [timed(lambda: gm.preview(recipe, **one))[1] for _ in range(3)]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    slowest = max(METHODS, key=lambda method: medians[method])
    result = {
        "command": "python -m benchmarks.studio_move",
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
        "open_s": opening,
        "median_s": medians,
        "worst_s": {name: max(values) for name, values in seconds.items()},
        "slowest": slowest,
        "times_plain_pass": medians[slowest] / medians["plain pass"],
        "share_of_preview": medians[slowest] / medians["gradmerge preview"],
        "limit_s": LIMIT,
        "holds": medians[slowest] <= LIMIT,
    }
    for name, median in medians.items():
        print(f"{name:18} median {median:.3f} s, worst {max(seconds[name]):.3f} s")
    print(f"opening {opening:.2f} s; a move takes {result['times_plain_pass']:.2f} times a plain pass over {rows} rows")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begun


@torch.no_grad()
def plain_pass(explorer: Explorer) -> None:
    """The base over all rows, batch by batch, and nothing else."""
    with explorer.evaluator.fixed_threads():
        for task in explorer.tasks:
            data = explorer.evaluator.data[task]
            for batch in data.batches():
                data.loaded.model(**{name: value for name, value in batch.items() if name != "labels"})


if __name__ == "__main__":
    main()
