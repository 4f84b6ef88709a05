"""Calibration and distillation on the demonstration's models, over seeds and settings.

    python -m benchmarks.calibration --seeds 0,1,2,3,4 --json benchmarks/results/calibration-demo.json

Every seed trains the demonstration's models anew. Accuracies are means over the four tasks' test images.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import gradmerge as gm
from gradmerge.demo.digits import BASE, TASKS, Settings, load_digits, predictions, read_split, train, write_data
from gradmerge.demo.run import MATCHING, recipes, write_recipe

EVERY = (BASE, *TASKS)


def prepare(seed: int) -> None:
    """Train the models of a seed, estimate curvature and merge, in the working directory."""
    settings = dataclasses.replace(Settings(), seed=seed)
    Path("data").mkdir()
    write_data(Path("data"), *load_digits(), settings)
    trainings = [
        ("base", None, BASE, 0),
        *((t, "base", t, n) for n, t in enumerate(TASKS, 1)),
        ("joint", "base", "all", 11),
    ]
    for name, start, data, stream in trainings:
        source = f"models/{start}" if start else None
        train(source, Path("data", f"{data}.npz"), Path("models", name), settings, stream=stream)
    for name, data in (("base", BASE), *((t, t) for t in TASKS)):
        gm.estimate_curvature(
            f"models/{name}", f"data/{data}.npz:train", out=f"curvature/{name}", batch_size=64, progress=False
        )
    write_recipe(MATCHING, recipes()[MATCHING])
    gm.merge(Path("recipes", f"{MATCHING}.yml"), f"merged/{MATCHING}", progress=False)


def variants(rows: int, quick: bool) -> Iterator[tuple[str, Callable[[str], object]]]:
    """Name → what writes the model to a folder."""
    data = {name: f"data/{name}.npz:train" for name in EVERY}
    teachers = {BASE: "models/base", **{t: f"models/{t}" for t in TASKS}}
    merged = f"merged/{MATCHING}"
    common = {"teachers": teachers, "limit": rows, "progress": False}

    def calibrate(**options: object) -> Callable[[str], object]:
        return lambda out: gm.calibrate(merged, data, out=out, batch_size=64, **common, **options)

    def distill(start: str, **options: object) -> Callable[[str], object]:
        return lambda out: gm.distill(start, data, out=out, batch_size=16, **common, **options)

    yield "calibrate", calibrate()
    yield "calibrate, curvature none", calibrate(curvature="none")
    if not quick:
        yield "calibrate, curvature merge", calibrate(curvature="merge")
        for ridge in (0.05, 0.1, 1.0):
            yield f"calibrate, curvature none, ridge {ridge:g}", calibrate(curvature="none", ridge=ridge)
        for alpha in (0.0, 0.5, 1.0):
            yield f"calibrate, curvature none, alpha {alpha:g}", calibrate(curvature="none", alpha=alpha)
    yield "distill", distill(merged)
    yield "calibrate + distill", distill("variants/calibrate")
    yield "calibrate + distill, 800 steps", distill("variants/calibrate", steps=800)
    if not quick:
        yield "calibrate + distill, lr 0.002", distill("variants/calibrate", lr=2e-3)
        yield "distill answers", distill(merged, match="answers", steps=670)
        yield "distill representations", distill(merged, match="representations")
        for rate in (3e-4, 3e-3):
            yield f"distill representations, lr {rate:g}", distill(merged, match="representations", lr=rate)


def accuracies(models: dict[str, str]) -> dict[str, dict[str, float]]:
    """Model → task → accuracy on the test images."""
    found = predictions(list(models.values()), EVERY)
    labels = read_split(Path("data", f"{BASE}.npz"), "test")[1]  # the same for every task
    return {
        name: {task: float((found[folder][task].argmax(1) == labels).double().mean()) for task in EVERY}
        for name, folder in models.items()
    }


def one_seed(seed: int, rows: int, quick: bool) -> dict[str, object]:
    """All variants of a seed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(seed)
        Path("variants").mkdir()
        models = {"base": "models/base", "merge": f"merged/{MATCHING}", "joint": "models/joint"}
        seconds, chosen = {}, {}
        for name, make in variants(rows, quick):
            folder = "variants/" + name.replace(" ", "-").replace(",", "")
            begun = time.perf_counter()
            done = make(folder)
            seconds[name] = time.perf_counter() - begun
            chosen[name] = getattr(done, "chosen", None) or done.distillation.best_step
            models[name] = folder
        return {"seed": seed, "accuracy": accuracies(models), "seconds": seconds, "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rows", type=int, default=200, help="unlabeled rows per task")
    parser.add_argument("--quick", action="store_true", help="the default settings alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = []
    for seed in map(int, options.seeds.split(",")):
        seeds.append(one_seed(seed, options.rows, options.quick))
        means = {name: statistics.mean(by_task.values()) for name, by_task in seeds[-1]["accuracy"].items()}
        print(seed, {name: round(100 * value, 1) for name, value in means.items()}, flush=True)
    names = seeds[0]["accuracy"]
    table = {}
    for name in names:
        values = [100 * statistics.mean(one["accuracy"][name].values()) for one in seeds]
        table[name] = {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
        print(f"{name:45} {table[name]['mean']:6.2f} ± {table[name]['sd'] or 0:.2f}")
    if options.json:
        facts = {
            "command": f"python -m benchmarks.calibration --seeds {options.seeds} --rows {options.rows}"
            + (" --quick" if options.quick else ""),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "gradmerge": gm.__version__},
            "accuracy_percent": table,
            "seeds": seeds,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
