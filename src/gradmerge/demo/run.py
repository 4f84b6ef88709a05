"""The story: a base and three tuned models, their curvature, a merge by every rule, and one task taken out again."""

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
from ..api import Progress, merge
from ..api.diagnosing import write_diagnosis
from ..api.estimating import estimate_curvature
from ..api.previewing import preview
from ..engine.workers import one_thread_each
from ..recipe import load_recipe
from ..text import to_json
from . import commands, recipes, tables
from .commands import Command
from .digits import load_digits, write_data
from .recipes import MATCHING, NEGATION, REMOVAL, TUNED
from .scoring import accuracies
from .settings import BASE, REMOVED, TASKS, Settings
from .stages import Advance, Stage, Stages, claimed, run_all, whole_folder, write_text
from .training import steps_of, train

FORMAT = 1
"""Counts up when the stages write something else from the same settings, so that older folders are made again."""
PACKAGES = ("torch", "transformers", "numpy", "scikit-learn", "pillow")
CURVATURE_STEPS, EVALUATION_STEPS = 40, 6
"""About how many steps of training take as long."""


@dataclass(frozen=True)
class Outcome:
    """What the demonstration found, and where it is."""

    folder: Path
    results: dict[str, Any]
    """What `results.json` holds."""
    stages: int
    kept: int
    """Stages that an earlier run had done."""
    commands: dict[str, list[Command]]

    @property
    def merging(self) -> list[tables.Row]:
        return tables.rows_of(self.results["merging"])

    @property
    def removal(self) -> list[tables.Row]:
        return tables.rows_of(self.results["removal"])


def run_demo(
    out: str | Path,
    *,
    settings: Settings | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run the demonstration in a folder; what an earlier run has done with the same settings and versions is kept.

    With ``force`` everything is made again. ``say`` is told of every stage that is done. While it runs, the process
    works in the folder, so that recipes, reports and commands name the same paths. It computes on one thread, which for
    models as small as these is no slower, and makes the numbers independent of the cores.
    """
    settings = settings or Settings()
    digits = load_digits()
    versions = {"format": FORMAT, "gradmerge": __version__} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }
    folder = Path(out).absolute()
    with claimed(folder), contextlib.chdir(folder), one_thread_each():
        work = _Work(settings, digits)
        stages = work.stages()
        if progress is not None:
            progress.begin("demo", sum(stage.steps for stage in stages))
        advance = progress.advance if progress else lambda steps: None
        kept = run_all(Stages(folder, versions=versions, force=force), stages, advance, say)
        results = json.loads(Path("results.json").read_text("utf-8"))
        every = commands.all_commands(work.merged, settings, results["damping"])
    return Outcome(Path(out), results, len(stages), kept, every)


class _Work:
    """The stages, in their order. Paths are relative to the folder of the demonstration."""

    def __init__(self, settings: Settings, digits: tuple[Any, Any]) -> None:
        self.settings, self.digits = settings, digits
        self.recipes = recipes.merges(settings)
        self.merged = [*self.recipes, TUNED]
        self.merged.insert(self.merged.index("task-arithmetic") + 1, self.merged.pop())

    def stages(self) -> list[Stage]:
        facts = dataclasses.asdict(self.settings)
        data = Stage("data", self._data, facts=facts)
        return [
            data,
            *self._trainings(),
            *self._measurements(),
            *self._merging(),
            *self._removing(),
            *self._reporting(),
        ]

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
        def make(advance: Advance) -> None:
            with whole_folder(Path("models", name)) as folder:
                begin = Path("models", start) if start else None
                train(begin, Path("data", f"{data}.npz"), folder, self.settings, stream=stream, advance=advance)

        epochs = self.settings.epochs if start else self.settings.base_epochs
        steps = steps_of(parts * self.settings.train, epochs, self.settings.batch_size)
        return Stage(f"models/{name}", make, ["data", *([f"models/{start}"] if start else [])], steps=steps)

    def _measurements(self) -> Iterator[Stage]:
        yield self._measurement("curvature/base", "base", BASE)
        for task in TASKS:
            yield self._measurement(f"curvature/{task}", task, task)
        for task in TASKS:
            yield self._measurement(f"gram/{task}", task, task, kind="gram")
        for task in TASKS:
            yield self._measurement(f"curvature-at-delta/{task}", task, task, at_delta="models/base")
        yield self._measurement("curvature/joint-rest", "joint", "rest")
        yield self._measurement(f"curvature/joint-{REMOVED}", f"joint-{REMOVED}", REMOVED)

    def _measurement(self, out: str, model: str, data: str, **options: Any) -> Stage:
        def make(advance: Advance) -> None:
            estimate_curvature(
                f"models/{model}", f"data/{data}.npz:train", out, batch_size=64, device="cpu", force=True, **options
            )

        needs = ["data", f"models/{model}", *(["models/base"] if "at_delta" in options else [])]
        return Stage(out, make, needs, options, CURVATURE_STEPS)

    def _merging(self) -> Iterator[Stage]:
        models = ["models/base", *(f"models/{task}" for task in TASKS)]
        measured = [f"{kind}/{task}" for kind in ("curvature", "gram", "curvature-at-delta") for task in TASKS]
        for name, recipe in self.recipes.items():
            yield from self._merge(
                name, f"merged/{name}", [*models, "curvature/base", *measured], partial(dict, recipe), recipe
            )
        needs = ["data", *models, "curvature/base", *measured[: len(TASKS)], f"recipes/{MATCHING}.yml"]
        yield Stage("preview", self._preview, needs, commands.preview(self.settings), 30 * EVALUATION_STEPS)
        yield from self._merge(
            TUNED, f"merged/{TUNED}", [*models, "preview"], lambda: recipes.tuned(_best_weight()), "preview"
        )

    def _merge(
        self, name: str, out: str, needs: Sequence[str], recipe: Callable[[], dict[str, Any]], facts: Any
    ) -> Iterator[Stage]:
        """The recipe's file, and what it makes."""
        path = f"recipes/{name}.yml"
        yield Stage(path, lambda advance: recipes.write_recipe(Path(path), recipe(), out), needs, facts, told=False)
        yield Stage(out, lambda advance: merge(path, out, force=True), [path])

    def _preview(self, advance: Advance) -> None:
        preview(
            f"recipes/{MATCHING}.yml",
            "preview",
            weights=self.settings.weights,
            methods="gradient-matching,task-arithmetic",
            data=_data("valid"),
            batch_size=64,
            device="cpu",
            force=True,
            command=shlex.join(commands.preview(self.settings)),
        )

    def _removing(self) -> Iterator[Stage]:
        models = ["models/joint", f"models/joint-{REMOVED}"]
        measured = ["curvature/joint-rest", f"curvature/joint-{REMOVED}"]
        yield from self._merge(NEGATION, f"removed/{NEGATION}", models, recipes.negation, recipes.negation())
        yield from self._merge(
            REMOVAL,
            f"removed/{REMOVAL}",
            [*models, *measured],
            lambda: recipes.removal(recipes.trusted_damping(Path("recipes"))),
            recipes.removal(0.0),
        )

    def _reporting(self) -> Iterator[Stage]:
        results = [f"merged/{name}" for name in self.merged] + [f"removed/{name}" for name in (NEGATION, REMOVAL)]
        trained = [f"models/{name}" for name in ("base", *TASKS, "joint", f"without-{REMOVED}")]
        yield Stage(
            "diagnose", self._diagnose, [f"merged/{MATCHING}", "models/joint", "data"], commands.diagnose(), 200
        )
        needs = ["data", *trained, *results, "preview"]
        models = [*trained, *results]
        scoring = partial(self._score, models)
        yield Stage("results.json", scoring, needs, steps=EVALUATION_STEPS * len(models))
        yield Stage("results.md", lambda advance: write_text(Path("results.md"), self._page()), ["results.json"])
        yield Stage("commands.sh", self._script, ["results.json"])

    def _diagnose(self, advance: Advance) -> None:
        write_diagnosis(
            f"recipes/{MATCHING}.yml",
            "diagnose",
            target="models/joint",
            data=_data("train"),
            device="cpu",
            batch_size=64,
            force=True,
            command=shlex.join(commands.diagnose()),
        )

    def _score(self, models: Sequence[str], advance: Advance) -> None:
        found = accuracies(models, tables.EVERY, lambda done: advance(done * EVALUATION_STEPS))
        weight, damping = _best_weight(), load_recipe(f"recipes/{REMOVAL}.yml").damping
        results = tables.as_json(
            tables.merge_rows(found, self.merged, weight),
            tables.removal_rows(found, damping),
            seed=self.settings.seed,
            images={"train": self.settings.train, "valid": self.settings.valid, "test": self.settings.test},
            tuned_weight=weight,
            damping=damping,
            preview=_previewed(),
        )
        write_text(Path("results.json"), to_json(results) + "\n")

    def _script(self, advance: Advance) -> None:
        damping = load_recipe(f"recipes/{REMOVAL}.yml").damping
        write_text(Path("commands.sh"), commands.script(commands.all_commands(self.merged, self.settings, damping)))

    def _page(self) -> str:
        results = json.loads(Path("results.json").read_text("utf-8"))
        return tables.page(results)


def _data(split: str) -> dict[str, str]:
    return {"base": f"data/{BASE}.npz:{split}"} | {task: f"data/{task}.npz:{split}" for task in TASKS}


def _previewed() -> dict[str, dict[str, Any]]:
    """Per method of the preview, the weight with the best mean accuracy on validation images, and how flat that is."""
    found = json.loads(Path("preview", "preview.json").read_text("utf-8"))["best"]
    return {
        method: {
            "weight": best["weights"][TASKS[0]],
            "mean_accuracy": best["score"],
            "within_1_percent": best["within_1_percent"]["weights"][TASKS[0]],
        }
        for method, best in found.items()
    }


def _best_weight() -> float:
    """The weight at which task arithmetic has the best mean accuracy on validation images."""
    weight: float = _previewed()["task-arithmetic"]["weight"]
    return weight
