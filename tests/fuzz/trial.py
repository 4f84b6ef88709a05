"""What every case must fulfill: a result or a refusal, in time and little memory, whole outputs, unchanged inputs."""

from __future__ import annotations

import contextlib
import io
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
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

import gradmerge
from gradmerge.errors import GradmergeError, InputError, MachineError

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
        self.root = root
        self.inputs = root / "in"
        self.out = root / "out" / "out"
        self.inputs.mkdir(parents=True)
        self.out.parent.mkdir()
        self._sealed: dict[Path, bytes] = {}
        self.changed: dict[Path, bytes] = {}
        self.prepared: dict[Path, bytes] = {}
        """Files that a case writes beside `out` before it begins."""

    def seal(self) -> None:
        """Remember the inputs as they are."""
        self._sealed = files_in(self.inputs)

    def original(self, name: str) -> bytes:
        return self._sealed[Path(name)]

    def put(self, name: str, content: bytes) -> None:
        """Change an input for one case."""
        self.changed[Path(name)] = content
        write_files(self.inputs, {Path(name): content})

    def prepare(self, files: dict[Path, bytes]) -> None:
        """Write files beside `out`, where an earlier run would have left them."""
        self.prepared = files
        write_files(self.out.parent, files)

    def check_inputs(self) -> None:
        """Raise if an input changed that the case did not change."""
        found, want = files_in(self.inputs), self._sealed | self.changed
        if found != want:
            odd = sorted(str(p) for p in found.keys() | want.keys() if found.get(p) != want.get(p))
            raise Broken(f"the inputs were changed: {', '.join(odd)}")

    def restore(self) -> None:
        """Undo what the case did."""
        found = files_in(self.inputs)
        for name in found.keys() - self._sealed.keys():
            (self.inputs / name).unlink()
            with contextlib.suppress(OSError):  # of a folder that holds more
                (self.inputs / name).parent.rmdir()
        write_files(self.inputs, {n: c for n, c in self._sealed.items() if found.get(n) != c})
        self.changed, self.prepared = {}, {}
        self.clear_out()

    def clear_out(self) -> None:
        for child in self.out.parent.iterdir():
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def files_in(folder: Path) -> dict[Path, bytes]:
    found: dict[Path, bytes] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            found[path.relative_to(folder)] = path.read_bytes()
    return found


def write_files(folder: Path, files: dict[Path, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def check_model(folder: Path) -> None:
    """Raise if a folder under its final name is not a whole model, as the safetensors library reads it."""
    try:
        json.loads((folder / "gradmerge.json").read_text("utf-8"))
        if not (folder / "README.md").is_file():
            raise Broken("the result has no README.md")
        check_weights(folder, "model")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Broken(f"the result cannot be read: {type(error).__name__}: {error}") from error


def check_weights(folder: Path, stem: str) -> None:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        wanted = json.loads(index.read_text("utf-8"))["weight_map"]
    else:
        wanted = dict.fromkeys(_names_in(single), single.name)
    for file in set(wanted.values()):
        if {n for n, f in wanted.items() if f == file} != _names_in(folder / file):
            raise Broken(f"{file} of the result does not hold what its index says")


def _names_in(path: Path) -> set[str]:
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            for name in names:
                file.get_tensor(name)
            return names
    except (SafetensorError, AttributeError, TypeError):
        # A type that the library does not know, or not for PyTorch, may have been copied from an input.
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        entries = {n: e for n, e in header.items() if n != "__metadata__"}
        ends = max((e["data_offsets"][1] for e in entries.values()), default=0)
        if len(raw) != 8 + int.from_bytes(raw[:8], "little") + ends:
            raise
        return set(entries)


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
    stays_inside: ClassVar[bool] = False
    """Whether no input may make it open files elsewhere."""

    def __init__(self, place: Path) -> None:
        self.place = Place(place)
        (self.place.root / "secret.safetensors").write_bytes(b"not to be opened")
        with contextlib.chdir(self.place.inputs):
            self.make()
        self.place.seal()

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
        if out.exists() and not self.place.prepared:
            check_model(out)
            if outcome != WORKED:
                raise Broken("there is a result of a merge that failed")
        if partial.exists() and outcome != MACHINE and not self.place.prepared:
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
    for name, content in case.files.items():
        kind.place.put(name, content)
    if case.left is not None:
        kind.place.prepare(case.left)
    held = _memory("VmRSS")
    _forget_peak()
    try:
        with contextlib.chdir(kind.place.inputs), warnings.catch_warnings(), watched() as opened:
            warnings.simplefilter("ignore")
            outcome = _outcome(kind, case.how)
        memory = max(0, _memory("VmHWM") - held)
        with contextlib.chdir(kind.place.inputs):
            kind.place.check_inputs()
            kind.check(outcome)
        if kind.stays_inside and (outside := outside_of(kind.place.root, opened)):
            raise Broken(f"opened files elsewhere: {', '.join(outside)}")
        if memory > MOST_MEMORY:
            raise Broken(f"took {memory / 1e6:.0f} MB")
        return Result(outcome, memory)
    except TooLong as error:
        raise Broken(f"took more than {MOST_SECONDS:g} s") from error
    finally:
        kind.place.restore()


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


def outside_of(root: Path, paths: list[str]) -> list[str]:
    """Paths that are neither inputs nor outputs of a case, nor part of Python or the system."""
    here = root.resolve() / "in"
    known = (str(here), str(here.with_name("out")), "/proc/", "/sys/")
    far = [path for path in paths if not path.isdigit() and not os.path.realpath(here / path).startswith(known)]
    far = [path for path in far if path not in sys.path]  # which are listed when something is imported
    ours = str(Path(gradmerge.__file__).parent)
    far = [path for path in far if not path.startswith(ours)]
    return [path for path in far if not path.endswith((".py", ".pyc", ".so")) and "/lib/python" not in path]


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
    def ring(_: int, frame: FrameType | None) -> None:
        raise TooLong

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def command(*words: str) -> str:
    """Run the command line in this process as `gradmerge` does: its output, or the refusal that it printed."""
    from gradmerge.cli.app import main

    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        old, sys.argv = sys.argv, ["gradmerge", *words]
        try:
            main()
        except SystemExit as end:
            status = end.code
        finally:
            sys.argv = old
            for stream in (out, error):
                stream.flush()
    text, said = (s.buffer.getvalue().decode("utf-8", "replace") for s in (out, error))  # type: ignore[attr-defined]
    if status not in (0, 1, 2, None) or "Traceback" in said or "internal error" in said:
        raise RuntimeError(f"status {status}: {said[-2000:]}")
    if status == 2:
        raise InputError(said[:1000] or text[:1000] or "no message")
    if status == 1:
        raise MachineError(said[:1000] or "no message")
    return text


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory(what: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since the peak was forgotten; 0 where the system does not tell."""
    with contextlib.suppress(OSError), Path("/proc/self/status").open() as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(what)), 0)
    return 0
