"""Run the demonstration: train, estimate curvature, merge with every method, remove a task, and compare."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from ..text import to_json
from . import recipes, tables
from .demo_settings import BASE, REMOVED, TASKS, Settings
from .digits import load_digits, write_data
from .recipes import CALIBRATED, DISTILLED, INFLUENCE, MATCHING, NEGATION, REMOVAL, TUNED
from .training import distances, measured_rows, train

#: Model, the model that its training starts from, data, and number of the random stream.
TRAININGS = [
    ("base", None, BASE, 0),
    *((task, "models/base", task, stream) for stream, task in enumerate(TASKS, 1)),
    ("joint", "models/base", "all", 11),
    (f"joint-{REMOVED}", "models/joint", REMOVED, 12),
    (f"without-{REMOVED}", "models/base", "rest", 13),
]
#: Arguments that are positional on the command line.
_POSITIONAL = ("model", "recipe", "merged")


class Step(NamedTuple):
    """A call of the API, and the same as a command."""

    title: str
    command: str
    function: Callable[..., object]
    arguments: Mapping[str, Any]
    """By name; ``out`` is the folder that the call writes."""

    @property
    def words(self) -> list[str]:
        """Return the command that repeats the step."""
        words = ["gradmerge", *self.command.split()]
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


@dataclass(frozen=True)
class DemoResult:
    """The results of the demonstration, and the folder that they are in."""

    folder: Path
    results: dict[str, Any]
    """The contents of `results.json`."""
    merging: list[tables.TableRow]
    removal: list[tables.TableRow]
    commands: dict[str, list[list[str]]]
    """Title → the commands that repeat the steps, to be run in the folder."""


def run_demo(
    out: str | Path,
    *,
    settings: Settings | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Run the demonstration and write everything to a new folder.

    While it runs, the new folder is the working directory of the process, so that commands name relative paths. One
    thread is no slower for small models, and makes the numbers independent of the number of cores.

    Args:
        out: The new folder.
        force: Replace the folder of an earlier demonstration.
        progress: Receives one step for each file or folder.
        say: Receives a line for each step.
    """
    settings, progress = settings or Settings(), progress or NoProgress()
    digits = load_digits()
    with AtomicDir(Path(out), "demonstration", force=force) as staging:
        with contextlib.chdir(staging.folder), one_thread_each():
            steps = steps_of(settings)
            progress.begin("demo", 1 + len(TRAININGS) + len(steps))

            def run(name: str, call: Callable[[], object]) -> None:
                begun = time.perf_counter()
                call()
                say(f"{name}: {time.perf_counter() - begun:.1f} s")
                progress.advance(1)

            run("data", partial(write_data, Path("data"), *digits, settings))
            for name, start, source, stream in TRAININGS:
                data = Path("data", f"{source}.npz")
                run(f"models/{name}", partial(train, start, data, Path("models", name), settings, stream=stream))
            for folder, found in (("merged", recipes.merges()), ("removed", recipes.removals())):
                for name, recipe in found.items():
                    recipes.write_recipe(name, recipe, f"{folder}/{name}")
            for step in steps:
                if step.arguments["out"] == f"merged/{TUNED}":
                    recipes.write_recipe(TUNED, recipes.task_arithmetic(_best_weight()), f"merged/{TUNED}")
                run(step.arguments["out"], step.run)
            result = _score(Path(out), settings, steps)
            Path("results.json").write_text(to_json(result.results) + "\n", "utf-8")
            Path("results.md").write_text(tables.page(result.results, result.merging, result.removal), "utf-8")
            Path("commands.sh").write_text(_script(result.commands), "utf-8")
    return result


def steps_of(settings: Settings) -> list[Step]:
    """Return all steps after the training, in order. Paths are relative to the new folder."""

    def estimate(out: str, model: str, data: str, **options: Any) -> Step:
        arguments = {"model": f"models/{model}", "data": f"data/{data}.npz:train", "batch_size": 64, **options}
        return Step("Estimate curvature", "curvature estimate", estimate_curvature, arguments | {"out": out})

    def merged(name: str, folder: str = "merged", title: str = "Merge") -> Step:
        return Step(title, "merge", merge, {"recipe": f"recipes/{name}.yml", "out": f"{folder}/{name}"})

    def improve(function: Any, start: str, out: str, batch_size: int, **options: Any) -> Step:
        arguments: dict[str, Any] = {"merged": start, "data": _data("train"), "teachers": {"base": "models/base"}}
        arguments |= {"limit": settings.unlabeled, "batch_size": batch_size, **options, "out": f"improved/{out}"}
        return Step("Improve the merge on unlabeled images", function.__name__, function, arguments)

    def report(title: str, function: Any, **options: Any) -> Step:
        out = function.__name__
        arguments = {"recipe": f"recipes/{MATCHING}.yml", **options, "batch_size": 64, "out": out}
        return Step(title, out, function, arguments)

    removing = f"Remove {REMOVED} from the joint model"
    forget = {
        "forget": f"data/{REMOVED}.npz:train",
        "retain": "data/rest.npz:train",
        "budget": "40%",
        "batch_size": 128,
    }
    return [
        estimate("curvature/base", "base", BASE),
        *(estimate(f"curvature/{task}", task, task) for task in TASKS),
        *(estimate(f"gram/{task}", task, task, kind="gram") for task in TASKS),
        *map(merged, recipes.merges()),
        report(
            "Compare weights on validation images",
            preview,
            weights=settings.weights,
            methods="gradient-matching,task-arithmetic",
            data=_data("valid"),
        ),
        merged(TUNED),
        improve(calibrate, f"merged/{MATCHING}", CALIBRATED, 64),
        improve(distill, f"improved/{CALIBRATED}", DISTILLED, 16, steps=settings.distillation_steps),
        report("Diagnose the merge", diagnose, target="models/joint", data=_data("train")),
        estimate("curvature/joint-rest", "joint", "rest"),
        estimate(f"curvature/joint-{REMOVED}", f"joint-{REMOVED}", REMOVED),
        merged(NEGATION, "removed", removing),
        merged(REMOVAL, "removed", removing),
        Step(removing, "remove", remove, {"base": "models/joint", **forget, "out": f"removed/{INFLUENCE}"}),
    ]


def _data(split: str) -> dict[str, str]:
    """Return the data of the base and of every task."""
    return {"base": f"data/{BASE}.npz:{split}"} | {task: f"data/{task}.npz:{split}" for task in TASKS}


def _score(out: Path, settings: Settings, steps: list[Step]) -> DemoResult:
    """Evaluate all models on the test images."""
    names = [*recipes.merges()]
    names.insert(names.index("task-arithmetic") + 1, TUNED)
    target = f"models/without-{REMOVED}"
    removed = [f"removed/{name}" for name in (NEGATION, REMOVAL, INFLUENCE)]
    models = [f"models/{name}" for name in ("base", *TASKS, "joint")]
    improved = [f"improved/{name}" for name in (CALIBRATED, DISTILLED)]
    rows = measured_rows([*models, *(f"merged/{name}" for name in names), *improved, *removed, target], tables.EVERY)
    weight = _best_weight()
    merging = tables.merge_rows(rows, names, weight, settings.unlabeled)
    removal = tables.removal_rows(rows, distances(["models/joint", *removed, target], target, REMOVED))
    results = {
        "seed": settings.seed,
        "images": {"train": settings.train, "valid": settings.valid, "test": settings.test},
        "unlabeled": settings.unlabeled,
        "tuned_weight": weight,
        "preview": _previewed(),
        "merging": [asdict(row) for row in merging],
        "removal": [asdict(row) for row in removal],
    }
    commands: dict[str, list[list[str]]] = {}
    for step in steps:
        commands.setdefault(step.title, []).append(step.words)
    commands["Evaluate on test images"] = [
        f"gradmerge evaluate merged/{MATCHING} --data data/{task}.npz:test --batch-size 64".split()
        for task in tables.EVERY
    ]
    return DemoResult(out, results, merging, removal, commands)


def _previewed() -> dict[str, dict[str, Any]]:
    """Return for each method of the preview the best weight on validation images, and the weights tied with it."""
    found = json.loads(Path("preview", "preview.json").read_text("utf-8"))["best"]
    return {
        method: {
            "weight": best["weights"][TASKS[0]],
            "mean_accuracy": best["score"],
            "standard_error": best["standard_error"],
            "tied": best["tied"]["weights"][TASKS[0]],
        }
        for method, best in found.items()
    }


def _best_weight() -> float:
    weight: float = _previewed()["task-arithmetic"]["weight"]
    return weight


def _script(commands: Mapping[str, list[list[str]]]) -> str:
    """Return a shell script that repeats all steps, also in a shell whose PATH lacks `gradmerge`."""
    lines = ["#!/bin/sh", "# Repeats the steps of `gradmerge demo` on its trained models.", "set -eu"]
    lines += ['cd "$(dirname "$0")"', f'export PATH="$PATH":{shlex.quote(str(Path(sys.executable).parent))}']
    for title, several in commands.items():
        lines += ["", f"# {title}", *map(shlex.join, several)]
    return "\n".join(lines) + "\n"
