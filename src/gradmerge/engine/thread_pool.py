"""A pool of threads that share one stream of work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from ..checkpoints.checkpoint import Buffers
from ..errors import MachineError

Item = TypeVar("Item")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
SWITCH_INTERVAL = 5e-5
"""Seconds after which a thread that waits for the interpreter's lock gets it. Python's default of 5 ms is as long as
several blocks, and an operation on a block takes a hundredth of that."""


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Make PyTorch compute on the calling thread only, and switch between threads often; restore both at the end."""
    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        sys.setswitchinterval(interval)


def with_buffers(work: Callable[[Buffers, Item], None]) -> Callable[[], Callable[[Item], None]]:
    """Return a ``make_worker`` for a function that needs buffers, one set for each thread."""
    return lambda: functools.partial(work, Buffers())


@one_thread_each()
def run_parallel(items: Iterable[Item], make_worker: Callable[[], Callable[[Item], None]], threads: int) -> None:
    """Call a worker on every item, on several threads that take the items in order.

    ``make_worker`` makes one function for each thread, which can have buffers. The first error stops all threads and is
    raised here, and so is Ctrl-C. If the machine allows fewer threads, these do the work.
    """
    _keep_freed_memory()
    stream = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[BaseException] = []

    def drain() -> None:
        work = make_worker()
        while not stop.is_set():
            with lock:
                item = next(stream, None)
            if item is None:
                return
            work(item)

    def loop(over: threading.Event) -> None:
        try:
            if not stop.is_set():
                torch.set_num_threads(1)
                drain()
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            over.set()

    # After Ctrl-C during Thread.join, Python considers the thread dead. A thread that still computes when the
    # interpreter exits aborts the process. Therefore this waits for events.
    ends = [threading.Event() for _ in range(max(1, threads))]
    pool = [threading.Thread(target=loop, args=(over,), name=f"gradmerge-{i}") for i, over in enumerate(ends)]
    try:
        started = _start(pool)
        for over in ends[:started]:
            while not over.wait(timeout=0.2):
                pass
    except BaseException:
        stop.set()
        for thread, over in zip(pool, ends, strict=True):
            if thread.ident is not None:
                over.wait()
        raise
    for thread in pool[:started]:
        thread.join()
    if errors:
        raise errors[0]


@functools.cache
def _keep_freed_memory() -> None:
    """Make glibc reuse freed blocks instead of returning them to the system; does nothing with other C libraries.

    By default glibc maps new memory for each allocation of a megabyte, and the page faults take several times as long
    as the arithmetic.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, 1 << 28)
            mallopt(_M_TRIM_THRESHOLD, 1 << 28)


def allow_many_files() -> None:
    """Raise the limit on open files: every shard stays open, and large models have many."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _start(pool: Sequence[threading.Thread]) -> int:
    """Start threads and return how many; a limit on processes or memory may allow only some of them."""
    for number, thread in enumerate(pool):
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if number == 0:
                raise MachineError(
                    f"no thread can be started: {error}. Raise the limit on processes (ulimit -u) or memory."
                ) from error
            return number
    return len(pool)
