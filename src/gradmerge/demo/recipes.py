"""The recipes of the demonstration: merges of a base and three fine-tuned models, and removals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .demo_settings import REMOVED, TASKS

TUNED = "task-arithmetic-tuned"
MATCHING = "gradient-matching"
CALIBRATED, DISTILLED = "calibrated", "distilled"
REMOVAL, NEGATION, INFLUENCE = "removal", "negation", "influence"


def _recipe(method: str, measured: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a merge of all tasks; ``measured`` is the folder of the models' curvature or Gram matrices."""
    models = [
        {"model": f"../models/{task}"} | ({"curvature": f"../{measured}/{task}"} if measured else {}) | more
        for task in TASKS
    ]
    return {"method": method, "base": {"model": "../models/base"}, "models": models}


def merges() -> dict[str, dict[str, Any]]:
    """Return the merges by their names in `recipes/`."""
    matching = _recipe("gradient-matching", "curvature")
    matching["base"]["curvature"] = "../curvature/base"
    return {
        "average": _recipe("average"),
        "task-arithmetic": task_arithmetic(1.0),
        "ties": _recipe("ties"),
        "regmean": _recipe("regmean", "gram"),
        "fisher-averaging": _recipe("fisher-averaging", "curvature"),
        MATCHING: matching,
    }


def task_arithmetic(weight: float) -> dict[str, Any]:
    """Return task arithmetic with the same weight for every task."""
    return _recipe("task-arithmetic", weight=weight)


def removals() -> dict[str, dict[str, Any]]:
    """Return removals of the change that fine-tuning the joint model on the removed task makes."""
    joint, tuned = {"model": "../models/joint"}, {"model": f"../models/joint-{REMOVED}"}
    rest = {"curvature": "../curvature/joint-rest"}
    forget = {"curvature": f"../curvature/joint-{REMOVED}"}
    return {
        NEGATION: {"method": "task-arithmetic", "base": joint, "models": [tuned | {"weight": -1.0}]},
        REMOVAL: {"method": "removal", "base": joint | rest, "models": [tuned | forget]},
    }


def write_recipe(name: str, recipe: dict[str, Any], out: str) -> None:
    """Write a recipe file that begins with the command that runs it."""
    path = Path("recipes", f"{name}.yml")
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# gradmerge merge {path.as_posix()} -o {out} --force\n{text}", "utf-8")
