"""Threads that share one stream of work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Let every worker compute on its own thread alone, and restore the setting afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_parallel(items: Iterable[Item], make_worker: Callable[[], Callable[[Item], None]], threads: int) -> None:
    """Call a worker on every item, in order of the items, on some threads.

    ``make_worker`` makes one function for each thread, so that it can own buffers. The first error stops all threads
    and is raised here, and so is Ctrl-C.
    """
    stream = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            torch.set_num_threads(1)
            work = make_worker()
            while not stop.is_set():
                with lock:
                    item = next(stream, None)
                if item is None:
                    return
                work(item)
        except BaseException as error:
            errors.append(error)
            stop.set()

    pool = [threading.Thread(target=loop, name=f"gradmerge-{i}", daemon=True) for i in range(max(1, threads))]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            while thread.is_alive():
                thread.join(timeout=0.2)
    except BaseException:
        stop.set()
        for thread in pool:
            thread.join()
        raise
    if errors:
        raise errors[0]
