"""The recipes of the demonstration: nine methods for a base and three fine-tuned models, and removals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .demo_settings import REMOVED, TASKS, Settings

TUNED = "task-arithmetic-tuned"
MATCHING = "gradient-matching"
CALIBRATED, DISTILLED = "calibrated", "distilled"
REMOVAL, NEGATION, INFLUENCE = "removal", "negation", "influence"


def _models(measured: str | None = None) -> list[dict[str, str]]:
    """Return the fine-tuned models, each with its curvature or Gram matrices from the folder ``measured``."""
    models = {task: {"model": f"../models/{task}"} for task in TASKS}
    return [model | ({"curvature": f"../{measured}/{task}"} if measured else {}) for task, model in models.items()]


def merges(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the recipes by their names in `recipes/`."""
    base = {"model": "../models/base"}
    measured = base | {"curvature": "../curvature/base"}
    return {
        "average": {"method": "average", "base": base, "models": _models()},
        "task-arithmetic": task_arithmetic(1.0),
        "sparse-finetuning": {"method": "sparse-finetuning", "base": base, "models": _models()},
        "ties": {"method": "ties", "base": base, "models": _models()},
        "dare": {"method": "dare", "base": base, "models": _models(), "options": {"seed": settings.seed}},
        "regmean": {"method": "regmean", "base": base, "models": _models("gram")},
        "fa1": {"method": "fa1", "base": measured, "models": _models("curvature-at-delta")},
        "fisher-averaging": {"method": "fisher-averaging", "base": base, "models": _models("curvature")},
        MATCHING: {"method": "gradient-matching", "base": measured, "models": _models("curvature")},
    }


def task_arithmetic(weight: float) -> dict[str, Any]:
    """Return task arithmetic with the same weight for every task."""
    models = [model | {"weight": weight} for model in _models()]
    return {"method": "task-arithmetic", "base": {"model": "../models/base"}, "models": models}


def negation() -> dict[str, Any]:
    """Return a removal by task arithmetic: subtract what fine-tuning on the removed task changed."""
    return {
        "method": "task-arithmetic",
        "base": {"model": "../models/joint"},
        "models": [{"model": f"../models/joint-{REMOVED}", "weight": -1.0}],
    }


def removal() -> dict[str, Any]:
    """Return a removal with curvature of the joint model on the retain set and of the tuned model on the forget set."""
    return {
        "method": "removal",
        "base": {"model": "../models/joint", "curvature": "../curvature/joint-rest"},
        "models": [{"model": f"../models/joint-{REMOVED}", "curvature": f"../curvature/joint-{REMOVED}"}],
    }


def write_recipe(name: str, recipe: dict[str, Any], out: str) -> None:
    """Write a recipe file that begins with the command that runs it."""
    path = Path("recipes", f"{name}.yml")
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# gradmerge merge {path.as_posix()} -o {out} --force\n{text}", "utf-8")
