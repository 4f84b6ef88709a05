"""Whether predicted loss ranks merges as true loss does, on fine-tuned encoders.

    python -m benchmarks.ranking --encoder MODEL --data DIR --json benchmarks/results/ranking.json

fine-tunes models and estimates curvature as benchmarks.precision does, forms merges of four methods at several weights
in memory, and compares per task the predicted excess loss with the loss and the accuracy on test data, by Spearman's ρ.
"""

from __future__ import annotations

import argparse
from typing import Any

from scipy.stats import spearmanr

from gradmerge.compare.candidates import derive_plan
from gradmerge.compare.evaluate import TaskData, merge_in_memory
from gradmerge.compare.predict import open_for_prediction, predict
from gradmerge.compare.settings import Setting, make_setting, recipe_with, weight_keys
from gradmerge.recipe import Recipe, make_recipe
from gradmerge.tasks import load_task
from gradmerge.tasks.models import model_with

from .precision import circumstances, fine_tune_all, measure_all, parse, rows_of
from .timing import text_table, write_report

METHODS = ("gradient-matching", "task-arithmetic", "ties", "fisher-averaging", "average")
WEIGHTS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)


def main() -> None:
    args = parse(__doc__)
    names = args.tasks.split(",")
    fine_tune_all(args, names)
    measure_all(args, names)
    rows = measure_merges(args, names)
    found = {"spearman": correlations(rows, names[1:]), "best_weight": best_weights(rows, names[1:])}
    write_report(args.json, **circumstances(args, names), merges=len(rows), **found, rows=rows)
    lines = [[task, f"{values['loss']:+.2f}", f"{values['error']:+.2f}"] for task, values in found["spearman"].items()]
    print(text_table(["Spearman's ρ", "predicted and true loss", "predicted loss and true error"], lines))


def measure_merges(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Predicted excess loss, true loss and accuracy of every merge on every task."""
    recipe = make_recipe(
        {
            "method": "gradient-matching",
            "base": {"model": f"./{names[0]}", "curvature": f"./{names[0]}-curvature/float32"},
            "models": [{"model": f"./{n}", "curvature": f"./{n}-curvature/float32"} for n in names[1:]],
        },
        folder=args.work.absolute(),
    )
    tasks = names[1:]
    settings = [merge(recipe, method, weight) for method in METHODS for weight in WEIGHTS if _matters(method, weight)]
    plan = open_for_prediction(recipe)
    try:
        candidates = {setting.name: derive_plan(plan, recipe_with(recipe, setting)) for setting in settings}
        prediction = predict(plan, tasks, candidates)
        given = {"limit": args.limit, "batch_size": 64, "max_length": 256, "device": args.device}
        loaded = {name: load_task(str(args.work / name), rows_of(args, name, "test"), **given) for name in tasks}
        data = {name: TaskData(name, task) for name, task in loaded.items()}
        rows = []
        for setting in settings:
            (state,) = merge_in_memory(plan, [candidates[setting.name]])
            weight = setting.get("options.scale", (*setting.weights, 1.0)[0])
            row: dict[str, Any] = {"merge": setting.name, "method": setting.method, "weight": weight}
            for name, task in data.items():
                metrics, _ = task.evaluate(model_with(task.loaded.model, state))
                row[name] = {
                    "predicted": prediction.excess(setting.name, name),
                    "loss": metrics["loss_per_example"],
                    "accuracy": metrics["accuracy"],
                }
            row["predicted_worst"] = max(prediction.excess(setting.name, task) for task in prediction.tasks)
            row["predicted_sum"] = sum(prediction.excess(setting.name, t) for t in prediction.tasks)
            rows.append(row)
            print(setting.name, {n: round(row[n]["accuracy"], 4) for n in tasks}, flush=True)
        return rows
    finally:
        plan.inputs.close()


def merge(recipe: Recipe, method: str, weight: float) -> Setting:
    """A method at a weight for all tasks. Equal weights cancel in TIES, whose scale takes their place."""
    if method == "ties":
        return make_setting(recipe, method, {"options.scale": weight})
    return make_setting(recipe, method, dict.fromkeys(weight_keys(recipe), weight))


def _matters(method: str, weight: float) -> bool:
    """Averages do not depend on a weight that all tasks share: one merge is enough."""
    return method not in ("fisher-averaging", "average") or weight == 1.0


def correlations(rows: list[dict[str, Any]], tasks: list[str]) -> dict[str, dict[str, float]]:
    """Spearman's ρ over the merges, per task and in the mean: of prediction and loss, and of prediction and error."""
    found = {
        task: {
            "loss": spearman([r[task]["predicted"] for r in rows], [r[task]["loss"] for r in rows]),
            "error": spearman([r[task]["predicted"] for r in rows], [1 - r[task]["accuracy"] for r in rows]),
        }
        for task in tasks
    }
    found["mean"] = {kind: sum(found[t][kind] for t in tasks) / len(tasks) for kind in ("loss", "error")}
    return found


def best_weights(rows: list[dict[str, Any]], tasks: list[str]) -> dict[str, dict[str, float]]:
    """By method: the weight with the best mean accuracy, and those that the predictions pick."""
    found = {}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        found[method] = {
            "by accuracy": max(own, key=lambda r: sum(r[t]["accuracy"] for t in tasks))["weight"],
            "by worst predicted": min(own, key=lambda r: r["predicted_worst"])["weight"],
            "by summed prediction": min(own, key=lambda r: r["predicted_sum"])["weight"],
        }
    return found


def spearman(x: list[float], y: list[float]) -> float:
    return float(spearmanr(x, y).statistic)


if __name__ == "__main__":
    main()
