"""Seeds: each with stages that are kept, several at the same time in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from gradmerge.demo.stages import Stages


def stages_in(folder: Path) -> Stages:
    """Stages that tell what they begin, and how long it took."""
    return Stages(folder, say=partial(print, flush=True))


def over_seeds(run_seed: Callable[..., Any], seeds: Sequence[int], jobs: int, *run: Any) -> list[Any]:
    """``run_seed(seed, *run)`` for every seed, in order; with several jobs in processes of their own."""
    if jobs == 1 or len(seeds) == 1:
        return [run_seed(seed, *run) for seed in seeds]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=processes, initializer=disable_progress_bar) as pool:
        return [future.result() for future in [pool.submit(run_seed, seed, *run) for seed in seeds]]
