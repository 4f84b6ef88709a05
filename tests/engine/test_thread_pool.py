"""Threads that share work, on a machine that may not give them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gradmerge.engine.thread_pool import run_parallel
from gradmerge.errors import MachineError

TOO_MUCH = 1 << 46
"""A stack that no machine has room for: starting a thread with it fails for real."""


@pytest.fixture
def stack() -> Iterator[None]:
    before = threading.stack_size()
    yield
    threading.stack_size(before)


def worker_of(done: list[int]) -> Callable[[], Callable[[int], None]]:
    return lambda: done.append


def test_fewer_threads_than_asked_for_do_all_the_work(stack: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun, done = threading.Thread.start, [0], list[int]()

    def with_no_room_for_the_third(thread: threading.Thread) -> None:
        if begun[0] == 2:
            threading.stack_size(TOO_MUCH)
        start(thread)
        begun[0] += 1

    monkeypatch.setattr(threading.Thread, "start", with_no_room_for_the_third)
    run_parallel(range(100), worker_of(done), 8)
    assert sorted(done) == list(range(100)) and begun == [2]


def test_no_thread_at_all_is_the_machine_s_failure(stack: None) -> None:
    threading.stack_size(TOO_MUCH)
    with pytest.raises(MachineError, match="thread"):
        run_parallel(range(3), worker_of([]), 2)
