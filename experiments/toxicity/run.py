"""One seed of the experiment, stage by stage."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

import gradmerge as gm

from ..common.stages import Stages
from ..common.states import model_with
from . import models
from .data import Data, text_folder
from .evaluation import continuations, distinct, divergence, loss_on
from .removal import METHODS, Point, Task, advice, candidates, choose, distance, rise, sweep
from .scorer import TFIDF, Scorer, load_scorer, scorer_quality
from .settings import Settings
from .tables import CURVE


class Seed:
    """The stages of one seed; models and scorer are loaded when they are first needed."""

    def __init__(
        self, seed: int, out: Path, settings: Settings, model: str | None, data_dir: Path | None, scorer: str, device: str, data_of: str
    ) -> None:  # fmt: skip
        self.seed, self.settings, self.device = seed, settings, device
        self.model, self.data_dir, self.scorer_name = model, data_dir, scorer
        self.stages = Stages(out / f"seed-{seed}", lambda text: print(text, flush=True))
        self.data = Data.load(out / "data" / "prepared", settings)
        self.prompts = json.loads((out / "data" / "prompts" / "prompts.json").read_text())
        self.given = {"seed": seed, "data": data_of, "length": settings.length, "device": device.split(":")[0]}
        self.tasks: dict[str, Task] = {}
        self._scorer: Scorer | None = None
        self._loaded: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        return self.stages.path(name)

    def scorer(self) -> Scorer:
        if self._scorer is None:
            self._scorer = load_scorer(self.scorer_name, self.data_dir, self.device)
        return self._scorer

    def loaded(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = models.load(self.path(name), self.device)
        return self._loaded[name]

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": self.seed, "training": self._train()}
        found["curvature"] = {"base": self.stages.run(
            "curvature-base",
            lambda folder: models.measure(
                folder, self.path("base"), self.data, self.data.staying, self.settings, self.device, self.settings.curvature_examples
            ),
            given={**self.given, "settings": self._curvature_settings()},
            after=["base"],
        )}  # fmt: skip
        rows: dict[str, Any] = {"base": self._test("base", "base")}
        if self.settings.pretraining is not None:
            rows["target"] = self._test("target", "target")
        found["tunings"] = {}
        for name in self.settings.tunings:
            found["tunings"][name] = self._removal(name, rows, found)
        found["rows"] = rows
        if self.scorer_name == TFIDF:
            assert self.data_dir is not None
            folder = text_folder(self.data_dir)
            found["scorer"] = self.stages.run(
                "scorer",
                lambda _: scorer_quality(self.scorer(), folder, self.settings.threshold),
                given={"data": self.given["data"], "threshold": self.settings.threshold},
            )
        found["seconds"] = self.stages.seconds()
        return found

    def _train(self) -> dict[str, Any]:
        found = {}
        shape = self.settings.pretraining
        if shape is None:
            assert self.model is not None
            name = self.model
            found["base"] = self.stages.run(
                "base", lambda folder: models.keep_base(folder, name), given={"model": name}
            )
            return found
        for name, without in (("base", None), ("target", "toxic")):
            found[name] = self.stages.run(
                name,
                lambda folder, without=without: models.pretrain(  # type: ignore[misc]
                    folder, self.data, self.settings, self.seed, self.device, without=without
                ),
                given={**self.given, "shape": asdict(shape), "without": without, "context": self.settings.context},
            )
        return found

    def _curvature_settings(self) -> dict[str, Any]:
        return {"examples": self.settings.curvature_examples, "scaled": self.settings.scale_curvature}

    def _removal(self, name: str, rows: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """Tune, measure, sweep, and test what was chosen; what was found along the way."""
        training = self.settings.tunings[name]
        prior = self.path("curvature-base") / "curvature"
        found["training"][name] = self.stages.run(
            f"tuned-{name}",
            lambda folder: models.tune(
                folder, self.path("base"), self.data, training, self.seed, self.device,
                gm.Curvature.load(prior) if training.strength else None,
            ),
            given={**self.given, "training": asdict(training)},
            after=["base", "curvature-base"] if training.strength else ["base"],
        )  # fmt: skip
        found["curvature"][name] = self.stages.run(
            f"curvature-{name}",
            lambda folder: models.measure(
                folder, self.path(f"tuned-{name}"), self.data, ["toxic"], self.settings, self.device, None
            ),
            given={"settings": self._curvature_settings()},
            after=[f"tuned-{name}"],
        )
        unit = found["curvature"][name]["mean_entry"]
        after = ["base", "curvature-base", f"tuned-{name}", f"curvature-{name}"]
        advised = self.stages.run(f"advice-{name}", lambda folder: self._advice(name, folder), after=after)
        swept = self.stages.run(
            f"sweep-{name}",
            lambda _: self._sweep(name, unit),
            given={
                "strengths": self.settings.strengths, "dampings": self.settings.dampings, "budgets": self.settings.budgets,
                "refinements": self.settings.refinements, "tokens": self.settings.dev_tokens, "scorer": self.scorer_name,
                "prompts": [self.settings.prompts, self.settings.dev_prompts, self.settings.toxic_prompts], **self.given,
            },
            after=after,
        )  # fmt: skip
        base, points = Point(**swept["base"]), [Point(**p) for p in swept["points"]]
        chosen = {
            method: {
                str(budget): asdict(choose([p for p in points if p.method == method], base, budget))
                for budget in self.settings.budgets
            }
            for method in METHODS
        }
        wanted = self._wanted(name, base, points, chosen, advised["damping"]).values()
        rows[f"tuned-{name}"] = self._test(f"tuned-{name}", f"tuned-{name}")
        tested = [{**asdict(p), "rise": rise_of(p, base), "test": self._tested(name, p, after)} for p in wanted]
        moved = self._moved(name)
        return {"unit": unit, "advice": advised, "sweep": swept, "chosen": chosen, "tested": tested, "moved": moved}

    def _task(self, name: str) -> Task:
        if name not in self.tasks:
            self.tasks[name] = Task(
                models.state(self.path("base")), models.state(self.path(f"tuned-{name}")),
                gm.Curvature.load(self.path("curvature-base") / "curvature"),
                gm.Curvature.load(self.path(f"curvature-{name}") / "curvature"),
            )  # fmt: skip
        return self.tasks[name]

    def _moved(self, name: str) -> dict[str, float]:
        """How far fine-tuning went, beside the length of the base's weights."""

        def make(_: Path) -> dict[str, float]:
            task = self._task(name)
            zero = {n: v * 0 for n, v in task.base.items()}
            return {"tuned": distance(task.tuned, task.base), "base": distance(task.base, zero)}

        return self.stages.run(f"moved-{name}", make, after=["base", f"tuned-{name}"])

    def _advice(self, name: str, folder: Path) -> dict[str, Any]:
        found = advice(
            self.path("base") / "model", self.path(f"tuned-{name}") / "model", self.path("curvature-base") / "curvature",
            self.path(f"curvature-{name}") / "curvature", self.settings.default_damping, folder / "merged",
        )  # fmt: skip
        shutil.rmtree(folder / "merged", ignore_errors=True)
        return found

    def _sweep(self, name: str, unit: float) -> dict[str, Any]:
        task = self._task(name)
        base = Point("base", 0.0, None, "all", self._losses(self.loaded("base"), "dev"), 0.0)

        def measured(strength: float, method: str, damping: float | None, scope: str) -> Point:
            removed = task.without(method, strength, damping, scope)
            losses = self._losses(model_with(self.loaded("base"), removed), "dev")
            return Point(method, strength, damping, scope, losses, task.step(removed))

        settings = self.settings
        points: list[Point] = []
        for scope, factors in settings.dampings.items():
            dampings = [settings.default_damping, *(float(f"{factor * unit:.3g}") for factor in factors)]
            for method, damping in [("task-arithmetic", None), *(("gradient-matching", d) for d in dampings)]:
                points += sweep(
                    partial(measured, method=method, damping=damping, scope=scope),
                    base,
                    settings.strengths,
                    settings.budgets,
                    settings.refinements,
                )
        base.toxicity = self._score(self.loaded("base"), "dev")[1].mean().item()
        for point in {p.key: p for budget in settings.budgets for p in candidates(points, base, budget)}.values():
            model = model_with(self.loaded("base"), task.without(*point.key))
            point.toxicity = self._score(model, "dev")[1].mean().item()
        return {"base": asdict(base), "points": [asdict(p) for p in points]}

    def _losses(self, model: Any, split: str) -> dict[str, float]:
        context = self.settings.context
        return {kind: loss_on(model, self.data.held_out(kind, split), context) for kind in self.data.kinds}

    def _wanted(
        self, name: str, base: Point, points: Sequence[Point], chosen: dict[str, Any], advised: float | None
    ) -> dict[tuple[Any, ...], Point]:
        """What is tested: strength 1 plain, by default and as advised; what was chosen; and the curves of the figure."""
        default = self.settings.default_damping
        wanted = []
        for scope in self.settings.dampings:
            wanted += [Point("task-arithmetic", 1.0, None, scope), Point("gradient-matching", 1.0, default, scope)]
        if advised is not None:
            wanted.append(Point("gradient-matching", 1.0, advised))
        picked = [Point(**p) for by_budget in chosen.values() for p in by_budget.values() if p["strength"]]
        wanted += picked
        if name == next(iter(self.settings.tunings)):
            main = {
                (p["method"], p["damping"], p["scope"])
                for p in (by_budget[str(self.settings.budgets[0])] for by_budget in chosen.values())
            }
            wanted += [p for p in points if (p.method, p.damping, p.scope) in main and rise(p, base) <= CURVE]
        known = {p.key: p for p in points}
        return {p.key: known.get(p.key, p) for p in wanted}

    def _tested(self, name: str, point: Point, after: Sequence[str]) -> Any:
        damping = "" if point.damping is None else f"-{point.damping:g}"
        scope = "" if point.scope == "all" else f"-{point.scope.replace(' ', '-')}"
        return self._test(
            f"{name}-{point.method}-{point.strength:g}{damping}{scope}",
            None,
            lambda: model_with(self.loaded("base"), self._task(name).without(*point.key)),
            {"removal": point.key},
            after,
        )

    def _test(
        self, name: str, stage: str | None, make: Any = None, given: Any = None, after: Sequence[str] = ()
    ) -> Any:
        """Losses on test text, the toxicity of what is written, and the distance to the model that never saw what is removed."""
        settings = self.settings

        def measure(folder: Path) -> dict[str, Any]:
            model = self.loaded(stage) if stage is not None else make()
            return self._measured(model, folder)

        return self.stages.run(
            f"test-{name}",
            measure,
            given={
                **(given or {}), "scorer": self.scorer_name, "prompts": [settings.prompts, settings.dev_prompts, settings.toxic_prompts], "tokens": settings.test_tokens,
                "new": settings.new_tokens, "top_p": settings.top_p, "threshold": settings.threshold, **self.given,
            },
            after=[*after, *([stage] if stage is not None else []), *(["target"] if settings.pretraining is not None else [])],
        )  # fmt: skip

    def _score(self, model: Any, split: str) -> tuple[list[str], Any]:
        """What the model writes after the prompts of a split, and how toxic each is."""
        settings = self.settings
        texts = continuations(
            model, self.data.tokenizer, [p["text"] for p in self.prompts[split]], new_tokens=settings.new_tokens,
            top_p=settings.top_p, batch=settings.generation_batch, seed=self.seed,
        )  # fmt: skip
        return texts, np.array(self.scorer()(texts))

    def _measured(self, model: Any, folder: Path) -> dict[str, Any]:
        settings = self.settings
        texts, scores = self._score(model, "test")
        (folder / "continuations.json").write_text(json.dumps([*zip(texts, scores.tolist(), strict=True)], indent=0))
        toxic = np.array([p["toxic"] for p in self.prompts["test"]])
        found: dict[str, Any] = {
            "loss": self._losses(model, "test"),
            "toxicity": {"mean": float(scores.mean()), "share": float((scores >= settings.threshold).mean())},
            "distinct": distinct(texts),
        }
        for kind, these in (("toxic", toxic), ("mild", ~toxic)):
            if these.any():
                found["toxicity"][f"share_{kind}_prompts"] = float((scores[these] >= settings.threshold).mean())
        if settings.pretraining is not None:
            target = self.loaded("target")
            found["divergence"] = {
                kind: divergence(target, model, self.data.held_out(kind, "dev"), settings.context)
                for kind in self.data.kinds
            }
        return found


def rise_of(point: Point, base: Point) -> float | None:
    """The rise of validation perplexity, where the point was part of the sweep."""
    if not point.loss:
        return None
    found = rise(point, base)
    return found if math.isfinite(found) else None


def run_seed(
    seed: int, out: Path, settings: Settings, model: str | None, data_dir: Path | None, scorer: str, device: str, data_of: str
) -> dict[str, Any]:  # fmt: skip
    disable_progress_bar()
    return Seed(seed, out, settings, model, data_dir, scorer, device, data_of).run()
