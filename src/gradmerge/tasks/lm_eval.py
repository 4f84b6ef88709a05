"""Tasks of the lm-evaluation-harness, evaluated on a model in memory."""

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
from .loading import LoadedTask, LoadOptions, load_tokenizer, tokenizer_of
from .metrics import perplexity_rows, ratio_rows
from .models import device_of, load_model
from .standard_errors import are_shares, standard_error

#: Bootstrap samples for the standard errors of metrics that are not means.
BOOTSTRAP_SAMPLES = 1000
#: Tasks whose models the harness can evaluate.
MODEL_TASKS = ("causal-lm", "seq2seq")


@dataclass(frozen=True)
class LMEvalResult:
    """The metrics of one task of the harness."""

    metrics: dict[str, float]
    """By the harness' names; with the filter after a comma if there is one."""
    errors: dict[str, float | None]
    """Standard errors of the harness, or of the rows if it has none."""
    rows: dict[str, Tensor]
    """Metric → one number per example, whose mean is the metric. Metrics that are not such means are missing."""
    higher_is_better: dict[str, bool]
    examples: int

    def summary(self) -> dict[str, Any]:
        """Return the metrics in the form of other tasks."""
        return {**self.metrics, "examples": self.examples, "standard_errors": self.errors}


class LMEval:
    """Tasks of the harness, loaded once.

    Args:
        tasks: Names of tasks or groups, a list or `"arc_easy,hellaswag"`.
        folder: A folder of task files (YAML). They may name Python functions beside them, which are run.
        limit: The maximum number of examples of each task.
        batch_size: Requests per batch.
    """

    def __init__(
        self,
        tasks: Sequence[str] | str,
        folder: str | Path | None = None,
        limit: int | None = None,
        batch_size: int = 8,
    ) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise InputError("lm_eval: the lm-evaluation-harness is not installed: pip install 'gradmerge[lm-eval]'")
        self.names = self.parse_names(tasks)
        if folder is not None and not Path(folder).is_dir():
            raise InputError(f"lm_eval_tasks={folder}: is not a folder")
        self._limit, self._batch_size = limit, batch_size
        with self._quiet():
            self._tasks = self._task_manager(None if folder is None else str(folder)).load(self.names)
            for task in self._tasks["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=1234)

    @staticmethod
    def parse_names(tasks: Sequence[str] | str) -> list[str]:
        """Return `a,b`, or a list of such texts, as a list of names."""
        texts = [tasks] if isinstance(tasks, str) else tasks
        names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
        if not names:
            raise InputError("lm_eval: names no task")
        return names

    def _task_manager(self, folder: str | None) -> Any:
        # Indexing the harness' own tasks takes half a minute, so look into the folder first.
        if folder is not None:
            manager = _load_task_manager(folder, False)
            if set(self.names) <= set(manager.all_tasks):
                return manager
        manager = _load_task_manager(folder, True)
        for name in self.names:
            if name not in manager.all_tasks:
                where = "" if folder is None else f", nor in {folder}"
                raise InputError(
                    f"lm_eval={name}: the harness has no such task{where}{nearest(name, manager.all_tasks)}"
                )
        return manager

    def evaluate(self, model: nn.Module, tokenizer: Any) -> dict[str, LMEvalResult]:
        """Evaluate a model on every task, and on the tasks of every group."""
        import lm_eval  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

        pretrained: Any = model
        with self._quiet(), torch.no_grad():
            output: Any = lm_eval.evaluate(
                lm=HFLM(pretrained=pretrained, tokenizer=tokenizer, batch_size=self._batch_size),
                task_dict=self._tasks,
                limit=self._limit,
                bootstrap_iters=BOOTSTRAP_SAMPLES,
                log_samples=True,
            )
            return {name: _result(output, name) for name in output["results"]}

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Silence the harness, and translate its errors."""
        logger = logging.getLogger("lm_eval")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            silent = io.StringIO()
            with quiet_transformers(), contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
                yield
        except (GradmergeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # tasks read files, download data and run code of their own
            names = ",".join(self.names)
            raise InputError(f"lm_eval={names}: {type(error).__name__}: {first_line(error)}") from error
        finally:
            logger.setLevel(level)


def _result(output: Any, name: str) -> LMEvalResult:
    """Read the metrics of a task or group from the harness' output."""
    metrics: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    rows: dict[str, Tensor] = {}
    tasks = _tasks_of(output.get("group_subtasks") or {}, name)
    samples = [sample for task in tasks for sample in output["samples"].get(task, ())]
    values = output["results"][name]
    for key, value in values.items():
        metric, comma, filter_name = str(key).partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        label = metric if filter_name == "none" else f"{metric},{filter_name}"
        metrics[label] = float(value)
        error = values.get(f"{metric}_stderr,{filter_name}")  # "N/A" for some, and 0 if all examples are right
        error = error if isinstance(error, int | float) else None
        per_row = _rows_of([sample.get(metric) for sample in samples if sample["filter"] == filter_name], value)
        if per_row is not None:
            rows[label] = per_row
            error = error or standard_error(per_row, are_shares(per_row))
        errors[label] = error if error and math.isfinite(error) else None
    if any(map(math.isinf, metrics.values())):
        raise InputError(
            f"lm_eval={name}: the model's loss is not finite. Its weights are damaged, or the numbers too large "
            "for its type (try dtype=float32)"
        )
    higher = {key: bool(better) for t in tasks for key, better in (output["higher_is_better"].get(t) or {}).items()}
    counts = output.get("n-samples", {})
    return LMEvalResult(
        metrics=metrics,
        errors=errors,
        rows=rows,
        higher_is_better={metric: higher.get(metric.partition(",")[0], True) for metric in metrics},
        examples=sum(int(counts[task]["effective"]) for task in tasks if task in counts),
    )


def _tasks_of(groups: dict[str, Any], name: str) -> list[str]:
    """Return the tasks of a group, or a task itself."""
    return [task for child in groups.get(name) or () for task in _tasks_of(groups, child)] or [name]


def _rows_of(values: Sequence[Any], metric: float) -> Tensor | None:
    """Return one number per example whose mean is the metric; None if the metric is not such a mean.

    The harness stores a number per example, or a log-likelihood with the number of words or bytes.
    """
    parts = [value if isinstance(value, tuple | list) else (value,) for value in values]
    if not parts or len({len(part) for part in parts}) > 1 or len(parts[0]) > 2:
        return None
    if not all(isinstance(number, bool | int | float) for part in parts for number in part):
        return None
    table = torch.tensor(parts, dtype=torch.float64)
    nats = -table[:, 0] if table.shape[1] == 1 else ratio_rows(-table[:, 0], table[:, 1])
    for rows in (-nats, perplexity_rows(nats), nats / math.log(2)):
        if math.isclose(float(rows.mean()), metric, rel_tol=1e-9, abs_tol=1e-12):
            return rows
    return None


@functools.cache
def _load_task_manager(folder: str | None, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    return TaskManager(include_path=folder, include_defaults=defaults)


def language_model(
    reference: str, loading: LoadOptions, loaded: LoadedTask | None = None
) -> tuple[nn.Module, Any, torch.device]:
    """Return a model for the harness, its tokenizer and device: those of ``loaded``, or from the model's folder."""
    task = loading["task"] if loaded is None else loaded.task
    if loaded is not None and task in MODEL_TASKS:
        data: Any = loaded.data
        return loaded.model, data.tokenizer, loaded.device
    if loaded is None and task in ("auto", *MODEL_TASKS):
        device, model_args = loading["device"], loading["model_args"]
        model, info = load_model(reference, task, device=device, dtype=loading["dtype"], model_args=model_args)
        task = info.task
        if task in MODEL_TASKS:
            tokenizer = load_tokenizer(reference, info, tokenizer_of(loading))
            return model, tokenizer, spread_device(model) or device_of(device)
    raise InputError(
        f"lm_eval: {reference} is a model for {task}; the harness evaluates models for {' or '.join(MODEL_TASKS)}"
    )
