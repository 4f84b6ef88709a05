"""The commands that repeat each step, to be run in the folder of the demonstration."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .recipes import MATCHING, NEGATION, REMOVAL
from .settings import BASE, REMOVED, TASKS, Settings

Command = list[str]


def data_of(split: str) -> list[str]:
    """--data of the base and every task."""
    words = ["--data", f"base=data/{BASE}.npz:{split}"]
    for task in TASKS:
        words += ["--data", f"{task}=data/{task}.npz:{split}"]
    return words


def estimate(model: str, data: str, out: str, *more: str) -> Command:
    words = f"gradmerge curvature estimate models/{model} --data data/{data}.npz:train --batch-size 64".split()
    return [*words, *more, "-o", out, "--force"]


def merge(name: str, out: str) -> Command:
    return ["gradmerge", "merge", f"recipes/{name}.yml", "-o", out, "--force"]


def preview(settings: Settings) -> Command:
    words = f"gradmerge preview recipes/{MATCHING}.yml --methods gradient-matching,task-arithmetic".split()
    words += ["--weights", settings.weights, *data_of("valid")]
    return [*words, "--batch-size", "64", "-o", "preview", "--force"]


def diagnose() -> Command:
    words = f"gradmerge diagnose recipes/{MATCHING}.yml --target models/joint".split()
    return [*words, *data_of("train"), "--batch-size", "64", "-o", "diagnose", "--force"]


def remove(damping: float) -> Command:
    model = f"models/joint-{REMOVED}"
    measured = f"--curvature base=curvature/joint-rest --curvature {model}=curvature/joint-{REMOVED}"
    out = f"--set damping={damping:g} -o removed/{REMOVAL} --force"
    return f"gradmerge remove --base models/joint --model {model} {measured} {out}".split()


def evaluate(model: str, task: str) -> Command:
    return ["gradmerge", "evaluate", model, "--data", f"data/{task}.npz:test", "--batch-size", "64"]


def all_commands(merged: Sequence[str], settings: Settings, damping: float) -> dict[str, list[Command]]:
    """What is done → the commands that do it again, in an order in which they can be run."""
    measured = [estimate("base", BASE, "curvature/base")]
    measured += [estimate(task, task, f"curvature/{task}") for task in TASKS]
    grams = [estimate(task, task, f"gram/{task}", "--kind", "gram") for task in TASKS]
    at_delta = [
        estimate(task, task, f"curvature-at-delta/{task}", "--at-delta", "models/base", "--task", "image")
        for task in TASKS
    ]
    taken_out = [
        estimate("joint", "rest", "curvature/joint-rest"),
        estimate(f"joint-{REMOVED}", REMOVED, f"curvature/joint-{REMOVED}"),
        remove(damping),
        merge(NEGATION, f"removed/{NEGATION}"),
        evaluate(f"removed/{REMOVAL}", REMOVED),
    ]
    return {
        "Measure curvature": measured,
        "Measure what only RegMean and FA1 use": grams + at_delta,
        "Try weights on validation images": [preview(settings)],
        "Merge": [merge(name, f"merged/{name}") for name in merged],
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
    lines = [
        "#!/bin/sh",
        "# Repeats what `gradmerge demo` did with its trained models, step by step; results are replaced by the same, "
        "up to rounding.",
        'set -eu\ncd "$(dirname "$0")"',
        finding(),
    ]
    for what, several in commands.items():
        lines += ["", f"# {what}", *(shlex.join(command) for command in several)]
    return "\n".join(lines) + "\n"


def highlights(commands: dict[str, list[Command]]) -> list[Command]:
    """One command of every kind."""
    found: dict[tuple[str, ...], Command] = {}
    for several in commands.values():
        for command in several:
            if command[1] != "merge" or MATCHING in command[2]:
                found.setdefault(tuple(command[1:2]), command)
    return list(found.values())
