"""What every case must fulfill: a result or a refusal, in time and little memory, whole outputs, unchanged inputs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from typer.testing import CliRunner

from gradmerge.errors import GradmergeError, InputError, MachineError
from gradmerge.io.reader import TensorFile

from .mutate import Draw

#: Seconds and bytes that one case may take; the slowest takes a tenth.
MOST_SECONDS = 20.0
MOST_MEMORY = 500_000_000
LONGEST_MESSAGE = 20_000

#: How a case may end. Everything else raises `Broken` or the exception itself.
WORKED, REFUSED, MACHINE = "worked", "refused", "machine"

#: Paths that a case opens, while they are watched.
_opened: list[str] | None = None


class Broken(Exception):
    """An output or an input is not what it should be."""


class TooLong(BaseException):
    """The case exceeds its time limit."""


class Place:
    """Inputs, which only a case may change, and where outputs go."""

    def __init__(self, root: Path) -> None:
        self.root, self.inputs, self.out = root, root / "in", root / "out" / "out"
        self.inputs.mkdir(parents=True)
        self.out.parent.mkdir()
        (root / "secret.safetensors").write_bytes(b"not to be opened")
        self.sealed: dict[Path, bytes] = {}
        """The valid inputs."""

    def original(self, name: str) -> bytes:
        return self.sealed[Path(name)]

    def prepare(self, files: dict[Path, bytes]) -> None:
        """Write files beside `out`, where an earlier run would have left them."""
        write_files(self.out.parent, files)

    def restore(self) -> None:
        """Undo what a case did. Other files keep their times, which fingerprints of merges contain."""
        found = files_in(self.inputs)
        for name in found.keys() - self.sealed.keys():
            (self.inputs / name).unlink()
        write_files(self.inputs, {name: held for name, held in self.sealed.items() if found.get(name) != held})
        self.clear_out()

    def clear_out(self) -> None:
        for child in self.out.parent.iterdir():
            shutil.rmtree(child)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_files(folder: Path, files: dict[Path, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def check_model(folder: Path) -> None:
    """Raise if a folder under its final name is not a whole model."""
    try:
        json.loads((folder / "gradmerge.json").read_text("utf-8"))
        (folder / "README.md").read_bytes()
        index = folder / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for file in files:
            TensorFile(folder / file).close()
    except (OSError, ValueError, KeyError, GradmergeError) as error:
        raise Broken(f"the result cannot be read: {type(error).__name__}: {error}") from error


@dataclass
class Case:
    """What differs from the valid inputs, and how they are read."""

    files: dict[str, bytes] = field(default_factory=dict)
    left: dict[Path, bytes] | None = None
    """Files beside `out`, as an earlier run would have left them."""
    how: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Kind.read`."""


class Kind:
    """One kind of input: its valid form, how it is mutated, and what reads it.

    Cases run in the folder of the inputs, which are named relative to it, so that a case does not depend on its place.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    """Of all cases, relative to the shares of the other kinds."""

    def __init__(self, place: Path) -> None:
        self.place = Place(place)
        with contextlib.chdir(self.place.inputs):
            self.make()
        self.place.sealed = files_in(self.place.inputs)

    def make(self) -> None:
        """Write the valid inputs into the working directory."""
        raise NotImplementedError

    def case(self, draw: Draw) -> Case:
        """A mutated input."""
        raise NotImplementedError

    def valid(self) -> Case:
        return Case()

    def read(self, **how: Any) -> None:
        """Read the inputs; with the default arguments, the valid ones must work."""
        raise NotImplementedError

    def check(self, outcome: str) -> None:
        """What must be true afterwards: by default, `out` is a model or absent, wrong input leaves no work behind."""
        out, partial = self.place.out, self.place.out.with_name("out.gradmerge-partial")
        if out.exists():
            check_model(out)
            if outcome != WORKED:
                raise Broken("there is a result of a merge that failed")
        if partial.exists() and outcome != MACHINE:
            raise Broken("unfinished work was left under OUT.gradmerge-partial")

    def cases(self) -> st.SearchStrategy[Case]:
        return st.composite(lambda draw: self.case(draw))()


class Result(NamedTuple):
    """How a case ended."""

    outcome: str
    memory: int
    """Bytes by which the process grew, at most."""


def run_case(kind: Kind, case: Case | None = None) -> Result:
    """Run a case, or the valid inputs. Raise `Broken` if it does what no case should do."""
    case = case if case is not None else kind.valid()
    place = kind.place
    changed = {Path(name): content for name, content in case.files.items()}
    write_files(place.inputs, changed)
    place.prepare(case.left or {})
    held = _memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    try:
        with contextlib.chdir(place.inputs), warnings.catch_warnings(), watched() as opened:
            warnings.simplefilter("ignore")
            outcome = _outcome(kind, case.how)
        memory = max(0, _memory("VmHWM") - held)
        if files_in(place.inputs) != place.sealed | changed:
            raise Broken("the inputs were changed")
        with contextlib.chdir(place.inputs):
            kind.check(outcome)
        if elsewhere := [path for path in opened if "secret" in path or path == "/etc/passwd"]:
            raise Broken(f"opened {elsewhere}")
        if memory > MOST_MEMORY:
            raise Broken(f"took {memory / 1e6:.0f} MB")
        return Result(outcome, memory)
    except TooLong as error:
        raise Broken(f"took more than {MOST_SECONDS:g} s") from error
    finally:
        place.restore()


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir"):
        _opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else str(arguments[0]))


@cache
def _add_hook() -> None:
    sys.addaudithook(_listen)  # for the life of the process; it does nothing outside of `watched`


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that are opened inside."""
    global _opened
    _add_hook()
    _opened = opened = []
    try:
        yield opened
    finally:
        _opened = None


def _outcome(kind: Kind, how: dict[str, Any]) -> str:
    with time_limit(MOST_SECONDS):
        try:
            kind.read(**how)
        except GradmergeError as error:
            if not 0 < len(str(error)) <= LONGEST_MESSAGE:
                raise Broken(f"a message of {len(str(error))} characters") from error
            return REFUSED if isinstance(error, InputError) else MACHINE
    return WORKED


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooLong

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def command(*words: str) -> str:
    """Run the command line in this process: its output, or the refusal that it printed."""
    from gradmerge.cli.app import app

    ended = CliRunner().invoke(app, list(words))
    if ended.exit_code == 0:
        return ended.output
    if ended.exit_code not in (1, 2) or "Traceback" in ended.output or "internal error" in ended.output:
        raise RuntimeError(f"status {ended.exit_code}: {ended.output[-2000:]}") from ended.exception
    raise (InputError if ended.exit_code == 2 else MachineError)(ended.output[:1000] or "no message")


def _memory(what: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since the peak was forgotten; 0 where the system does not tell."""
    with contextlib.suppress(OSError), Path("/proc/self/status").open() as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(what)), 0)
    return 0
