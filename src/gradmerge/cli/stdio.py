"""Standard output and error as they are found: open, closed, full, or with nobody who reads them any more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from ..text import printable
from ..urls import redact

#: File descriptor → the error with which output to it was lost.
_lost: dict[int, OSError] = {}
#: Where standard output and error lead, in a process that is to be silent.
_unheard: list[int] = []


class _Outlet(io.FileIO):
    """A standard stream that never fails but remembers: a full log is no reason to stop half-way through the work."""

    def __init__(self, fd: int, closed: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self._closed = closed

    def write(self, data: Any) -> int:
        try:
            if self._closed:
                raise OSError(errno.EBADF, "it is closed")
            while (written := super().write(data)) is None:  # a pipe that does not block, and is full
                select.select([], [self], [])
            return written
        except OSError as error:
            _lost.setdefault(self.fileno(), error)
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Make standard output and error ready for whatever may become of them; the first thing that a process does."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Else the next file to be opened, such as the weights, would take the place, and complaints would go there.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is sys.__stdout__:  # not where a test or a notebook has put something else
        sys.stdout = _wrapped(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrapped(sys.stderr, 2)


def hush() -> None:
    """Let nothing that is said be heard, by libraries either: one of several processes, of which the first speaks."""
    _unheard.extend(os.dup(fd) for fd in (1, 2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)


def speak_up() -> None:
    """Be heard again."""
    for fd, own in zip((1, 2), _unheard, strict=False):
        os.dup2(own, fd)
    _unheard.clear()


def _wrapped(stream: TextIO | None, fd: int) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(fd, closed=stream is None)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",  # a Greek letter is no reason to fail on a terminal that has none
        line_buffering=fd == 2 or (stream is not None and stream.isatty()),
    )


def say(text: str = "", *, err: bool = False, needed: bool = True) -> None:
    """Print lines, on standard error with ``err``, with control characters made visible.

    Where that fails, the exit status will be 1, unless what was said is not ``needed``.
    """
    before = dict(_lost)
    write(printable(text) + "\n", err=err)
    if not needed:
        _lost.clear()
        _lost.update(before)


def write(text: str, *, err: bool = False) -> None:
    """Print text as it is, but for passwords and signatures of URLs."""
    stream: TextIO | None = sys.stderr if err else sys.stdout
    if stream is not None:
        stream.write(redact(text))
        stream.flush()


def settle(status: int) -> int:
    """The exit status of a command that ends with ``status``, once it is known whether all output could be written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    error = _lost.get(1)
    if error is not None and error.errno != errno.EPIPE:  # a reader that went, such as `head`, has seen enough
        done = "" if status else " The work itself is done."
        say(
            f"error: standard output cannot be written: {error.strerror}. What it should have said is lost.{done}",
            err=True,
        )
    failed = bool(_lost)
    _lost.clear()
    return status or int(failed)
