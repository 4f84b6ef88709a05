"""The commands that repeat each step, to be run in the folder of the demonstration."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .demo_settings import BASE, REMOVED, TASKS, Settings
from .recipes import CALIBRATED, DISTILLED, INFLUENCE, MATCHING, NEGATION, REMOVAL

Command = list[str]


class EstimateRun(NamedTuple):
    """Curvature of a model on the training images of a task."""

    out: str
    model: str
    data: str
    options: Mapping[str, Any] = {}
    """By their names in Python."""


CURVATURE = [
    EstimateRun("curvature/base", "base", BASE),
    *(EstimateRun(f"curvature/{task}", task, task) for task in TASKS),
]
#: What only RegMean and FA1 use.
EXTRA = [EstimateRun(f"gram/{task}", task, task, {"kind": "gram"}) for task in TASKS]
EXTRA += [
    EstimateRun(f"curvature-at-delta/{task}", task, task, {"at_delta": "models/base", "task": "image"})
    for task in TASKS
]
FOR_REMOVAL = [
    EstimateRun("curvature/joint-rest", "joint", "rest"),
    EstimateRun(f"curvature/joint-{REMOVED}", f"joint-{REMOVED}", REMOVED),
]


def data_of(split: str) -> dict[str, str]:
    """The data of the base and every task."""
    return {"base": f"data/{BASE}.npz:{split}"} | {task: f"data/{task}.npz:{split}" for task in TASKS}


def _data(split: str) -> list[str]:
    return [word for name, source in data_of(split).items() for word in ("--data", f"{name}={source}")]


def estimate(asked: EstimateRun) -> Command:
    words = f"gradmerge curvature estimate models/{asked.model} --data data/{asked.data}.npz:train".split()
    more = [word for name, value in asked.options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*words, "--batch-size", "64", *more, "-o", asked.out, "--force"]


def merge(name: str, out: str) -> Command:
    return ["gradmerge", "merge", f"recipes/{name}.yml", "-o", out, "--force"]


def preview(settings: Settings) -> Command:
    words = f"gradmerge preview recipes/{MATCHING}.yml --methods gradient-matching,task-arithmetic".split()
    words += ["--weights", settings.weights, *_data("valid")]
    return [*words, "--batch-size", "64", "-o", "preview", "--force"]


def diagnose() -> Command:
    words = f"gradmerge diagnose recipes/{MATCHING}.yml --target models/joint".split()
    return [*words, *_data("train"), "--batch-size", "64", "-o", "diagnose", "--force"]


def calibrate(settings: Settings) -> Command:
    return _improve("calibrate", f"merged/{MATCHING}", CALIBRATED, settings, 64)


def distill(settings: Settings) -> Command:
    return _improve("distill", f"improved/{CALIBRATED}", DISTILLED, settings, 16)


def _improve(command: str, start: str, out: str, settings: Settings, batch_size: int) -> Command:
    words = ["gradmerge", command, start, *_data("train"), "--teacher", "base=models/base"]
    more = f"--limit {settings.unlabeled} --batch-size {batch_size} -o improved/{out} --force"
    return [*words, *more.split()]


def remove() -> Command:
    model = f"models/joint-{REMOVED}"
    measured = f"--curvature base=curvature/joint-rest --curvature {model}=curvature/joint-{REMOVED}"
    return f"gradmerge remove --base models/joint --model {model} {measured} -o removed/{REMOVAL} --force".split()


def influence() -> Command:
    data = f"--forget data/{REMOVED}.npz:train --retain data/rest.npz:train --budget 40% --batch-size 128"
    return f"gradmerge remove --base models/joint {data} -o removed/{INFLUENCE} --force".split()


def evaluate(model: str, task: str) -> Command:
    return ["gradmerge", "evaluate", model, "--data", f"data/{task}.npz:test", "--batch-size", "64"]


def all_commands(merged: Sequence[str], settings: Settings) -> dict[str, list[Command]]:
    """What is done → the commands that do it again, in an order in which they can be run."""
    taken_out = [
        *map(estimate, FOR_REMOVAL),
        remove(),
        merge(NEGATION, f"removed/{NEGATION}"),
        influence(),
        evaluate(f"removed/{INFLUENCE}", REMOVED),
    ]
    return {
        "Estimate curvature": [*map(estimate, CURVATURE)],
        "Estimate what only RegMean and FA1 use": [*map(estimate, EXTRA)],
        "Try weights on validation images": [preview(settings)],
        "Merge": [merge(name, f"merged/{name}") for name in merged],
        "Improve the merge on unlabeled images": [calibrate(settings), distill(settings)],
        "Evaluate on test images (other models and tasks in the same way)": [
            evaluate(f"merged/{MATCHING}", task) for task in (BASE, *TASKS)
        ],
        "Say what the merge costs": [diagnose()],
        f"Take {REMOVED} out of the joint model": taken_out,
    }


def finding() -> str:
    """Lets a shell find `gradmerge` in an environment that is not activated."""
    return f'export PATH="$PATH":{shlex.quote(str(Path(sys.executable).parent))}'


def script(commands: dict[str, list[Command]]) -> str:
    """A shell script of all commands."""
    about = "Repeats what `gradmerge demo` did with its trained models, step by step; results are replaced by the same"
    lines = ["#!/bin/sh", f"# {about}, up to rounding.", 'set -eu\ncd "$(dirname "$0")"', finding()]
    for what, several in commands.items():
        lines += ["", f"# {what}", *(shlex.join(command) for command in several)]
    return "\n".join(lines) + "\n"


def highlights(commands: dict[str, list[Command]]) -> list[Command]:
    """One command of every kind."""
    found: dict[str, Command] = {}
    for command in itertools.chain(*commands.values()):
        if command[1] != "merge" or MATCHING in command[2]:
            found.setdefault(command[1], command)
    return list(found.values())
