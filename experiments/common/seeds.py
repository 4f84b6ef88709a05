"""A run and its seeds; several seeds can run at the same time, each in its own process."""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from .stages import run_stage


@dataclass(frozen=True)
class Run:
    """What the seeds share; every experiment adds to it, and makes it with its ``prepare``."""

    out: Path
    settings: Any
    device: str


class Seed(ABC):
    """One seed of a run. Its stages are folders in ``folder``."""

    def __init__(self, seed: int, run: Any) -> None:
        self.seed, self.run, self.settings = seed, run, run.settings
        self.folder: Path = run.out / f"seed-{seed}"

    def stage(self, name: str, make: Callable[[Path], Any], settings: Any = None, after: Sequence[str] = ()) -> Any:
        """The result of a stage of this seed; see :func:`run_stage`."""
        return run_stage(self.folder / name, make, settings, after)

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Everything that the seed gives."""


def run_seeds(kind: type[Seed], run: Run, seeds: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """The results of every seed, in order."""
    return over_seeds(_results, seeds, jobs, kind, run)


def _results(seed: int, kind: type[Seed], run: Run) -> dict[str, Any]:
    return kind(seed, run).results()


def over_seeds(work: Callable[..., Any], seeds: Sequence[int], jobs: int, *given: Any) -> list[Any]:
    """``work(seed, *given)`` for every seed, in order; with several jobs in processes of their own."""
    if jobs == 1 or len(seeds) == 1:
        return [work(seed, *given) for seed in seeds]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=processes, initializer=disable_progress_bar) as pool:
        return [future.result() for future in [pool.submit(work, seed, *given) for seed in seeds]]
