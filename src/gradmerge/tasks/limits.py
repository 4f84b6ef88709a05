"""A limit of time and memory for programs that come with data or models, such as chat templates."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..text import size


class _TooLate(BaseException):
    """Not an ``Exception``, so that code that is stopped does not catch it."""


@contextlib.contextmanager
def patience(seconds: float, what: str) -> Iterator[None]:
    """Stop what runs inside, if it is Python, once it has taken too long."""
    main = threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if main else _watch(seconds):
            yield
    except _TooLate:
        raise InputError(f"{what} takes longer than {seconds:g} seconds, which is the limit") from None


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _TooLate

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    # Again and again: one that rings where errors are not passed on, as in a destructor, is lost.
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - time.monotonic() + began, 1e-3), every)


@contextlib.contextmanager
def _watch(seconds: float) -> Iterator[None]:
    """Signals reach the main thread only: elsewhere every line asks for the time, which is slow but sure."""
    deadline = time.monotonic() + seconds

    def look(*_: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooLate
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def little_memory(nbytes: int, what: str) -> Iterator[None]:
    """Refuse what takes ``nbytes`` more memory than the process has now; on the main thread only."""
    statm = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(statm.read_text().split()[0]) * resource.getpagesize() + nbytes
    limits = [n for n in (wanted, soft, hard) if n != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except MemoryError:
        raise InputError(f"{what} takes more than {size(nbytes)} of memory, which is the limit") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
