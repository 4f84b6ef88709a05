"""Standard output and error: what is printed shows no secrets and no control characters."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO

from ..text import printable
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
