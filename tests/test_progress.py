"""Progress from Python: a bar on a terminal or in a notebook if the work takes a while, and silence elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradmerge as gm
from gradmerge import progress
from gradmerge.progress import BarProgress, NoProgress, shown

from .making import three_models

BATCHES = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Told:
    """A progress of the caller's own."""

    def __init__(self) -> None:
        self.began: list[tuple[str, int]] = []
        self.done = 0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.began.append((what, total))

    def advance(self, amount: int) -> None:
        self.done += amount


@contextlib.contextmanager
def stderr(stream: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        yield stream


def work(how: Any, seconds: float) -> None:
    with shown(how, "batches") as told:
        told.begin("working", 4)
        for _ in range(4):
            time.sleep(seconds / 4)
            told.advance(1)


def notebook() -> Any:
    """Stderr as a Jupyter kernel has it: no terminal, but a page that shows it."""
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    return kind()


@pytest.mark.parametrize("stream", [Terminal, notebook], ids=["terminal", "notebook"])
def test_a_bar_appears_once_the_work_has_lasted(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.1)
    with stderr(stream(), monkeypatch) as written:
        work(True, 0.6)
    assert "working" in written.getvalue() and "4/4" in written.getvalue()


@pytest.mark.parametrize(
    ("how", "stream", "seconds"),
    [(True, Terminal, 0.0), (True, io.StringIO, 0.3), (False, Terminal, 0.3), (False, notebook, 0.3)],
    ids=["quick work", "a file", "not wanted", "not wanted in a notebook"],
)
def test_else_nothing_is_written(how: bool, stream: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.1)
    with stderr(stream(), monkeypatch) as written:
        work(how, seconds)
    assert not written.getvalue()


def test_a_process_without_stderr_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with stderr(None, monkeypatch):
        work(True, 0.0)


def test_a_notebook_has_one_line_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with stderr(notebook(), monkeypatch) as written, BarProgress("merges") as bar:
        for what in ("first", "second"):
            bar.begin(what, 2)
            bar.advance(2)
    assert "\x1b[1A" not in written.getvalue() and "second" in written.getvalue()


def test_what_is_printed_meanwhile_goes_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stderr(Terminal(), monkeypatch), BarProgress("merges", delay=0.01) as bar:
        bar.begin("working", 2)
        time.sleep(0.1)
        print("a result")
    assert capsys.readouterr().out == "a result\n"


def test_an_error_takes_the_bar_along(monkeypatch: pytest.MonkeyPatch) -> None:
    with stderr(Terminal(), monkeypatch) as written, pytest.raises(ZeroDivisionError), shown(True):
        _ = 1 / 0
    time.sleep(0.05)
    assert not written.getvalue()


def test_batches_are_counted() -> None:
    model = nn.Linear(3, 2)
    for kind in ("diagonal", "gram"):
        told = Told()
        gm.estimate_curvature(model, BATCHES, kind=kind, progress=told)
        assert told.began == [("estimating", 3)] and told.done == 3
    told = Told()
    gm.estimate_curvature(model, (batch for batch in BATCHES), progress=told)
    assert told.began == [("estimating", 0)] and told.done == 3


def test_a_merge_tells_who_asks(tmp_path: Path) -> None:
    folders, _ = three_models(tmp_path)
    told = Told()
    recipe = {"method": "average", "models": [str(path) for path in folders]}
    gm.merge(recipe, tmp_path / "out", progress=told)
    assert told.began[0][0] == "merging" and told.done == told.began[0][1]


def test_what_is_told_has_two_functions() -> None:
    assert isinstance(Told(), gm.Progress) and isinstance(NoProgress(), gm.Progress)
    assert not isinstance(types.SimpleNamespace(begin=print), gm.Progress)
