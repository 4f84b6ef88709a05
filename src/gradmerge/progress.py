"""Report the progress of long work, and show it as a bar."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

#: Seconds of work before a bar appears by default.
DELAY = 1.0


@runtime_checkable
class Progress(Protocol):
    """Receives the progress of work in bytes, examples, batches or merges. A total of 0 is unknown."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        return

    def advance(self, amount: int) -> None:
        return


class NoProgress(Progress):
    """Shows nothing."""


NOWHERE = NoProgress()


class BarProgress:
    """A bar on stderr with rate and remaining time. It appears after ``delay`` seconds."""

    def __init__(self, unit: str = "bytes", delay: float = 0.0) -> None:
        from rich import progress as rich
        from rich.console import Console

        amounts: tuple[rich.ProgressColumn, ...] = (rich.DownloadColumn(), rich.TransferSpeedColumn())
        if unit != "bytes":
            amounts = (rich.MofNCompleteColumn(), rich.TextColumn(f"{unit}, {{task.fields[rate]:.3g}}/s"))
        columns = (rich.TextColumn("{task.description:<10}"), rich.BarColumn(), *amounts, rich.TimeRemainingColumn())
        # A notebook can only rewrite the last line, so it shows one task at a time as text.
        self._one_line = in_notebook()
        how: Any = {"force_terminal": True, "force_jupyter": False} if self._one_line else {}
        # A default bar leaves the standard output of the caller alone.
        self._bar = rich.Progress(*columns, console=Console(stderr=True, **how), redirect_stdout=not delay)
        self._task: rich.TaskID | None = None
        self._start = threading.Timer(delay, self._bar.start) if delay else None

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
    """Return whether stderr goes to a Jupyter kernel."""
    return type(sys.stderr).__module__.startswith("ipykernel")


@contextlib.contextmanager
def shown(progress: bool | Progress, unit: str = "bytes") -> Iterator[Progress]:
    """Yield the object that receives the progress. True is a delayed bar, on a terminal or in a notebook."""
    if progress is True and (on_terminal() or in_notebook()):
        with BarProgress(unit, DELAY) as bar:
            yield bar
    else:
        yield NoProgress() if isinstance(progress, bool) else progress
