"""A run and its seeds: each seed with stages that are kept, several at the same time in processes of their own."""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from gradmerge.demo.stages import Stages


@dataclass(frozen=True)
class Run:
    """What the seeds share; every experiment adds to it, and makes it with its ``prepare``."""

    out: Path
    settings: Any
    device: str


class Seed(ABC):
    """One seed of a run, stage by stage; what has been done already is read from disk."""

    def __init__(self, seed: int, run: Any) -> None:
        self.seed, self.run, self.settings = seed, run, run.settings
        self.stages = stages_in(run.out / f"seed-{seed}")

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Everything that the seed gives."""


def stages_in(folder: Path) -> Stages:
    """Stages that tell what they begin, and how long it took."""
    return Stages(folder, say=partial(print, flush=True))


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
