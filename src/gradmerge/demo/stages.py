"""Steps of work that are kept once they are done, so that a run can be repeated, or go on after it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

RECORD = ".gradmerge-demo.json"
LOCK = ".gradmerge-demo.lock"

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Stage:
    """One step: what it writes, what it stands on, and the settings that decide its result."""

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


class Stages:
    """The stages of a folder that are done, each with a digest of its settings and of all that it stands on."""

    def __init__(self, folder: Path, versions: Any, force: bool = False) -> None:
        self.folder, self.versions = folder, versions
        self._done: dict[str, str] = {} if force else _read(folder / RECORD)
        self._digests: dict[str, str] = {}

    def digest(self, stage: Stage) -> str:
        """Of the stage's settings, the versions of packages, and the stages before it."""
        text = json.dumps([stage.out, stage.facts, self.versions, [self._digests[need] for need in stage.needs]])
        return hashlib.sha256(text.encode()).hexdigest()

    def run(self, stages: Sequence[Stage], advance: Advance, say: Callable[[str], None]) -> int:
        """Make the stages in their order; how many were there already."""
        kept = 0
        for stage in stages:
            digest = self._digests[stage.out] = self.digest(stage)
            if self._done.get(stage.out) == digest and (self.folder / stage.out).exists():
                kept += 1
                advance(stage.steps)
                continue
            begun, told = time.perf_counter(), _Told(advance, stage.steps)
            stage.make(told.advance)
            told.finish()
            self._done[stage.out] = digest
            write_text(self.folder / RECORD, json.dumps({"stages": self._done}, indent=1) + "\n")
            if stage.told:
                say(f"{stage.out}: {time.perf_counter() - begun:.1f} s")
        return kept


class _Told:
    """Progress of one stage, which ends at its number of steps whatever was told on the way."""

    def __init__(self, advance: Advance, steps: int) -> None:
        self._advance, self._left = advance, steps

    def advance(self, steps: int) -> None:
        steps = min(steps, self._left)
        self._left -= steps
        self._advance(steps)

    def finish(self) -> None:
        self.advance(self._left)


def write_text(path: Path, text: str) -> None:
    """Write a file beside its final place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".gradmerge-partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A folder of a demonstration, new or of an earlier run, for one process at a time."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; give another one with -o")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise InputError(f"{folder}: exists already and is no folder of a demonstration; give another one with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: another demonstration is writing to it; wait for it, or use -o") from error
        yield
    finally:
        os.close(lock)


def _read(path: Path) -> dict[str, str]:
    """What an earlier run has recorded; nothing if there is none or it cannot be read, so that all is made again."""
    try:
        stages = json.loads(path.read_text("utf-8"))["stages"]
        return {str(name): str(digest) for name, digest in stages.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
