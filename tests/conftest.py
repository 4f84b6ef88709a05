"""What every test runs under: one thread of torch, here and in the programs that tests start, a small heap and a seed.

The models are so small that a second thread would only wait for the first, and sums would depend on how many there are.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from gradmerge.rules import METHODS

torch.set_num_threads(1)

# All that collecting tests imports stays: nothing of it is garbage.
gc.disable()

LONG = ("test_pages_run.py", "test_studio_page.py", "test_processes.py", "test_browser.py", "test_kill.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take a module at a time, in this order: with the longest first, no worker ends with one alone."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _modules_are_no_garbage() -> None:
    """The trainer of transformers collects garbage again and again, and would look through all that is imported."""
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_if_alone() -> Iterator[None]:
    """What a test draws without a seed of its own does not depend on the tests before it, nor on how many threads they
    wanted; and a process that is forked while torch has several waits for ever for those, which it does not have."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _methods_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that a test adds to METHODS is removed after the test."""
    monkeypatch.setattr(METHODS, "_rules", dict(METHODS._rules))
