"""What long work tells of itself, and the bar that shows it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

#: Seconds of work before a bar appears that nobody asked for.
PATIENCE = 1.0


@runtime_checkable
class Progress(Protocol):
    """Told what is being done and how far it is, in bytes, examples, batches or merges; a total of 0 is unknown."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        return

    def advance(self, amount: int) -> None:
        return


class NoProgress(Progress):
    """Shows nothing."""


class BarProgress:
    """A bar on stderr with rate and time left, for terminals and notebooks; it appears ``after`` so many seconds."""

    def __init__(self, unit: str = "bytes", after: float = 0.0) -> None:
        from rich import progress as rich
        from rich.console import Console

        amounts: tuple[rich.ProgressColumn, ...] = (rich.DownloadColumn(), rich.TransferSpeedColumn())
        if unit != "bytes":
            amounts = (rich.MofNCompleteColumn(), rich.TextColumn(f"{unit}, {{task.fields[rate]:.3g}}/s"))
        columns = (rich.TextColumn("{task.description:<10}"), rich.BarColumn(), *amounts, rich.TimeRemainingColumn())
        # A notebook's page can go back to the start of a line but not up: text, and one line at a time.
        self._one_line = in_notebook()
        how: Any = {"force_terminal": True, "force_jupyter": False} if self._one_line else {}
        # Where nobody asked for the bar, what the caller prints meanwhile goes where it always goes.
        self._bar = rich.Progress(*columns, console=Console(stderr=True, **how), redirect_stdout=not after)
        self._task: rich.TaskID | None = None
        self._start = threading.Timer(after, self._bar.start) if after else None

    def begin(self, what: str, total: int, done: int = 0) -> None:
        if self._task is not None and self._one_line:
            self._bar.update(self._task, visible=False)
        self._task = self._bar.add_task(what, total=total or None, completed=done, rate=0.0)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, advance=amount, rate=self._bar.tasks[self._task].speed or 0.0)

    def __enter__(self) -> BarProgress:
        (self._start or self._bar).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None:
            self._start.cancel()
            self._start.join()
        if self._bar.live.is_started:
            self._bar.stop()


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether what is written to stderr goes to a Jupyter kernel."""
    return type(sys.stderr).__module__.startswith("ipykernel")


@contextlib.contextmanager
def shown(progress: bool | Progress, unit: str = "bytes") -> Iterator[Progress]:
    """What a function tells how far it is: True is a bar if it takes a while, on a terminal or in a notebook."""
    if progress is True and (on_terminal() or in_notebook()):
        with BarProgress(unit, PATIENCE) as bar:
            yield bar
    else:
        yield NoProgress() if isinstance(progress, bool) else progress
