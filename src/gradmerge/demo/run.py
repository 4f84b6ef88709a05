"""Run the demonstration: a list of API calls, which are also printed as commands."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from ..api.calibrate import calibrate
from ..api.diagnose import diagnose
from ..api.distill import distill
from ..api.estimate import estimate_curvature
from ..api.merge import merge
from ..api.preview import preview
from ..api.remove import remove
from ..engine.executor import one_thread_each
from ..io.atomic_dir import AtomicDir
from ..progress import NoProgress, Progress
from ..tasks.metrics import standard_error
from ..text import to_json
from .digits import BASE, REMOVED, TASKS, Settings, load_digits, predictions, read_split, train, write_data

#: Names of recipes, and of the models that they make.
TUNED, MATCHING, REMOVAL, NEGATION = "task-arithmetic-tuned", "gradient-matching", "removal", "negation"
#: Model, the model that its training starts from, data, and number of the random stream.
TRAININGS = [
    ("base", None, BASE, 0),
    *((task, "models/base", task, stream) for stream, task in enumerate(TASKS, 1)),
    ("joint", "models/base", "all", 11),
    (f"joint-{REMOVED}", "models/joint", REMOVED, 12),
    (f"without-{REMOVED}", "models/base", "rest", 13),
]
EVERY = (BASE, *TASKS)
REST = tuple(task for task in EVERY if task != REMOVED)
#: Folder → name in the table of removals.
REMOVAL_MODELS = {
    "models/joint": "before",
    "removed/negation": "negation",
    "removed/removal": "gradient matching",
    "removed/influence": "influence function",
    f"models/without-{REMOVED}": "trained without it (target)",
}
#: Arguments that are positional on the command line.
_POSITIONAL = ("model", "recipe", "merged")
#: Commands with another name than their function.
_COMMANDS: Mapping[Callable[..., object], list[str]] = {estimate_curvature: ["curvature", "estimate"]}


class Step(NamedTuple):
    """A call of the API, and the same as a command."""

    function: Callable[..., object]
    arguments: Mapping[str, Any]
    """By name; ``out`` is the folder that the call writes."""

    @property
    def words(self) -> list[str]:
        """Return the command that repeats the step."""
        words = ["gradmerge", *_COMMANDS.get(self.function, [self.function.__name__])]
        for name, value in self.arguments.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, Mapping):
                words += [w for key, item in value.items() for w in (flag.removesuffix("s"), f"{key}={item}")]
            elif name != "out":
                words += [str(value)] if name in _POSITIONAL else [flag, str(value)]
        return [*words, "-o", self.arguments["out"], "--force"]

    def run(self) -> None:
        arguments = {"progress": False, **self.arguments}
        if self.function is not merge:
            arguments["device"] = "cpu"
        if self.function in (preview, diagnose, calibrate, distill):
            arguments["command"] = shlex.join(self.words)
        if self.function is estimate_curvature:
            arguments["batches"] = arguments.pop("data")
        self.function(**arguments)


def run_demo(
    out: str | Path,
    *,
    settings: Settings | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the demonstration, write everything to a new folder, and return the contents of its `results.json`.

    While it runs, the new folder is the working directory of the process, so that commands name relative paths. One
    thread is no slower for small models, and makes the numbers independent of the number of cores.

    Args:
        out: The new folder.
        settings: Sizes, seed and hyperparameters.
        force: Replace the folder of an earlier demonstration.
        progress: Receives one step for each model, estimate and report.
        say: Receives the command of each step.
    """
    settings, progress = settings or Settings(), progress or NoProgress()
    digits = load_digits()
    steps = steps_of(settings)
    with AtomicDir(Path(out), "demonstration", force=force) as staging:
        with contextlib.chdir(staging.folder), one_thread_each():
            progress.begin("demo", len(TRAININGS) + len(steps))
            write_data(Path("data"), *digits, settings)
            for name, start, source, stream in TRAININGS:
                say(f"train models/{name} on data/{source}.npz")
                train(start, Path("data", f"{source}.npz"), Path("models", name), settings, stream=stream)
                progress.advance(1)
            for name, recipe in recipes().items():
                write_recipe(name, recipe)
            for step in steps:
                if step.arguments["out"] == f"merged/{TUNED}":
                    write_recipe(TUNED, merge_recipe("task-arithmetic", weight=_best_weight()))
                say(shlex.join(step.words))
                step.run()
                progress.advance(1)
            results = _results(settings, steps)
            Path("results.json").write_text(to_json(results) + "\n", "utf-8")
            Path("commands.sh").write_text(_script(results["commands"]), "utf-8")
    return results


def merge_recipe(method: str, measured: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a merge of all tasks; ``measured`` is the folder of the models' curvature or Gram matrices."""
    models = [
        {"model": f"../models/{task}"} | ({"curvature": f"../{measured}/{task}"} if measured else {}) | more
        for task in TASKS
    ]
    return {"method": method, "base": {"model": "../models/base"}, "models": models}


def recipes() -> dict[str, dict[str, Any]]:
    """Return the recipes by the names of their models: merges, and removals from the joint model."""
    matching = merge_recipe("gradient-matching", "curvature")
    matching["base"]["curvature"] = "../curvature/base"
    joint, tuned = {"model": "../models/joint"}, {"model": f"../models/joint-{REMOVED}"}
    rest = {"curvature": "../curvature/joint-rest"}
    forget = {"curvature": f"../curvature/joint-{REMOVED}"}
    return {
        "average": merge_recipe("average"),
        "task-arithmetic": merge_recipe("task-arithmetic", weight=1.0),
        "ties": merge_recipe("ties"),
        "regmean": merge_recipe("regmean", "gram"),
        "fisher-averaging": merge_recipe("fisher-averaging", "curvature"),
        MATCHING: matching,
        NEGATION: {"method": "task-arithmetic", "base": joint, "models": [tuned | {"weight": -1.0}]},
        REMOVAL: {"method": "removal", "base": joint | rest, "models": [tuned | forget]},
    }


def write_recipe(name: str, recipe: dict[str, Any]) -> None:
    path = Path("recipes", f"{name}.yml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), "utf-8")


def steps_of(settings: Settings) -> list[Step]:
    """Return all steps after the training, in order. Paths are relative to the new folder."""

    def estimate(out: str, model: str, data: str, **options: Any) -> Step:
        arguments = {"model": f"models/{model}", "data": f"data/{data}.npz:train", "batch_size": 64, **options}
        return Step(estimate_curvature, arguments | {"out": out})

    def merged(name: str, folder: str = "merged") -> Step:
        return Step(merge, {"recipe": f"recipes/{name}.yml", "out": f"{folder}/{name}"})

    def improve(function: Any, start: str, out: str, **options: Any) -> Step:
        arguments: dict[str, Any] = {"merged": start, "data": _data("train"), "teachers": {"base": "models/base"}}
        return Step(function, arguments | {"limit": settings.unlabeled, **options, "out": out})

    def report(function: Any, **options: Any) -> Step:
        arguments = {"recipe": f"recipes/{MATCHING}.yml", **options, "batch_size": 64, "out": function.__name__}
        return Step(function, arguments)

    forget: dict[str, Any] = {"forget": f"data/{REMOVED}.npz:train", "retain": "data/rest.npz:train"}
    forget |= {"budget": "40%", "batch_size": 128}
    weights = {"weights": settings.weights, "methods": "gradient-matching,task-arithmetic", "data": _data("valid")}
    return [
        estimate("curvature/base", "base", BASE),
        *(estimate(f"curvature/{task}", task, task) for task in TASKS),
        *(estimate(f"gram/{task}", task, task, kind="gram") for task in TASKS),
        *(merged(name) for name in recipes() if name not in (NEGATION, REMOVAL)),
        report(preview, **weights),
        merged(TUNED),
        improve(calibrate, f"merged/{MATCHING}", "improved/calibrated", batch_size=64),
        improve(distill, "improved/calibrated", "improved/distilled", batch_size=16, steps=settings.distillation_steps),
        report(diagnose, target="models/joint", data=_data("train")),
        estimate("curvature/joint-rest", "joint", "rest"),
        estimate(f"curvature/joint-{REMOVED}", f"joint-{REMOVED}", REMOVED),
        merged(NEGATION, "removed"),
        merged(REMOVAL, "removed"),
        Step(remove, {"base": "models/joint", **forget, "out": "removed/influence"}),
    ]


def _data(split: str) -> dict[str, str]:
    """Return the data of the base and of every task."""
    return {"base": f"data/{BASE}.npz:{split}"} | {task: f"data/{task}.npz:{split}" for task in TASKS}


def _best_weight() -> float:
    """Return the weight of task arithmetic that is the best on validation images."""
    best: dict[str, Any] = json.loads(Path("preview", "preview.json").read_text("utf-8"))["best"]["task-arithmetic"]
    return float(best["weights"][TASKS[0]])


def _results(settings: Settings, steps: list[Step]) -> dict[str, Any]:
    """Evaluate all models on the test images."""
    merging, removal = merging_models(_best_weight(), settings.unlabeled), REMOVAL_MODELS
    predicted = predictions([*merging, *removal], EVERY)
    labels = read_split(Path("data", f"{BASE}.npz"), "test")[1]  # the same for every task
    return {
        "seed": settings.seed,
        "images": {"train": settings.train, "valid": settings.valid, "test": settings.test},
        "unlabeled": settings.unlabeled,
        "tuned_weight": _best_weight(),
        "merging": [row(name, folder, predicted, labels, EVERY) for folder, name in merging.items()],
        "removal": [row(name, folder, predicted, labels, REST) for folder, name in removal.items()],
        "commands": [shlex.join(step.words) for step in steps],
    }


def merging_models(weight: float, unlabeled: int) -> dict[str, str]:
    """Return folder → name in the table of merges."""
    return {
        "models/base": "base",
        **{f"models/{task}": f"fine-tuned on {task}" for task in TASKS},
        "merged/average": "average",
        "merged/task-arithmetic": "task-arithmetic, weight 1",
        "merged/task-arithmetic-tuned": f"task-arithmetic, tuned: {weight:g}",
        "merged/ties": "ties",
        "merged/regmean": "regmean",
        "merged/fisher-averaging": "fisher-averaging",
        "merged/gradient-matching": "gradient-matching, weight 1",
        "improved/calibrated": f"gradient-matching + calibrate, {unlabeled} unlabeled images",
        "improved/distilled": "… + distill, the same images",
        "models/joint": "trained on all (target)",
    }


def row(
    name: str, folder: str, predicted: Mapping[str, Mapping[str, Tensor]], labels: Tensor, tasks: Sequence[str]
) -> dict[str, Any]:
    """Return one model in a table, from ln p of every class for the test images of each task.

    The mean is over ``tasks``. Its standard error is over digits, each of which is in every task.
    """
    found, target = predicted[folder], predicted[f"models/without-{REMOVED}"][REMOVED]
    right = {task: (logs.argmax(1) == labels).double() for task, logs in found.items()}
    losses = {task: float(F.nll_loss(logs, labels)) for task, logs in found.items()}
    by_digit = torch.stack([right[task] for task in tasks]).mean(0)
    return {
        "name": name,
        "folder": folder,
        "scores": {task: float(rows.mean()) for task, rows in right.items()},
        "losses": losses,
        "mean": float(by_digit.mean()),
        "mean_error": standard_error(by_digit),
        "mean_loss": sum(losses[task] for task in tasks) / len(tasks),
        "kl": float(F.kl_div(found[REMOVED], target, reduction="batchmean", log_target=True)),
    }


def _script(commands: list[str]) -> str:
    """Return a shell script that repeats all steps, also in a shell whose PATH lacks `gradmerge`."""
    lines = ["#!/bin/sh", "# Repeats the steps of `gradmerge demo` on its trained models.", "set -eu"]
    lines += ['cd "$(dirname "$0")"', f'export PATH="$PATH":{shlex.quote(str(Path(sys.executable).parent))}']
    return "\n".join([*lines, *commands]) + "\n"
