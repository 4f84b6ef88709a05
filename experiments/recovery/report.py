"""Tables of the recovery experiment: shares of joint training's gain, and time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def shares(found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return name → percent of the gain from the base to joint training: of the tasks' mean, and mean over tasks."""
    metric, results = found["metric"], found["results"]
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


def _values(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {task: values[metric] for task, values in result["tasks"].items()}


def write_report(folder: Path) -> str:
    """Write ``results.md`` with a table per workload, and return it."""
    files: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*-*.json")):
        found = json.loads(path.read_text("utf-8"))
        files.setdefault(found["workload"], []).append(found)
    lines = []
    for workload, seeds in files.items():
        metric = seeds[0]["metric"]
        lines += [f"## {workload}", "", *_table(seeds, metric), ""]
    text = "\n".join(lines)
    (folder / "results.md").write_text(text, "utf-8")
    return text


def _table(seeds: list[Any], metric: str) -> list[str]:
    names = [name for name in seeds[0]["results"] if all(name in seed["results"] for seed in seeds)]
    tables = [shares(seed) for seed in seeds]
    lines = [
        f"| | {metric} | share of the mean, % | mean of the tasks' shares, % | time / joint training |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in names:
        values, times, every = [], [], []
        for seed, table in zip(seeds, tables, strict=True):
            result = seed["results"][name]
            tasks = list(_values(result, metric).values())
            values.append(sum(tasks) / len(tasks))
            every.append(table.get(name, (float("nan"), float("nan"))))
            times.append(result.get("seconds", float("nan")) / seed["results"]["joint training"]["seconds"])
        scale = 100 if metric == "accuracy" else 1
        cells = [
            " / ".join(f"{scale * value:.{1 if scale > 1 else 3}f}" for value in values),
            " / ".join(_number(share, 0) for share, _ in every),
            " / ".join(_number(share, 0) for _, share in every),
            " / ".join(_number(ratio, 2) for ratio in times),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _number(value: float, digits: int) -> str:
    """Return a rounded number without a negative zero; a dash for none."""
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"
