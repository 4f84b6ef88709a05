"""Tasks of the lm-evaluation-harness, run on a model in memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.offload import spread_device
from ..errors import GradmergeError, InputError
from ..quiet import quiet_transformers
from ..text import first_line, nearest
from .loading import LoadedTask, LoadOptions, tokenizer_of
from .metrics import perplexity_rows, ratio_rows
from .models import device_of, load_model
from .processors import load_tokenizer
from .standard_errors import are_shares, standard_error

#: Draws of the bootstrap, for standard errors of metrics that are no means.
DRAWS = 1000
#: Tasks whose models the harness can ask.
WRITING = ("causal-lm", "seq2seq")


@dataclass(frozen=True)
class HarnessResult:
    """What the harness found on one of its tasks."""

    metrics: dict[str, float]
    """By the harness' names; with the filter behind a comma where there is one."""
    errors: dict[str, float | None]
    """Standard errors, as the harness gives them, or of the rows where it has none."""
    rows: dict[str, Tensor]
    """Metric → one number per example, whose mean is the metric; those for which that is so."""
    higher: dict[str, bool]
    """Metric → whether higher is better."""
    examples: int

    def summary(self) -> dict[str, Any]:
        """As metrics of other tasks are written."""
        return {**self.metrics, "examples": self.examples, "standard_errors": self.errors}


class Harness:
    """Some tasks of the harness, loaded once.

    Args:
        tasks: Names of tasks or groups, a list or `"arc_easy,hellaswag"`.
        folder: A folder of task files (YAML). They may name Python functions beside them, which are run.
        limit: How many examples of each task are taken at most.
        batch_size: Requests at once.
    """

    def __init__(
        self,
        tasks: Sequence[str] | str,
        folder: str | Path | None = None,
        limit: int | None = None,
        batch_size: int = 8,
    ) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            lacking = "needs the lm-evaluation-harness, which is not installed"
            raise InputError(f"--lm-eval: {lacking}: pip install 'gradmerge[lm-eval]'")
        self.names = self.names_of(tasks)
        if folder is not None and not Path(folder).is_dir():
            raise InputError(f"--lm-eval-tasks {folder}: is no folder")
        self._limit, self._batch_size = limit, batch_size
        with _quiet(f"--lm-eval {','.join(self.names)}"):
            self._loaded = self._manager(folder).load(self.names)
            for task in self._loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=1234)

    @staticmethod
    def names_of(tasks: Sequence[str] | str) -> list[str]:
        """`a,b`, or a list of such, as a list."""
        texts = [tasks] if isinstance(tasks, str) else tasks
        names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
        if not names:
            raise InputError("--lm-eval: names no task")
        return names

    def _manager(self, folder: str | Path | None) -> Any:
        """What finds tasks: in the folder alone where all of them are there, as reading all others takes a while."""
        place = None if folder is None else str(folder)
        if place is not None and set(self.names) <= set((own := _task_manager(place, False)).all_tasks):
            return own
        manager = _task_manager(place, True)
        known = set(manager.all_tasks)
        for name in self.names:
            if name not in known:
                where = "" if folder is None else f", nor in {folder}"
                raise InputError(f"--lm-eval {name}: the harness has no such task{where}{nearest(name, known)}")
        return manager

    def run(self, model: nn.Module, tokenizer: Any) -> dict[str, HarnessResult]:
        """What a model reaches on every task, those of groups too."""
        import lm_eval  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

        whole: Any = model
        with _quiet(f"--lm-eval {','.join(self.names)}"):
            with torch.no_grad():
                seen = HFLM(pretrained=whole, tokenizer=tokenizer, batch_size=self._batch_size)
                found: Any = lm_eval.evaluate(
                    lm=seen, task_dict=self._loaded, limit=self._limit, bootstrap_iters=DRAWS, log_samples=True
                )
            return {name: self._result(found, name) for name in found["results"]}

    def _result(self, found: Any, name: str) -> HarnessResult:
        told: dict[str, float] = {}
        errors: dict[str, float | None] = {}
        for key, value in found["results"][name].items():
            metric, comma, filter_ = str(key).partition(",")
            if not comma or not isinstance(value, int | float) or isinstance(value, bool):
                continue
            own = metric.removesuffix("_stderr") + ("" if filter_ == "none" else f",{filter_}")
            (errors if metric.endswith("_stderr") else told)[own] = float(value)
        if any(map(math.isinf, told.values())):
            raise InputError(
                f"--lm-eval {name}: the model's loss is not finite. Its weights are damaged, or the numbers too large "
                "for its type (try --dtype float32)"
            )
        inside = _leaves(found.get("group_subtasks") or {}, name)
        samples = [sample for task in inside for sample in found["samples"].get(task, ())]
        rows = {}
        for metric, value in told.items():
            plain, _, filter_ = metric.partition(",")
            each = _each([one.get(plain) for one in samples if one["filter"] == (filter_ or "none")], value)
            if each is not None:
                rows[metric] = each
                # The harness has none for some metrics, and 0 where all examples are right.
                errors[metric] = errors.get(metric) or standard_error(each, are_shares(each))
        counts = found.get("n-samples", {})
        higher = {
            key: bool(good) for task in inside for key, good in (found["higher_is_better"].get(task) or {}).items()
        }
        return HarnessResult(
            told,
            {metric: error if math.isfinite(error := errors.get(metric) or math.nan) else None for metric in told},
            rows,
            {metric: higher.get(metric.partition(",")[0], True) for metric in told},
            sum(int(counts[task]["effective"]) for task in inside if task in counts),
        )


@functools.cache
def _task_manager(folder: str | None, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    return TaskManager(include_path=folder, include_defaults=defaults)


def language_model(
    reference: str, loading: LoadOptions, known: LoadedTask | None = None
) -> tuple[nn.Module, Any, torch.device]:
    """A model for the harness, its tokenizer and device: of a task that is loaded already, or from its folder."""
    task = loading["task"] if known is None else known.task
    if known is not None and task in WRITING:
        return known.model, known.data.tokenizer, known.device  # type: ignore[attr-defined]
    if known is None and task in ("auto", *WRITING):
        device, model_args = loading["device"], loading["model_args"]
        model, info = load_model(reference, task, device=device, dtype=loading["dtype"], model_args=model_args)
        if info.task in WRITING:
            tokenizer = load_tokenizer(reference, info, tokenizer_of(loading))
            return model, tokenizer, spread_device(model) or device_of(device)
        task = info.task
    raise InputError(
        f"--lm-eval: {reference} is a model for {task}; the harness asks models for {' or '.join(WRITING)}"
    )


def _each(numbers: Sequence[Any], value: float) -> Tensor | None:
    """One number per example whose mean is a metric, of what the harness keeps of each: a number, or a log-likelihood
    and the words or bytes that it is of. None where the metric is made of them in another way."""
    parts = [one if isinstance(one, tuple | list) else (one,) for one in numbers]
    if not parts or any(len(one) != len(parts[0]) or len(one) > 2 for one in parts):
        return None
    if not all(isinstance(number, bool | int | float) for one in parts for number in one):
        return None
    each = torch.tensor(parts, dtype=torch.float64)
    nats = -each[:, 0] if each.shape[1] == 1 else ratio_rows(-each[:, 0], each[:, 1])
    for rows in (-nats, perplexity_rows(nats), nats / math.log(2)):
        if math.isclose(float(rows.mean()), value, rel_tol=1e-9, abs_tol=1e-12):
            return rows
    return None


def _leaves(groups: dict[str, Any], name: str) -> list[str]:
    """The tasks of a group, or a task itself."""
    return [leaf for child in groups.get(name) or () for leaf in _leaves(groups, child)] or [name]


@contextlib.contextmanager
def _quiet(where: str) -> Iterator[None]:
    """The harness without its bars and notices; what it raises in one message."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        nowhere = io.StringIO()
        with quiet_transformers(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    except (GradmergeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tasks read files, download data and run code of their own
        raise InputError(f"{where}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        log.setLevel(before)
