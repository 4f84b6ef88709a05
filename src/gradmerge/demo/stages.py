"""Steps of work that are kept once they are done, so that a run can be repeated, or go on after it was killed.

The demonstration and the experiments share them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError

RECORDS = ".stages"
LOCK = ".gradmerge-demo.lock"

Advance = Callable[[int], None]


class Stages:
    """The stages of a folder: each a file or a folder under its name, and a record in ``.stages/``.

    The record has the stage's result, how long it took, and a digest of its settings, of the versions of packages, and
    of the stages that it stands on. While the digest is the same and the file or folder is there, it is not made again.
    """

    def __init__(
        self, folder: Path, *, versions: Any = None, force: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.folder, self.versions = folder, versions
        self.made: dict[str, float] = {}
        """What was made just now, and the seconds it took."""
        self._force, self._say = force, say
        self._digests: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def digest(self, name: str) -> str:
        """Of a stage that was run."""
        return self._digests[name]

    def seconds(self) -> dict[str, float]:
        """How long each stage took, whenever that was."""
        return {name: self._read(name)["seconds"] for name in self._digests}

    def run(self, name: str, make: Callable[[Path], Any], *, given: Any = None, after: Sequence[str] = ()) -> Any:
        """The result of a stage (JSON), from disk or by ``make(folder)``, which leaves its files in ``folder``.

        The folder appears under the stage's name when it is finished. A stage that was interrupted finds its unfinished
        folder again, and may go on from what is there. ``given`` is all that the stage depends on besides the stages
        named in ``after``, which must have been run before.
        """

        def fill(resumes: bool) -> Any:
            with whole_folder(self.path(name), resumes) as folder:
                return make(folder)

        return self._run(name, fill, given, after)

    def run_in_place(self, name: str, make: Callable[[], object], given: Any, after: Sequence[str]) -> None:
        """A stage whose ``make`` writes the file or folder itself: whole or not at all, in the place of an old one."""

        def work(resumes: bool) -> None:
            make()

        self._run(name, work, given, after)

    def _run(self, name: str, make: Callable[[bool], Any], given: Any, after: Sequence[str]) -> Any:
        """``make`` is called with whether unfinished work, if there is any, has the same settings."""
        facts = {"given": given, "versions": self.versions, "after": {need: self._digests[need] for need in after}}
        text = json.dumps([name, facts], sort_keys=True, default=str)
        digest = self._digests[name] = hashlib.sha256(text.encode()).hexdigest()
        found = {} if self._force else self._read(name)
        same = found.get("digest") == digest
        if same and "result" in found and self.path(name).exists():
            return found["result"]
        self._write(name, {"digest": digest})
        self._say(f"{self.folder.name}: {name} …")
        begun = time.perf_counter()
        result = json.loads(json.dumps(make(same)))
        seconds = self.made[name] = time.perf_counter() - begun
        self._write(name, {"digest": digest, **facts, "seconds": seconds, "result": result})
        self._say(f"{self.folder.name}: {name} done in {seconds:.0f} s")
        return result

    def _record(self, name: str) -> Path:
        return self.folder / RECORDS / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any]:
        """A stage's record; empty if there is none or it cannot be read, so that the stage is made again."""
        try:
            found = json.loads(self._record(name).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        write_text(self._record(name), json.dumps(record, indent=1, default=str) + "\n")


@dataclass(frozen=True)
class Stage:
    """One stage of a list of them: what it writes, what it stands on, and the settings that decide its result."""

    out: str
    """File or folder that appears when the stage is done; also its name."""
    make: Callable[[Advance], object]
    """Does the work; it must write ``out`` whole or not at all, replacing what is there."""
    needs: Sequence[str] = ()
    """Stages whose results it reads."""
    facts: Any = None
    """Settings, as JSON can write them."""
    steps: int = 1
    """How much of the progress it is: steps of training, or what takes as long."""
    told: bool = True
    """Whether it is worth a line when it is done."""


def run_all(stages: Stages, listed: Sequence[Stage], advance: Advance, say: Callable[[str], None]) -> int:
    """Make the stages of a list in their order; how many were there already."""
    told = end = 0

    def tell(steps: int) -> None:
        """Progress of a stage, which never goes beyond its number of steps."""
        nonlocal told
        steps = min(steps, end - told)
        told += steps
        advance(steps)

    for stage in listed:
        end += stage.steps
        stages.run_in_place(stage.out, partial(stage.make, tell), stage.facts, stage.needs)
        tell(stage.steps)
        if stage.told and stage.out in stages.made:
            say(f"{stage.out}: {stages.made[stage.out]:.1f} s")
    return len(listed) - len(stages.made)


@contextlib.contextmanager
def whole_folder(path: Path, resumes: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``path`` at the end; ``resumes`` keeps what was left unfinished."""
    unfinished = path.with_name(path.name + ".partial")
    if unfinished.exists() and not resumes:
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True, exist_ok=True)
    yield unfinished
    if path.exists():
        shutil.rmtree(path)
    unfinished.rename(path)


def write_text(path: Path, text: str) -> None:
    """Write a file beside its final place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".gradmerge-partial")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(path)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A folder of a demonstration, new or of an earlier run, for one process at a time."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; give another one with -o")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise InputError(f"{folder}: exists already and is no folder of a demonstration; give another one with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: another demonstration is writing to it; wait for it, or use -o") from error
        yield
