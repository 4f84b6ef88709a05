"""Tables of the recovery experiment: shares of joint training's gain, time, and robustness."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.report import markdown, spread

Seed = Mapping[str, Any]
"""The contents of a JSON file: one seed of one workload."""
ROBUSTNESS = "robustness: "


def read_results(folder: Path) -> dict[str, list[Seed]]:
    """Return workload → its seeds."""
    workloads: dict[str, list[Seed]] = {}
    for path in sorted(folder.glob("*-*.json")):
        seed = json.loads(path.read_text("utf-8"))
        workloads.setdefault(seed["workload"], []).append(seed)
    return workloads


def shares(seed: Seed) -> dict[str, tuple[float, float]]:
    """Return name → percent of the gain from the base to joint training: of the tasks' mean, and mean over tasks."""
    metric, results = seed["metric"], seed["results"]
    base, joint = (_values(results[name], metric) for name in ("base", "joint training"))
    table = {}
    for name, result in results.items():
        values = _values(result, metric)
        if values.keys() != base.keys():
            continue
        gain = sum(joint.values()) - sum(base.values())
        of_mean = (sum(values.values()) - sum(base.values())) / gain if gain else float("nan")
        tasks = [(values[t] - base[t]) / (joint[t] - base[t]) for t in values if joint[t] != base[t]]
        table[name] = (100 * of_mean, 100 * sum(tasks) / len(tasks) if tasks else float("nan"))
    return table


def share_of(seeds: Sequence[Seed], name: str) -> str:
    """Return the share of the mean that a model keeps, over seeds; a dash if it was not measured."""
    values = [shares(seed)[name][0] for seed in seeds if name in seed["results"]]
    return f"{spread(values, 0)} %" if len(values) == len(seeds) else "–"


def _values(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {task: values[metric] for task, values in result["tasks"].items()}


def write_report(folder: Path) -> str:
    """Write ``results.md`` with tables of every workload, and return it."""
    parts = [
        "# Merge, calibrate, distill",
        "0 % is the base model and 100 % is joint training. Values are means ± standard deviations over seeds. The "
        "JSON files in this folder have the command, device and versions of each seed.",
    ]
    for workload, seeds in read_results(folder).items():
        count = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
        device = seeds[0]["device"].replace("cpu", "CPU")
        parts += [f"## {workload}", f"`{seeds[0]['command']}`: {count}, {device}.", _table(seeds)]
        if table := robustness_table(seeds):
            parts += ["What changes calibration (`--curvature none`):", table]
    text = "\n\n".join(parts) + "\n"
    (folder / "results.md").write_text(text, "utf-8")
    return text


def _common_names(seeds: Sequence[Seed]) -> list[str]:
    return [name for name in seeds[0]["results"] if all(name in seed["results"] for seed in seeds)]


def _table(seeds: Sequence[Seed]) -> str:
    metric, rows = seeds[0]["metric"], []
    for name in _common_names(seeds):
        if name.startswith(ROBUSTNESS):
            continue
        means, kept, times = [], [], []
        for seed in seeds:
            result = seed["results"][name]
            tasks = list(_values(result, metric).values())
            means.append(100 ** (metric == "accuracy") * sum(tasks) / len(tasks))
            kept.append(shares(seed).get(name, (math.nan, math.nan)))
            times.append(result.get("seconds", math.nan) / seed["results"]["joint training"]["seconds"])
        digits = 1 if metric == "accuracy" else 3
        of_mean, of_tasks = zip(*kept, strict=True)
        rows.append([name, _spread(means, digits), _spread(of_mean, 0), _spread(of_tasks, 0), _spread(times, 2)])
    header = ["", metric, "share of the mean, %", "mean of the tasks' shares, %", "time / joint training"]
    return markdown(header, rows)


def robustness_table(seeds: Sequence[Seed]) -> str:
    """Return how calibration depends on its rows, the merge before and the type; empty if this was not measured.

    A task is worse if it lost more than two paired standard errors.
    """
    metric = seeds[0]["metric"]
    unit = 100 if metric == "accuracy" else 1
    rows = []
    for name in _common_names(seeds):
        if not name.startswith(ROBUSTNESS):
            continue
        results = [seed["results"][name] for seed in seeds]
        gains = [gain for result in results for gain in result["gains over the start"].values()]
        worse = sum(gain < -2 * error for gain, error in gains)
        before = [shares(seed)[result["start"]][0] for seed, result in zip(seeds, results, strict=True)]
        after = [shares(seed)[name][0] for seed in seeds]
        worst = min(unit * gain for gain, _ in gains)
        rows.append([name.removeprefix(ROBUSTNESS), _spread(before, 0), _spread(after, 0), f"{worst:.2g}", str(worse)])
    header = [
        "variant",
        "merge before, %",
        "calibrated, %",
        f"worst change of a task, {metric}",
        "tasks that are worse",
    ]
    return markdown(header, rows) if rows else ""


def _spread(values: Sequence[float], digits: int) -> str:
    return "–" if any(map(math.isnan, values)) else spread([round(value, digits) + 0.0 for value in values], digits)
