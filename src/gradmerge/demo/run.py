"""Run the demonstration: train, estimate curvature, merge with every method, remove a task, and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..api.calibrate import calibrate
from ..api.diagnose import diagnose
from ..api.distill import distill
from ..api.estimate import estimate_curvature
from ..api.merge import merge
from ..api.preview import preview
from ..api.remove import remove
from ..engine.thread_pool import one_thread_each
from ..io.atomic_dir import AtomicDir
from ..progress import NoProgress, Progress
from ..text import to_json
from . import commands, recipes, tables
from .commands import Command, EstimateRun, data_of
from .demo_settings import BASE, REMOVED, TASKS, Settings
from .digits import load_digits, write_data
from .recipes import CALIBRATED, DISTILLED, INFLUENCE, MATCHING, NEGATION, REMOVAL, TUNED
from .training import distances, measured_rows, train

Steps = dict[str, Callable[[], object]]
"""Name of the file or folder → the call that writes it."""


@dataclass(frozen=True)
class DemoResult:
    """The results of the demonstration, and the folder that they are in."""

    folder: Path
    results: dict[str, Any]
    """The contents of `results.json`."""
    commands: dict[str, list[Command]]

    @property
    def merging(self) -> list[tables.TableRow]:
        return tables.rows_of(self.results["merging"])

    @property
    def removal(self) -> list[tables.TableRow]:
        return tables.rows_of(self.results["removal"])


def run_demo(
    out: str | Path,
    *,
    settings: Settings | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Run the demonstration and write everything to a new folder.

    While it runs, the new folder is the working directory of the process. So recipes, reports and commands name the
    same relative paths. The demonstration uses one thread: that is no slower for small models, and the numbers do not
    depend on the number of cores.

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
            steps = _steps(settings, digits)
            progress.begin("demo", len(steps))
            for name, call in steps.items():
                begun = time.perf_counter()
                call()
                say(f"{name}: {time.perf_counter() - begun:.1f} s")
                progress.advance(1)
            results = _score(settings)
            every = commands.all_commands(_merged(settings), settings)
            Path("results.json").write_text(to_json(results) + "\n", "utf-8")
            Path("results.md").write_text(tables.page(results), "utf-8")
            Path("commands.sh").write_text(commands.script(every), "utf-8")
    return DemoResult(Path(out), results, every)


def _steps(settings: Settings, digits: tuple[Any, Any]) -> Steps:
    """All calls in order, except those that write the results. Paths are relative to the new folder."""
    steps: Steps = {"data": partial(write_data, Path("data"), *digits, settings)}
    trainings = [
        ("base", None, BASE, 0),
        *((task, "base", task, stream) for stream, task in enumerate(TASKS, 1)),
        ("joint", "base", "all", 11),
        (f"joint-{REMOVED}", "joint", REMOVED, 12),
        (f"without-{REMOVED}", "base", "rest", 13),
    ]
    for name, start, data, stream in trainings:
        steps[f"models/{name}"] = partial(
            train,
            f"models/{start}" if start else None,
            Path("data", f"{data}.npz"),
            Path("models", name),
            settings,
            stream=stream,
        )
    for asked in (*commands.CURVATURE, *commands.EXTRA, *commands.FOR_REMOVAL):
        steps[asked.out] = partial(_estimate, asked)
    for name, recipe in recipes.merges(settings).items():
        steps[f"merged/{name}"] = partial(_merge, f"merged/{name}", recipe)
    steps["preview"] = partial(_preview, settings)
    steps[f"merged/{TUNED}"] = _merge_tuned
    steps[f"improved/{CALIBRATED}"] = partial(_calibrate, settings)
    steps[f"improved/{DISTILLED}"] = partial(_distill, settings)
    steps[f"removed/{NEGATION}"] = partial(_merge, f"removed/{NEGATION}", recipes.negation())
    steps[f"removed/{REMOVAL}"] = partial(_merge, f"removed/{REMOVAL}", recipes.removal())
    steps[f"removed/{INFLUENCE}"] = _influence
    steps["diagnose"] = _diagnose
    return steps


def _merged(settings: Settings) -> list[str]:
    """The merges in the order of the table: the tuned weight stands below the fixed one."""
    names = list(recipes.merges(settings))
    names.insert(names.index("task-arithmetic") + 1, TUNED)
    return names


def _estimate(asked: EstimateRun) -> None:
    options = {"batch_size": 64, "device": "cpu", "progress": False, **asked.options}
    estimate_curvature(f"models/{asked.model}", f"data/{asked.data}.npz:train", out=asked.out, **options)


def _merge(out: str, recipe: dict[str, Any]) -> None:
    path = Path("recipes", f"{Path(out).name}.yml")
    recipes.write_recipe(path, recipe, out)
    merge(path, out, progress=False)


def _merge_tuned() -> None:
    _merge(f"merged/{TUNED}", recipes.task_arithmetic(_best_weight()))


def _preview(settings: Settings) -> None:
    preview(
        f"recipes/{MATCHING}.yml",
        "preview",
        weights=settings.weights,
        methods="gradient-matching,task-arithmetic",
        data=data_of("valid"),
        batch_size=64,
        device="cpu",
        progress=False,
        command=shlex.join(commands.preview(settings)),
    )


def _calibrate(settings: Settings) -> None:
    calibrate(
        f"merged/{MATCHING}",
        data_of("train"),
        teachers={"base": "models/base"},
        out=f"improved/{CALIBRATED}",
        limit=settings.unlabeled,
        batch_size=64,
        device="cpu",
        progress=False,
        command=shlex.join(commands.calibrate(settings)),
    )


def _distill(settings: Settings) -> None:
    distill(
        f"improved/{CALIBRATED}",
        data_of("train"),
        teachers={"base": "models/base"},
        out=f"improved/{DISTILLED}",
        limit=settings.unlabeled,
        batch_size=16,
        device="cpu",
        progress=False,
        command=shlex.join(commands.distill(settings)),
    )


def _influence() -> None:
    remove(
        "models/joint",
        f"removed/{INFLUENCE}",
        forget=f"data/{REMOVED}.npz:train",
        retain="data/rest.npz:train",
        budget="40%",
        batch_size=128,
        device="cpu",
        progress=False,
    )


def _diagnose() -> None:
    diagnose(
        f"recipes/{MATCHING}.yml",
        "diagnose",
        target="models/joint",
        data=data_of("train"),
        device="cpu",
        batch_size=64,
        progress=False,
        command=shlex.join(commands.diagnose()),
    )


def _score(settings: Settings) -> dict[str, Any]:
    """Evaluate all models on the test images: the contents of `results.json`."""
    merged, target = _merged(settings), f"models/without-{REMOVED}"
    removed = [f"removed/{name}" for name in (NEGATION, REMOVAL, INFLUENCE)]
    models = [f"models/{name}" for name in ("base", *TASKS, "joint")]
    improved = [f"improved/{name}" for name in (CALIBRATED, DISTILLED)]
    found = measured_rows([*models, *(f"merged/{name}" for name in merged), *improved, *removed, target], tables.EVERY)
    weight = _best_weight()
    removals = tables.removal_rows(found, distances(["models/joint", *removed, target], target, REMOVED))
    return {
        "seed": settings.seed,
        "images": {"train": settings.train, "valid": settings.valid, "test": settings.test},
        "unlabeled": settings.unlabeled,
        "tuned_weight": weight,
        "preview": _previewed(),
        "unit": "scores: share of test images whose most likely class is right; losses: mean −ln p of the right "
        f"class; kl: mean KL(target ‖ model) on test images of {REMOVED}; errors: standard errors over images",
        "merging": [dataclasses.asdict(row) for row in tables.merge_rows(found, merged, weight, settings.unlabeled)],
        "removal": [dataclasses.asdict(row) for row in removals],
    }


def _previewed() -> dict[str, dict[str, Any]]:
    """Method of the preview → the weight to take by its mean accuracy on validation images, and which are tied."""
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
    """The weight at which task arithmetic has the best mean accuracy on validation images."""
    weight: float = _previewed()["task-arithmetic"]["weight"]
    return weight
