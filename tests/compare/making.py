"""Recipes, models and plans over state dicts, in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertForSequenceClassification

import gradmerge as gm
from gradmerge.checkpoints.checkpoint import Checkpoint
from gradmerge.compare.candidates import Candidate, derive_plan
from gradmerge.compare.settings import Setting, make_setting, recipe_with
from gradmerge.engine.inputs import CurvatureInput, Inputs
from gradmerge.engine.plan import Plan, make_plan
from gradmerge.engine.settings import LayerRange, LayerSettings
from gradmerge.recipe import make_recipe

from ..making import random_curvature, three_models

State = Mapping[str, Tensor]


def memory_plan(
    states: Sequence[State],
    curvature: Sequence[State],
    weights: Sequence[float],
    damping: float,
    penalty: Sequence[State | None] = (),
) -> Plan:
    """A plan that reads state dicts and their curvature, those of the base first; penalties as a recipe gives them."""
    base, *tuned = [Checkpoint(f"model {i}", memory=dict(state)) for i, state in enumerate(states)]
    inputs = Inputs(
        template=base,
        base=base,
        tuned=tuned,
        settings=LayerSettings.over(base.tensors, LayerRange(weights, None, {})),
        prior=CurvatureInput("prior", memory=curvature[0]),
        curvature=[CurvatureInput(f"curvature {i}", memory=c) for i, c in enumerate(curvature[1:])],
        penalty=[None if p is None else CurvatureInput(f"penalty {i}", memory=p) for i, p in enumerate(penalty)],
        damping=damping,
    )
    return make_plan(memory_recipe(weights, damping), inputs)


def memory_recipe(weights: Sequence[float], damping: float) -> gm.Recipe:
    models = [{"model": "model", "weight": weight} for weight in weights]
    return make_recipe({"method": "gradient-matching", "base": "base", "models": models, "damping": damping})


def candidates(
    plan: Plan, weights: Sequence[float], damping: float, merges: Mapping[str, Mapping[str, Any]]
) -> dict[str, Candidate]:
    """Name → a merge with these keys, on the inputs of a plan as of :func:`memory_plan`."""
    recipe = memory_recipe(weights, damping)
    settings = {name: make_setting(recipe, keys["method"], keys) for name, keys in merges.items()}
    return {name: derive_plan(plan, recipe_with(recipe, setting)) for name, setting in settings.items()}


def setting(method: str, weights: Sequence[float] = (), changes: Mapping[str, Any] | None = None) -> Setting:
    keys = {f"models.{i}.weight": weight for i, weight in enumerate(weights)}
    return Setting({"method": method, **keys, **(changes or {})})


def two_tasks(weights: Sequence[float] = (1.0, 1.0), method: str = "task-arithmetic") -> gm.Recipe:
    models = [{"model": name, "weight": weight} for name, weight in zip(("x/a", "x/b"), weights, strict=True)]
    return make_recipe({"method": method, "base": "x/base", "models": models})


class ThreeModels:
    """A base and two tuned models in float64, with curvature of unequal numbers of examples."""

    def __init__(self, path: Path, **keys: Any) -> None:
        self.path = path
        (self.base, self.a, self.b), self.states = three_models(path, torch.float64)
        self.examples = [100, 40, 250]
        self.curvature = []
        for seed, (name, state, count) in enumerate(zip(("base", "a", "b"), self.states, self.examples, strict=True)):
            curvature = random_curvature(seed + 20, state, count)
            curvature.save(path / f"{name}-curvature")
            self.curvature.append({n: v.double() for n, v in curvature.items()})
        self.recipe: dict[str, Any] = {
            "method": "gradient-matching",
            "base": {"model": str(self.base), "curvature": str(path / "base-curvature")},
            "models": [
                {"model": str(path / name), "curvature": str(path / f"{name}-curvature"), "weight": weight}
                for name, weight in (("a", 1.0), ("b", 0.5))
            ],
            "damping": 0.01,
        } | keys

    def merged(self, method: str, weights: Sequence[float]) -> dict[str, Tensor]:
        base, tuned = self.states[0], self.states[1:]
        merged: dict[str, Tensor] = {}
        for name, start in base.items():
            prior = self.curvature[0][name] + 0.01
            hs = [c[name] for c in self.curvature[1:]]
            whole = prior + sum(w * h for w, h in zip(weights, hs, strict=True))
            total = start.clone()
            for model, h, weight in zip(tuned, hs, weights, strict=True):
                share = (prior + h) / whole if method == "gradient-matching" else torch.ones_like(whole)
                total += weight * share * (model[name] - start)
            merged[name] = total
        return merged

    def predicted(self, merged: State) -> list[float]:
        """½ Σ H (θ − θ_t)² / N of a, b and the base."""
        values = []
        for i in (1, 2, 0):
            sums = [0.5 * float((self.curvature[i][n] * (merged[n] - self.states[i][n]) ** 2).sum()) for n in merged]
            values.append(sum(sums) / self.examples[i])
        return values


def summed_gradient(folder: Path, rows: Path) -> dict[str, Tensor]:
    """∇Σ ℓ_i of a BERT by hand, one example at a time, in float64."""
    model = BertForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        loss = model(**tokenizer(row["text"], return_tensors="pt"), labels=torch.tensor([row["label"]])).loss
        for name, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            total[name] += g
    return total
