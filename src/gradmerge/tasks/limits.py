"""Limits on time and memory for programs that come with a model, such as chat templates."""

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


class _Timeout(BaseException):
    """Not an ``Exception``, so that the code that is stopped does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Stop Python code that takes too long."""
    main = threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if main else _trace(seconds):
            yield
    except _Timeout:
        raise InputError(f"{what} takes longer than the limit of {seconds:g} seconds") from None


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Timeout

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    # Repeat every second: an exception that is raised in a destructor is lost.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - time.monotonic() + start, 1e-3), interval)


@contextlib.contextmanager
def _trace(seconds: float) -> Iterator[None]:
    """Check the time at every line of code. Signals reach the main thread only."""
    deadline = time.monotonic() + seconds

    def check(*_: Any) -> Any:
        if time.monotonic() > deadline:
            raise _Timeout
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def memory_limit(nbytes: int, what: str) -> Iterator[None]:
    """Stop code that takes ``nbytes`` more memory than the process has. Linux only, on the main thread only."""
    statm = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + nbytes
    limits = [n for n in (limit, soft, hard) if n != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except MemoryError:
        raise InputError(f"{what} takes more memory than the limit of {size(nbytes)}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
