"""A pool of threads that share one stream of work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

from ..checkpoints.checkpoint import Buffers

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
    raised here, and so is Ctrl-C.
    """
    _keep_freed_memory()
    stream = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        work = make_worker()
        while not stop.is_set():
            with lock:
                item = next(stream, None)
            if item is None:
                return
            work(item)

    with ThreadPoolExecutor(threads, "gradmerge", functools.partial(torch.set_num_threads, 1)) as pool:
        try:
            for future in as_completed([pool.submit(drain) for _ in range(threads)]):
                future.result()
        finally:
            stop.set()


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


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_many_files() -> None:
    """Raise the limit on open files: every shard stays open, and large models have many."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
