"""Commands that are killed at work: OUT is absent, the old one or the whole new one, and the work can be resumed."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import gradmerge as gm
from gradmerge.api.estimate import estimate_curvature
from gradmerge.errors import GradmergeError
from tests.making import near, random_curvature, random_state, write_model

from .killing import kill_before_change
from .refinement import TEXTS, write_refinement_inputs
from .trial import Broken, command, files_in, write_files

#: Seconds that a command may take; it is killed then, and counted as a failure.
PATIENCE = 120.0

#: Of a command that was not killed after all.
ENDED = "ended before"

Content = dict[str, Any]


class Scenario:
    """A command that takes a moment: what it reads, and what its output must be."""

    name: ClassVar[str]
    resumes: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        self.root, self.inputs, self.out = root, root / "in", root / "out" / "out"
        self.inputs.mkdir(parents=True)
        self.out.parent.mkdir()
        os.chdir(self.inputs)
        self.make()
        self.before = files_in(self.inputs)
        finish(lambda: self.run(old=True), self.out)
        self.old = files_in(self.out)
        self.clear()
        begun = time.monotonic()
        self.changes = finish(self.run, self.out).changes
        self.seconds = time.monotonic() - begun
        self.want = self.content()
        self.clear()

    def make(self) -> None:
        base = random_state(0, {f"layers.{i}.weight": (400, 64) for i in range(24)}, torch.bfloat16)
        for name, state in (("base", base), ("a", near(base, 1)), ("b", near(base, 2))):
            write_model(Path(name), state, 2)
            random_curvature(3, state).save(Path(name) / "curvature")
        recipe = {"method": "gradient-matching", "base": "base", "models": ["a", {"model": "b", "weight": 0.5}]}
        Path("recipe.yml").write_text(json.dumps(recipe))

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        """The command itself; ``old`` gives another output than it will have."""
        raise NotImplementedError

    def content(self) -> Content:
        """What of the output is the same every time."""
        return {str(n): c for n, c in files_in(self.out).items() if n.name != "gradmerge.json"}

    def same(self, found: Content) -> bool:
        return found == self.want

    def clear(self) -> None:
        import shutil

        for child in self.out.parent.iterdir():
            shutil.rmtree(child)


class Merge(Scenario):
    name = "merge"

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        recipe = {"method": "ties", "base": "base", "models": ["a", "b"], "options": {"density": 0.2 if old else 0.4}}
        recipe["output"] = {"shard_size": 200_000}
        gm.merge(recipe, self.out, threads=2, block=2048, force=force, resume=resume)


class Remove(Scenario):
    name = "remove"

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        strength = 0.02 if old else 0.01
        models = [{"model": "a", "weight": strength}]
        recipe = {"method": "removal", "base": "base", "models": models, "damping": 1.0}
        gm.merge(recipe, self.out, threads=2, block=1024, force=force, resume=resume)


class Command(Scenario):
    """One that is started as on the command line, and is not gone on with."""

    resumes = False
    words: ClassVar[list[str]]
    other: ClassVar[list[str]]

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        options = [*(self.other if old else []), *(["--force"] if force else [])]
        command(*self.words, *options, "--threads", "1", "-o", str(self.out))

    def content(self) -> Content:
        """Numbers as they are; the page, which says when it was made, by its end."""
        return {str(n): c if n.suffix != ".html" else c.rstrip()[-7:] for n, c in files_in(self.out).items()}


class Preview(Command):
    name = "preview"
    words: ClassVar = ["preview", "recipe.yml", "--methods", "gradient-matching,task-arithmetic"]
    other: ClassVar = ["--weights", "0:1:0.5"]


class Diagnose(Command):
    name = "diagnose"
    words: ClassVar = ["diagnose", "recipe.yml"]
    other: ClassVar = ["--merged", "a"]


class Estimate(Scenario):
    name = "curvature estimate"

    def make(self) -> None:
        from tests.tasks.making import labelled, tiny_bert_checkpoint, write_jsonl

        tiny_bert_checkpoint(Path("bert"))
        write_jsonl(Path("data.jsonl"), labelled(120))

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        options = {"limit": 8 if old else None, "batch_size": 4, "device": "cpu", "save_every": 0.05}
        estimate_curvature("bert", "data.jsonl", out=self.out, force=force, resume=resume, **options)

    def content(self) -> Content:
        return {**gm.Curvature.load(self.out), "examples": gm.Curvature.load(self.out).examples}

    def same(self, found: Content) -> bool:
        """Sums that were added in another order may differ in the last bits."""
        return found.keys() == self.want.keys() and all(
            bool(((torch.as_tensor(v) - found[n]).abs() <= 1e-5 * torch.as_tensor(v).abs().max()).all())
            for n, v in self.want.items()
        )


class Calibrate(Scenario):
    name = "calibrate"
    resumes = False

    def make(self) -> None:
        write_refinement_inputs()

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        data = {name: f"{name}.jsonl" for name in TEXTS}
        settings = {"curvature": "none", "alpha": 1.0 if old else 0.25, "cache_memory": 1}
        gm.calibrate("merged", data, out=self.out, force=force, device="cpu", progress=False, **settings)

    def content(self) -> Content:
        """The page says when it was made, so that only its end is compared."""
        return {name: c if name != "report.html" else c.rstrip()[-7:] for name, c in super().content().items()}


class Distill(Calibrate):
    name = "distill"

    def run(self, *, old: bool = False, force: bool = False, resume: bool = False) -> None:
        data = {name: f"{name}.jsonl" for name in TEXTS}
        gm.distill("merged", data, out=self.out, steps=2 if old else 6, force=force, device="cpu", progress=False)


SCENARIOS: list[type[Scenario]] = [Merge, Remove, Estimate, Preview, Diagnose, Calibrate, Distill]


@dataclass
class Ended:
    """How a process ended; the status of one that was killed is None."""

    status: int | None
    message: str
    changes: int


def in_child(action: Callable[[], None], out: Path, *, at: int | None = None, delay: float | None = None) -> Ended:
    """Run something in a process that is killed after ``delay`` seconds or before its ``at``-th change on disk."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status, message, changes = 0, "", lambda: 0
        try:
            os.close(reads)
            changes = kill_before_change(str(out), at)
            action()
        except GradmergeError as error:
            status, message = error.status, str(error)
        except BaseException:
            status, message = 70, traceback.format_exc()
        finally:
            os.write(writes, json.dumps([status, message[-3000:], changes()]).encode())
            os._exit(0)
    os.close(writes)
    deadline = time.monotonic() + (PATIENCE if delay is None else delay)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.0005)
    with os.fdopen(reads, "rb") as file:
        said = file.read()
    return Ended(*json.loads(said)) if said else Ended(None, "killed", 0)


def finish(action: Callable[[], None], out: Path) -> Ended:
    """Run something that must end well."""
    ended = in_child(action, out)
    if ended.status != 0:
        raise Broken(f"ended with status {ended.status}: {ended.message}")
    return ended


def kill_once(scenario: Scenario, rng: random.Random) -> str:
    """Kill the command once, look at what is there, and go on: what was there, in a word."""
    force = rng.random() < 0.5
    if force:
        write_files(scenario.out, scenario.old)
    how: dict[str, Any] = {"delay": rng.random() * scenario.seconds}
    if rng.random() < 0.5:
        how = {"at": rng.randint(1, scenario.changes)}
    ended = in_child(lambda: scenario.run(force=force), scenario.out, **how)
    if ended.status not in (None, 0):
        raise Broken(f"ended with status {ended.status}: {ended.message}")
    found = _found(scenario, force)
    if ended.status == 0 and found != "new":
        raise Broken(f"the command ended well, but what is there is {found}")
    _check_unlocked(scenario)
    if found != "new" or (scenario.resumes and scenario.name != Estimate.name):
        finish(lambda: scenario.run(force=force, resume=scenario.resumes), scenario.out)
    elif force:
        finish(lambda: scenario.run(force=True), scenario.out)
    if not scenario.same(scenario.content()):
        raise Broken("another result than that of an undisturbed run")
    left = sorted(path.name for path in scenario.out.parent.iterdir())
    if left != ["out"]:
        raise Broken(f"left behind: {', '.join(left)}")
    if files_in(scenario.inputs) != scenario.before:
        raise Broken("the inputs were changed")
    return ENDED if ended.status == 0 else found


def _found(scenario: Scenario, force: bool) -> str:
    replaced = scenario.out.with_name("out.gradmerge-replaced")
    if not scenario.out.exists():
        if force and (not replaced.exists() or files_in(replaced) != scenario.old):
            raise Broken("the old folder is lost")
        return "moved" if force else "nothing"
    if force and files_in(scenario.out) == scenario.old:
        return "old"
    if not scenario.same(scenario.content()):
        raise Broken("OUT is neither the old folder nor the whole new one")
    return "new"


def _check_unlocked(scenario: Scenario) -> None:
    partial = scenario.out.with_name("out.gradmerge-partial")
    if partial.exists():
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Broken("a lock remains") from error
        finally:
            os.close(descriptor)


def _share(arguments: tuple[list[type[Scenario]], int, int, int, int, Path, Path]) -> dict[str, Counter[str]]:
    """The kills of one process: every ``processes``-th, from ``first`` on."""
    kinds, first, kills, processes, seed, root, failures = arguments
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    scenarios: dict[str, Scenario] = {}
    for number in range(first, kills, processes):
        # Not number % len(kinds) alone: every process has its share of all scenarios.
        kind = kinds[number // processes % len(kinds)]
        if kind.name not in scenarios:
            scenarios[kind.name] = kind(root / f"kills-{first}" / kind.name)
        scenario = scenarios[kind.name]
        os.chdir(scenario.inputs)
        rng = random.Random(f"{seed}/{kind.name}/{number}")
        try:
            # A command that ends before its time has come is no kill.
            while (what := kill_once(scenario, rng)) == ENDED:
                counts.setdefault(kind.name, Counter())[ENDED] += 1
                scenario.clear()
        except Exception as error:
            what = "failures"
            print(f"kill {number}, {kind.name}: {error}", flush=True)
            failures.mkdir(parents=True, exist_ok=True)
            (failures / f"kill-{number}.txt").write_text(traceback.format_exc())
        counts.setdefault(kind.name, Counter())[what] += 1
        scenario.clear()
    return counts


def run_kills(
    names: list[str], kills: int, seed: int, processes: int, root: Path, failures: Path
) -> dict[str, dict[str, int]]:
    """Kill so many processes of the commands in ``names``, or of all; for each, what was under OUT afterwards."""
    total: dict[str, Counter[str]] = {}
    kinds = [kind for kind in SCENARIOS if not names or kind.name in names]
    if kills and kinds:
        # What every process would import by itself.
        import gradmerge.api.calibrate
        import gradmerge.api.diagnose
        import gradmerge.api.distill
        import gradmerge.api.preview
        import gradmerge.cli.app  # noqa: F401

        shares = [(kinds, first, kills, processes, seed, root, failures.absolute()) for first in range(processes)]
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            for counts in pool.map(_share, shares, chunksize=1):
                for name, counter in counts.items():
                    total[name] = total.get(name, Counter()) + counter
    words = ("nothing", "old", "moved", "new", "failures", ENDED)
    return {name: {"kills": c.total() - c[ENDED], **{w: c[w] for w in words}} for name, c in total.items()}
