"""Progress from Python: a bar on a terminal or in a notebook if the work takes a while, and silence elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gradmerge import progress
from gradmerge.progress import BarProgress, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_a_notebook_has_one_line_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with stderr(notebook(), monkeypatch) as written, BarProgress("merges") as bar:
        for what in ("first", "second"):
            bar.begin(what, 2)
            bar.advance(2)
    assert "\x1b[1A" not in written.getvalue() and "second" in written.getvalue()
