"""How calibration depends on its rows, on the merge that it starts from, and on the type of the weights.

Every variant changes one thing of the default: all rows of the settings, all tasks, the settings' merge, float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import gradmerge as gm

from .settings import Settings
from .workloads import State, Workload

#: Random samples of rows, beside the first one.
SAMPLES = (1, 2)
#: Merges to start from.
STARTS = ("average", "task arithmetic, weight chosen on validation rows", "gradient-matching", "tsv", "iso-c")


@dataclass(frozen=True)
class Variant:
    """One way to run calibration."""

    name: str
    start: str
    """The merge."""
    rows: int
    sample: int = 0
    without: str = ""
    """A task without rows."""
    rows_of: Mapping[str, str] | None = None
    """Task → the task whose rows it gets."""
    dtype: torch.dtype = torch.float32


def variants(settings: Settings) -> Iterator[Variant]:
    """Yield all variants, the default first."""
    start, rows, tasks = settings.anchor, settings.rows, settings.tasks
    yield Variant("default", start, rows)
    for count in settings.row_counts:
        if count != rows:
            yield Variant(f"{count} rows", start, count)
    for sample in SAMPLES:
        yield Variant(f"other rows, sample {sample}", start, rows, sample=sample)
    for other in STARTS:
        if other != start:
            yield Variant(f"from {other}", other, rows)
    yield Variant(f"no rows of {tasks[-1]}", start, rows, without=tasks[-1])
    shifted = dict(zip(tasks, (*tasks[1:], tasks[0]), strict=True))
    yield Variant("every task gets the rows of the next task", start, rows, rows_of=shifted)
    yield Variant("bfloat16 weights", start, rows, dtype=torch.bfloat16)


def calibrate_variant(
    workload: Workload, settings: Settings, variant: Variant, merges: Mapping[str, State], tuned: Mapping[str, State]
) -> tuple[State, dict[str, Any]]:
    """Calibrate without output factors. Return the weights, and what calibration chose and how each task changed."""
    tasks = [task for task in settings.tasks if task != variant.without]
    source = variant.rows_of or {task: task for task in tasks}
    data = {
        task: workload.unlabeled(source[task], settings.calibration_batch, variant.rows, variant.sample)
        for task in tasks
    }
    start = _rounded(merges[variant.start], variant.dtype)
    teachers = {task: workload.module(_rounded(tuned[task], variant.dtype), task) for task in tasks}
    done = gm.calibrate(workload.module(start, tasks[0]), data, teachers=teachers, curvature="none", progress=False)
    state = _rounded(workload.state_of(done.model), variant.dtype)
    return state, {"chosen": done.chosen, "start": variant.start, "gains over the start": workload.gains(state, start)}


def _rounded(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> State:
    """Round weights as a checkpoint of this type stores them."""
    return {name: value.to(dtype).to(value.dtype) for name, value in state.items()}
