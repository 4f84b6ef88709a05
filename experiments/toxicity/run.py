"""What the seeds share, and one seed stage by stage."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import gradmerge as gm
from gradmerge.tasks.models import model_with

from ..common import seeds
from ..common.data import Collate
from ..common.removal import Bench
from ..common.stages import run_stage, stage_seconds
from ..common.states import distance, norm
from . import models
from .data import Data, text_folder, write_prompts, write_tokens
from .evaluation import continuations, distinct, divergence, loss_on
from .removal import CURVE, METHODS, Point, Task, advice, candidates, choose, rise, sweep
from .scorer import TFIDF, Scorer, load_scorer, scorer_quality
from .settings import Settings


@dataclass(frozen=True)
class Run(seeds.Run):
    settings: Settings
    model: str | None
    """The base; None where one is trained from nothing."""
    data_dir: Path | None
    scorer: str
    counts: dict[str, Any]
    """How many texts, tokens and prompts there are in ``out/data``."""
    made_of: str
    """Settings of the data, as JSON."""


def prepare(out: Path, settings: Settings, device: str, model: str | None, data_dir: Path | None, scorer: str) -> Run:
    """Write tokens and prompts, from a folder or the Hub."""
    data = out / "data"
    # Local data is known by its names and sizes.
    found = data_dir.rglob("*.gz") if data_dir is not None else ()
    files = sorted([str(path.relative_to(data_dir)), path.stat().st_size] for path in found)
    given = {
        "packed": settings.packed,
        "more_kinds": settings.more_kinds,
        "characters": settings.characters,
        "held_out": settings.held_out,
        "first": None if settings.packed else settings.curvature_examples,
        "tokens": [settings.dev_tokens, settings.test_tokens],
        "vocabulary": settings.pretraining and settings.pretraining.vocabulary,
        "model": model,
        "files": files,
    }
    counts = run_stage(data / "prepared", lambda folder: write_tokens(folder, data_dir, model, settings), given)
    asked = run_stage(
        data / "prompts",
        lambda folder: write_prompts(folder, data_dir, settings),
        {"prompts": settings.prompt_counts, "files": files},
    )
    return Run(out, settings, device, model, data_dir, scorer, {**counts, "prompts": asked}, json.dumps(given))


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self.data = Data.load(run.out / "data" / "prepared", run.settings)
        self.prompts = json.loads((run.out / "data" / "prompts" / "prompts.json").read_text())
        kind = run.device.split(":")[0]
        self.given = {"seed": seed, "data": run.made_of, "length": run.settings.length, "device": kind}
        self.loaded = cache(self._load)
        self.task = cache(self._task)

    def path(self, name: str) -> Path:
        return self.folder / name

    @cached_property
    def scorer(self) -> Scorer:
        return load_scorer(self.run.scorer, self.run.data_dir, self.run.device)

    def _load(self, name: str) -> Any:
        return models.load(self.path(name), self.run.device)

    def _task(self, name: str) -> Task:
        return Task(
            models.state(self.path("base")),
            models.state(self.path(f"tuned-{name}")),
            gm.Curvature.load(self.path("curvature-base") / "curvature"),
            gm.Curvature.load(self.path(f"curvature-{name}") / "curvature"),
        )

    def results(self) -> dict[str, Any]:
        training = self._train()
        curvature: dict[str, Any] = {}
        if self.settings.tunings:
            limit = self.settings.curvature_examples
            curvature["base"] = self._curvature("base", "base", self.data.staying, limit)
        rows: dict[str, Any] = {name: self._test_of(name) for name in self._untuned}
        tunings: dict[str, Any] = {}
        for name in self.settings.tunings:
            training[name] = self._tune(name)
            curvature[name] = self._curvature(name, f"tuned-{name}", ["toxic"], None)
            tunings[name] = self._removal(name, curvature[name]["mean_entry"])
            rows[f"tuned-{name}"] = self._test_of(f"tuned-{name}")
        found = {
            "seed": self.seed,
            "training": training,
            "curvature": curvature,
            "tunings": tunings,
            "rows": rows,
        }
        if self.settings.comparing is not None:
            found["comparison"] = self.bench.results()
        if self.run.scorer == TFIDF:
            found["scorer"] = self._scorer_quality()
        return {**found, "seconds": stage_seconds(self.folder)}

    @property
    def _untuned(self) -> list[str]:
        """The base, and where it is known the model that never saw what is removed."""
        return ["base"] if self.settings.pretraining is None else ["base", "target"]

    @cached_property
    def bench(self) -> Bench:
        """Ways to take the toxic comments out, held against the target."""
        assert self.settings.comparing is not None
        forget, keep = (
            [{"input_ids": ids, "labels": ids} for kind in kinds for ids in self.data.examples(kind)]
            for kinds in (["toxic"], self.data.staying)
        )
        return Bench(
            self.folder,
            self.settings.comparing,
            self.seed,
            self.run.device,
            {**self.given, "scorer": self.run.scorer, "prompts": self.settings.prompt_counts},
            self._load,
            forget,
            keep,
            Collate(self.data.tokenizer.eos_token_id),
            "next-token",
            self._distances,
            self._judged,
        )

    def _distances(self, model: Any, split: str) -> dict[str, float]:
        """The mean over kinds of text that stay, and toxic text: losses, and of test text KL from the target."""
        split = "dev" if split == "validation" else split
        found = parted(self._losses(model, split))
        if split == "test":
            apart = {kind: self._divergence(model, kind, split) for kind in self.data.kinds}
            found |= {f"kl_{name}": value for name, value in parted(apart).items()}
        return found

    def _divergence(self, model: Any, kind: str, split: str) -> float:
        return divergence(self.loaded("target"), model, self.data.held_out(kind, split), self.settings.context)

    def _judged(self, model: Any) -> dict[str, Any]:
        texts, scores = self._score(model, "test")
        return {**self._distances(model, "test"), **self._toxicity(texts, scores), "loss": self._losses(model, "test")}

    def _scorer_quality(self) -> dict[str, Any]:
        assert self.run.data_dir is not None
        folder, threshold = text_folder(self.run.data_dir), self.settings.threshold
        found: dict[str, Any] = self.stage(
            "scorer",
            lambda _: scorer_quality(self.scorer, folder, threshold),
            settings={"data": self.run.made_of, "threshold": threshold},
        )
        return found

    def _train(self) -> dict[str, Any]:
        shape, model = self.settings.pretraining, self.run.model
        if shape is None:
            assert model is not None
            make = partial(models.keep_base, name=model)
            return {"base": self.stage("base", make, settings={"model": model})}
        found = {}
        for name, without in (("base", None), ("target", "toxic")):
            make = partial(models.pretrain, data=self.data, settings=self.settings, seed=self.seed, without=without)
            found[name] = self.stage(
                name,
                partial(make, device=self.run.device),
                settings={**self.given, "shape": asdict(shape), "without": without, "context": self.settings.context},
            )
        return found

    def _tune(self, name: str) -> dict[str, Any]:
        """The base tuned on the toxic comments, held by its curvature where the training has a strength."""
        training = self.settings.tunings[name]
        prior = self.path("curvature-base") / "curvature"

        def make(folder: Path) -> dict[str, Any]:
            held = gm.Curvature.load(prior) if training.strength else None
            return models.tune(folder, self.path("base"), self.data, training, self.seed, self.run.device, held)

        found: dict[str, Any] = self.stage(
            f"tuned-{name}",
            make,
            settings={**self.given, "training": asdict(training)},
            after=["base", "curvature-base"] if training.strength else ["base"],
        )
        return found

    def _curvature(self, name: str, model: str, kinds: Sequence[str], limit: int | None) -> dict[str, Any]:
        settings = self.settings

        def make(folder: Path) -> dict[str, Any]:
            return models.measure(folder, self.path(model), self.data, kinds, settings, self.run.device, limit)

        given = {**self.given, "settings": [settings.curvature_examples, settings.scale_curvature]}
        found: dict[str, Any] = self.stage(f"curvature-{name}", make, settings=given, after=[model])
        return found

    def _removal(self, name: str, unit: float) -> dict[str, Any]:
        """Sweep, choose, and test what was chosen; ``unit`` is the mean entry of the toxic comments' curvature."""
        settings = self.settings
        after = ["base", "curvature-base", f"tuned-{name}", f"curvature-{name}"]
        advised = self.stage(f"advice-{name}", partial(self._advice, name), after=after)
        swept = self.stage(
            f"sweep-{name}",
            lambda _: self._sweep(name, unit),
            settings={
                "strengths": settings.strengths,
                "dampings": settings.dampings,
                "budgets": settings.budgets,
                "refinements": settings.refinements,
                "tokens": settings.dev_tokens,
                "scorer": self.run.scorer,
                "prompts": settings.prompt_counts,
                **self.given,
            },
            after=after,
        )
        base, points = Point(**swept["base"]), [Point(**p) for p in swept["points"]]
        chosen = {
            method: {
                str(budget): asdict(choose([p for p in points if p.method == method], base, budget))
                for budget in settings.budgets
            }
            for method in METHODS
        }
        wanted = self._wanted(name, base, points, chosen, advised["damping"]).values()
        return {
            "unit": unit,
            "advice": advised,
            "sweep": swept,
            "chosen": chosen,
            "tested": [{**asdict(p), "rise": rise_of(p, base), "test": self._tested(name, p, after)} for p in wanted],
            "moved": self._moved(name),
        }

    def _moved(self, name: str) -> dict[str, float]:
        """How far fine-tuning went, beside the length of the base's weights."""

        def make(_: Path) -> dict[str, float]:
            task = self.task(name)
            return {"tuned": distance(task.tuned, task.base), "base": norm(task.base)}

        found: dict[str, float] = self.stage(f"moved-{name}", make, after=["base", f"tuned-{name}"])
        return found

    def _advice(self, name: str, folder: Path) -> dict[str, Any]:
        found = advice(
            self.path("base") / "model",
            self.path(f"tuned-{name}") / "model",
            self.path("curvature-base") / "curvature",
            self.path(f"curvature-{name}") / "curvature",
            self.settings.default_damping,
            folder / "merged",
        )
        shutil.rmtree(folder / "merged", ignore_errors=True)
        return found

    def _sweep(self, name: str, unit: float) -> dict[str, Any]:
        task = self.task(name)
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
        """What is tested: strength 1 plain, by default and as advised; what was chosen; the curves of the figure."""
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

        def make() -> Any:
            return model_with(self.loaded("base"), self.task(name).without(*point.key))

        stage = f"{name}-{point.method}-{point.strength:g}{damping}{scope}"
        return self._test(stage, make, {"removal": point.key}, after)

    def _test_of(self, name: str) -> Any:
        """The test of a model that is a stage."""
        return self._test(name, lambda: self.loaded(name), {}, [name])

    def _test(self, name: str, model: Callable[[], Any], given: dict[str, Any], after: Sequence[str]) -> Any:
        """Losses on test text, how toxic what it writes is, and how far it is from the target."""
        settings = self.settings
        return self.stage(
            f"test-{name}",
            lambda folder: self._measured(model(), folder),
            settings={
                **given,
                "scorer": self.run.scorer,
                "prompts": settings.prompt_counts,
                "tokens": settings.test_tokens,
                "new": settings.new_tokens,
                "top_p": settings.top_p,
                "threshold": settings.threshold,
                **self.given,
            },
            after=[*after, *self._untuned[1:]],
        )

    def _score(self, model: Any, split: str) -> tuple[list[str], Any]:
        """What the model writes after the prompts of a split, and how toxic each is."""
        settings = self.settings
        texts = continuations(
            model,
            self.data.tokenizer,
            [p["text"] for p in self.prompts[split]],
            new_tokens=settings.new_tokens,
            top_p=settings.top_p,
            batch=settings.generation_batch,
            seed=self.seed,
        )
        return texts, np.array(self.scorer(texts))

    def _measured(self, model: Any, folder: Path) -> dict[str, Any]:
        settings = self.settings
        texts, scores = self._score(model, "test")
        (folder / "continuations.json").write_text(json.dumps([*zip(texts, scores.tolist(), strict=True)], indent=0))
        found = {"loss": self._losses(model, "test"), **self._toxicity(texts, scores)}
        if settings.pretraining is not None:
            found["divergence"] = {kind: self._divergence(model, kind, "dev") for kind in self.data.kinds}
        return found

    def _toxicity(self, texts: Sequence[str], scores: Any) -> dict[str, Any]:
        threshold, toxic = self.settings.threshold, np.array([p["toxic"] for p in self.prompts["test"]])
        found = {"mean": float(scores.mean()), "share": float((scores >= threshold).mean())}
        for kind, these in (("toxic", toxic), ("mild", ~toxic)):
            if these.any():
                found[f"share_{kind}_prompts"] = float((scores[these] >= threshold).mean())
        return {"toxicity": found, "distinct": distinct(texts)}


def parted(values: Mapping[str, float]) -> dict[str, float]:
    """`kept`, the mean over kinds of text that stay, and `forget`."""
    stay = [value for kind, value in values.items() if kind != "toxic"]
    return {"kept": sum(stay) / len(stay), "forget": values["toxic"]}


def rise_of(point: Point, base: Point) -> float | None:
    """The rise of validation perplexity, where the point was part of the sweep."""
    if not point.loss:
        return None
    found = rise(point, base)
    return found if math.isfinite(found) else None
