"""Seeds side by side, and results as JSON and Markdown."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def over_seeds(run: Callable[..., Any], seeds: Sequence[int], jobs: int, *settings: Any) -> list[Any]:
    """``run(seed, *settings)`` for every seed, in order; with several jobs in processes of their own."""
    if jobs == 1 or len(seeds) == 1:
        return [run(seed, *settings) for seed in seeds]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(run, seed, *settings) for seed in seeds]]


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard deviation over seeds where there are several."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def shown(values: Sequence[float], digits: int = 1) -> str:
    """`86.5 ± 0.2`: mean and standard deviation over seeds."""
    mean, deviation = spread(values)
    return f"{mean:.{digits}f}" if deviation is None else f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_results(out: Path, results: dict[str, Any], tables: str) -> None:
    """``results.json`` and ``results.md``, each whole or not at all."""
    for name, text in (("results.json", json.dumps(results, indent=1) + "\n"), ("results.md", tables)):
        partial = out / f"{name}.partial"
        partial.write_text(text)
        partial.rename(out / name)
