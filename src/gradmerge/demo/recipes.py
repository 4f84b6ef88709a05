"""The recipes: nine methods for a base and three tuned models, those with curvature among them, and the removals."""

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
    """The tuned models, each with its curvature or Gram matrices from the folder ``measured``."""
    models = {task: {"model": f"../models/{task}"} for task in TASKS}
    return [model | ({"curvature": f"../{measured}/{task}"} if measured else {}) for task, model in models.items()]


def merges(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name → recipe, as it stands in `recipes/`; options that are not named have their defaults."""
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
    """The same weight for every task."""
    models = [model | {"weight": weight} for model in _models()]
    return {"method": "task-arithmetic", "base": {"model": "../models/base"}, "models": models}


def negation() -> dict[str, Any]:
    """Removal by task arithmetic: the whole of what tuning on the removed task changed, subtracted."""
    return {
        "method": "task-arithmetic",
        "base": {"model": "../models/joint"},
        "models": [{"model": f"../models/joint-{REMOVED}", "weight": -1.0}],
    }


def removal() -> dict[str, Any]:
    """Removal with curvature: of the joint model on the data that stays, and of the tuned one on what goes."""
    return {
        "method": "removal",
        "base": {"model": "../models/joint", "curvature": "../curvature/joint-rest"},
        "models": [{"model": f"../models/joint-{REMOVED}", "curvature": f"../curvature/joint-{REMOVED}"}],
    }


def write_recipe(path: Path, recipe: dict[str, Any], out: str) -> None:
    """A recipe file that opens with the command that runs it."""
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# gradmerge merge {path.as_posix()} -o {out} --force\n{text}", "utf-8")
