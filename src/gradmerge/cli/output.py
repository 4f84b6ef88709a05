"""Print results, tables, notes, progress and errors, without secrets and control characters."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import typer

from ..distributed import reports
from ..errors import GradmergeError, MachineError
from ..progress import BarProgress, NoProgress, Progress, on_terminal
from ..text import one_line, printable, size, to_json
from ..urls import redact

#: Standard output and error of a process that prints nothing.
_silenced: list[tuple[TextIO, TextIO]] = []


def prepare_streams() -> None:
    """Prepare standard output and error at the start of a process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # otherwise the next file, such as the weights, would get this number
    for stream in (sys.stdout, sys.stderr):
        if stream is sys.__stdout__ or stream is sys.__stderr__:  # not those of a test or notebook
            with contextlib.suppress(AttributeError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def silence() -> None:
    """Discard what is printed: in a run of several processes only the first prints."""
    _silenced.append((sys.stdout, sys.stderr))
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def unsilence() -> None:
    if _silenced:
        sys.stdout, sys.stderr = _silenced.pop()


def echo(text: str = "", *, err: bool = False) -> None:
    """Print lines with control characters made visible, on standard error with ``err``."""
    write(printable(text) + "\n", err=err)


def write(text: str, *, err: bool = False) -> None:
    """Print text without passwords and signatures of URLs. A failure of standard error is not raised."""
    stream: TextIO | None = sys.stderr if err else sys.stdout
    if stream is None:  # it was closed when Python started
        return
    try:
        stream.write(redact(text))
        stream.flush()
    except OSError:
        discard(stream)
        if not err:
            raise


def discard(stream: TextIO | None) -> None:
    """Discard what could not be written, so that it does not fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


@contextlib.contextmanager
def handle_errors(debug: bool, as_json: bool = False, parameters: Collection[str] = ()) -> Iterator[None]:
    """End an error with one message and its exit status: 2 for an invalid request, 1 for a failure. No traceback.

    Messages of the library name ``parameters``; the printed message names the options of the command instead.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        raise typer.Exit(1) from None
    except BaseException as error:
        message, status = explain(error)
        prints = reports(error)
        if debug or prints:
            unsilence()
        if debug:
            echo(traceback.format_exc().rstrip(), err=True)
        if prints:
            fail(with_options(message, parameters), status, as_json)
        raise typer.Exit(status) from None


def with_options(message: str, parameters: Collection[str]) -> str:
    """Replace `resume=True` by `--resume`, `rank=8` by `--rank 8`, and a name at the start by its option."""
    for name in parameters:
        option = "--" + name.strip("_").replace("_", "-")
        message = re.sub(rf"(?<![\w./-]){name}=True\b", option, message)
        message = re.sub(rf"(?<![\w./-]){name}='?(\w+)'?", rf"{option} \1", message)
        message = re.sub(rf"^{name}(?=:| \S+:)", option, message)
        if "_" in name:
            message = re.sub(rf"(?<![\w./-]){name}(?![\w./=])", option, message)
    return message


def fail(message: str, status: int, as_json: bool) -> None:
    """Print an error, and with ``as_json`` also a JSON object."""
    echo(f"error: {indented(message)}", err=True)
    if as_json:
        echo(to_json({"error": message, "status": status}, indent=None))


def indented(message: str) -> str:
    """Indent the lines after the first, so that a line feed in a name does not start another message."""
    return _NEXT_LINE.sub("\n  ", message)


# Compiled here because there may be no memory left later.
_NEXT_LINE = re.compile(r"\n(?=[^\s•])")
_NO_MEMORY = re.compile(
    "DefaultCPUAllocator|std::bad_alloc|can't start new thread|[Cc]annot allocate memory|failed to map segment"
    "|not enough memory"
)
OUT_OF_MEMORY = "out of memory. Try fewer --threads, a smaller --batch-size, or a higher limit (ulimit -v)."
TOO_MANY_FILES = "Raise the limit (ulimit -n), merge fewer models at once, or store them in fewer, larger files."
#: Failures of the machine, also if they led to an InputError.
_MACHINE_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def explain(error: BaseException) -> tuple[str, int]:
    """Return the message of an error, and the exit status."""
    for reason in _chain(error):
        if isinstance(reason, OSError) and reason.errno in (errno.EMFILE, errno.ENFILE):
            where = (
                str(error) if isinstance(error, GradmergeError) else f"{reason.filename or 'file'}: {reason.strerror}"
            )
            return f"{where.rstrip('.')}. {TOO_MANY_FILES}", 1
        if _is_memory(reason) and not isinstance(error, MachineError):
            return OUT_OF_MEMORY, 1
    if isinstance(error, GradmergeError):
        machine = any(isinstance(r, OSError) and r.errno in _MACHINE_FAILURES for r in _chain(error))
        return str(error), 1 if machine else error.status
    if isinstance(error, KeyboardInterrupt):
        return "interrupted. No result was written. If the command has --resume, it continues there.", 1
    # Of a GPU. Importing torch for the class would take a second.
    if type(error).__name__ == "OutOfMemoryError":
        return "out of memory on the device. Try a smaller --batch-size, or a smaller --max-length for texts.", 1
    if isinstance(error, OSError):
        return f"{error.filename or 'standard output'}: {error.strerror or error}", 1
    return f"internal error: {type(error).__name__}: {error}. Please report it with the output of --debug.", 1


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError | ImportError) and _NO_MEMORY.search(str(error)) is not None


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Import PyTorch without garbage collection, which would take a fifth of the time and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def print_json(value: Any) -> None:
    echo(to_json(value))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = (), digits: int = 4
) -> None:
    """Print a table. The columns in ``right`` are aligned to the right; floats have ``digits`` significant digits."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(one_line(column), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        cells = (
            f"{cell:.{digits}g}" if isinstance(cell, float) else "–" if cell is None else str(cell) for cell in row
        )
        table.add_row(*map(one_line, cells))
    width = None if sys.stdout is not None and sys.stdout.isatty() else 240
    console = Console(highlight=False, markup=False, width=width)
    with console.capture() as drawn:
        console.print(table)
    write(drawn.get())


def note(text: str, quiet: bool) -> None:
    """Print a note on standard error. ``quiet`` hides it, unless it is a warning."""
    if not quiet or getattr(text, "is_warning", False):
        echo(f"note: {indented(text)}", err=True)


def print_notes(texts: Iterable[str], quiet: bool) -> None:
    for text in texts:
        note(text, quiet)


def print_result(result: Any, printing: Any, **more: Any) -> bool:
    """Print a result as JSON, with more keys, or its notes. Return whether text about it follows."""
    if printing.json:
        print_json(result.to_dict() | more)
        return False
    print_notes(map(str, result.notes), printing.quiet)
    return not printing.quiet


def print_dry_run(job: Any, printing: Any) -> None:
    """Print what a job would do, and its size."""
    print_result(job, printing)
    for line in () if printing.json else job.lines():
        echo(line)


def print_verdict(sentences: Iterable[str]) -> None:
    """Print the sentences of a report, without their markup."""
    echo("\n" + "\n".join(one_line(text.replace("**", "").replace("`", "")) for text in sentences))


def typed() -> str:
    """Return the command line, for reports that tell how to repeat the command."""
    return redact(shlex.join(["gradmerge", *sys.argv[1:]]))


class Notes(logging.Handler):
    """Prints log records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage(), quiet=False)


@contextlib.contextmanager
def note_downloads(quiet: bool) -> Iterator[None]:
    """Print a note when a model or data are downloaded, which may take a while."""
    log = logging.getLogger("gradmerge.io.remote")
    handler = Notes(logging.CRITICAL if quiet else logging.WARNING)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


class PlainProgress(Progress):
    """Prints a line every few seconds, for logs."""

    every = 5.0

    def __init__(self, unit: str = "bytes") -> None:
        self._unit, self._lock = unit, threading.Lock()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._skipped = what, total, done, done
        self._begun = self._last = time.monotonic()

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._last < self.every:
                return
            self._last, total = now, max(self._total, self._done, 1)  # the total may be an estimate
            rate = max(self._done - self._skipped, 1) / (now - self._begun)
            amounts = f"{self._done} of {total} {self._unit}, {rate:.3g}"
            if self._unit == "bytes":
                amounts = f"{size(self._done)} of {size(total)}, {size(rate)}"
            left = (total - self._done) / rate
            echo(f"{self._what}: {100 * self._done / total:.0f} % ({amounts}/s, {left:.0f} s left)", err=True)


@contextlib.contextmanager
def progress(quiet: bool, unit: str = "bytes") -> Iterator[Progress]:
    """Show the progress of a command: a bar on a terminal, lines elsewhere, nothing with ``quiet``.

    ``unit`` is the unit of the amounts, such as "examples".
    """
    if quiet:
        yield NoProgress()
    elif on_terminal():
        with BarProgress(unit) as bar:
            yield bar
    else:
        yield PlainProgress(unit)
