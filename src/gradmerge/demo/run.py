"""The story: a base and three tuned models, their curvature, a merge by every method, and one task taken out again."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .._version import __version__
from ..api.diagnosing import diagnose
from ..api.estimating import estimate_curvature
from ..api.merging import merge
from ..api.previewing import preview
from ..api.removing import remove
from ..engine.workers import one_thread_each
from ..progress import NoProgress, Progress
from ..text import to_json
from . import commands, recipes, tables
from .commands import Command, EstimateRun, data_of
from .demo_settings import BASE, REMOVED, TASKS, Settings
from .digits import load_digits, write_data
from .recipes import INFLUENCE, MATCHING, NEGATION, REMOVAL, TUNED
from .stages import Advance, Stage, Stages, claimed, run_all, whole_folder, write_text
from .training import distances, measured_rows, steps_of, train

FORMAT = 2
"""Counts up when the stages write something else from the same settings, so that older folders are made again."""
PACKAGES = ("torch", "transformers", "numpy", "scikit-learn", "pillow")
CURVATURE_STEPS, EVALUATION_STEPS = 40, 6
"""About how many steps of training take as long."""


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found, and where it is."""

    folder: Path
    results: dict[str, Any]
    """What `results.json` holds."""
    stages: int
    kept: int
    """Stages that an earlier run had done."""
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
    """Run the demonstration in a folder; what an earlier run has done with the same settings and versions is kept.

    With ``force`` everything is made again. ``say`` is told of every stage that is done. While it runs, the folder is
    the process's working directory, so that recipes, reports and commands name the same paths. It computes on one
    thread, which is no slower for models as small as these and gives the same numbers on any number of cores.
    """
    settings, progress = settings or Settings(), progress or NoProgress()
    digits = load_digits()
    versions = {"format": FORMAT, "gradmerge": __version__}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    folder = Path(out).absolute()
    with claimed(folder), contextlib.chdir(folder), one_thread_each():
        work = _Work(settings, digits)
        stages = work.stages()
        progress.begin("demo", sum(stage.steps for stage in stages))
        kept = run_all(Stages(folder, versions=versions, force=force), stages, progress.advance, say)
        results = json.loads(Path("results.json").read_text("utf-8"))
        every = commands.all_commands(work.merged, settings)
    return DemoResult(Path(out), results, len(stages), kept, every)


class _Work:
    """The stages, in their order. Paths are relative to the folder of the demonstration."""

    def __init__(self, settings: Settings, digits: tuple[Any, Any]) -> None:
        self.settings, self.digits = settings, digits
        self.recipes = recipes.merges(settings)
        self.merged = list(self.recipes)
        self.merged.insert(self.merged.index("task-arithmetic") + 1, TUNED)

    def stages(self) -> list[Stage]:
        data = Stage("data", self._data, facts=dataclasses.asdict(self.settings))
        return [data, *self._trainings(), *self._estimates(), *self._merging(), *self._removing(), *self._reporting()]

    def _data(self, advance: Advance) -> None:
        with whole_folder(Path("data")) as folder:
            write_data(folder, *self.digits, self.settings)

    def _trainings(self) -> Iterator[Stage]:
        yield self._training("base", None, BASE, 1, 0)
        for stream, task in enumerate(TASKS, 1):
            yield self._training(task, "base", task, 1, stream)
        yield self._training("joint", "base", "all", 1 + len(TASKS), 11)
        yield self._training(f"joint-{REMOVED}", "joint", REMOVED, 1, 12)
        yield self._training(f"without-{REMOVED}", "base", "rest", len(TASKS), 13)

    def _training(self, name: str, start: str | None, data: str, parts: int, stream: int) -> Stage:
        begin = f"models/{start}" if start else None

        def make(advance: Advance) -> None:
            with whole_folder(Path("models", name)) as folder:
                train(begin, Path("data", f"{data}.npz"), folder, self.settings, stream=stream, advance=advance)

        epochs = self.settings.epochs if start else self.settings.base_epochs
        steps = steps_of(parts * self.settings.train, epochs, self.settings.batch_size)
        return Stage(f"models/{name}", make, ["data", *([begin] if begin else [])], steps=steps)

    def _estimates(self) -> Iterator[Stage]:
        for asked in (*commands.CURVATURE, *commands.EXTRA, *commands.FOR_REMOVAL):
            needs = ["data", f"models/{asked.model}", *(["models/base"] if "at_delta" in asked.options else [])]
            yield Stage(asked.out, partial(_estimate, asked), needs, asked.options, CURVATURE_STEPS)

    def _merging(self) -> Iterator[Stage]:
        models = ["models/base", *(f"models/{task}" for task in TASKS)]
        curvature = [asked.out for asked in commands.CURVATURE]
        everything = [*models, *curvature, *(asked.out for asked in commands.EXTRA)]
        for name, recipe in self.recipes.items():
            yield from _merge(name, f"merged/{name}", everything, partial(dict, recipe), recipe)
        needs = ["data", *models, *curvature, f"recipes/{MATCHING}.yml"]
        yield Stage("preview", self._preview, needs, commands.preview(self.settings), 30 * EVALUATION_STEPS)
        tuned = [*models, "preview"]
        yield from _merge(TUNED, f"merged/{TUNED}", tuned, lambda: recipes.task_arithmetic(_best_weight()), "preview")

    def _preview(self, advance: Advance) -> None:
        preview(
            f"recipes/{MATCHING}.yml",
            "preview",
            weights=self.settings.weights,
            methods="gradient-matching,task-arithmetic",
            data=data_of("valid"),
            batch_size=64,
            device="cpu",
            force=True,
            progress=False,
            command=shlex.join(commands.preview(self.settings)),
        )

    def _removing(self) -> Iterator[Stage]:
        models = ["models/joint", f"models/joint-{REMOVED}"]
        needs = [*models, *(asked.out for asked in commands.FOR_REMOVAL)]
        yield from _merge(NEGATION, f"removed/{NEGATION}", models, recipes.negation, recipes.negation())
        yield from _merge(REMOVAL, f"removed/{REMOVAL}", needs, recipes.removal, recipes.removal())
        yield Stage(f"removed/{INFLUENCE}", _influence, ["data", "models/joint"], commands.influence(), 300)

    def _reporting(self) -> Iterator[Stage]:
        yield Stage("diagnose", _diagnose, [f"merged/{MATCHING}", "models/joint", "data"], commands.diagnose(), 200)
        models = [f"models/{name}" for name in ("base", *TASKS, "joint", f"without-{REMOVED}")]
        models += [*(f"merged/{name}" for name in self.merged)]
        models += [f"removed/{name}" for name in (NEGATION, REMOVAL, INFLUENCE)]
        needs = ["data", *models, "preview"]
        yield Stage("results.json", partial(self._score, models), needs, steps=EVALUATION_STEPS * len(models))
        yield Stage("results.md", _page, ["results.json"])
        yield Stage("commands.sh", self._script, ["results.json"])

    def _score(self, models: Sequence[str], advance: Advance) -> None:
        found = measured_rows(models, tables.EVERY, lambda done: advance(done * EVALUATION_STEPS))
        weight = _best_weight()
        merges = tables.merge_rows(found, self.merged, weight)
        target = f"models/without-{REMOVED}"
        taken_out = ["models/joint", *(model for model in models if model.startswith("removed/")), target]
        removals = tables.removal_rows(found, distances(taken_out, target, REMOVED))
        results = {
            "seed": self.settings.seed,
            "images": {
                "train": self.settings.train,
                "valid": self.settings.valid,
                "test": self.settings.test,
            },
            "tuned_weight": weight,
            "preview": _previewed(),
            "unit": "scores: share of test images whose most likely class is right; losses: mean −ln p of the right "
            f"class; kl: mean KL(target ‖ model) on test images of {REMOVED}; errors: standard errors over images",
            "merging": [dataclasses.asdict(row) for row in merges],
            "removal": [dataclasses.asdict(row) for row in removals],
        }
        write_text(Path("results.json"), to_json(results) + "\n")

    def _script(self, advance: Advance) -> None:
        every = commands.all_commands(self.merged, self.settings)
        write_text(Path("commands.sh"), commands.script(every))


def _estimate(asked: EstimateRun, advance: Advance) -> None:
    model, data = f"models/{asked.model}", f"data/{asked.data}.npz:train"
    options = {"batch_size": 64, "device": "cpu", "force": True, "progress": False, **asked.options}
    estimate_curvature(model, data, out=asked.out, **options)


def _merge(
    name: str, out: str, needs: Sequence[str], recipe: Callable[[], dict[str, Any]], facts: Any
) -> Iterator[Stage]:
    """The recipe's file, and what it makes."""
    path = f"recipes/{name}.yml"
    yield Stage(path, lambda advance: recipes.write_recipe(Path(path), recipe(), out), needs, facts, told=False)
    yield Stage(out, lambda advance: merge(path, out, force=True, progress=False), [path])


def _influence(advance: Advance) -> None:
    remove(
        "models/joint",
        f"removed/{INFLUENCE}",
        forget=f"data/{REMOVED}.npz:train",
        keep="data/rest.npz:train",
        budget="40%",
        batch_size=128,
        device="cpu",
        force=True,
        progress=False,
    )


def _diagnose(advance: Advance) -> None:
    diagnose(
        f"recipes/{MATCHING}.yml",
        "diagnose",
        target="models/joint",
        data=data_of("train"),
        device="cpu",
        batch_size=64,
        force=True,
        progress=False,
        command=shlex.join(commands.diagnose()),
    )


def _page(advance: Advance) -> None:
    write_text(Path("results.md"), tables.page(json.loads(Path("results.json").read_text("utf-8"))))


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
