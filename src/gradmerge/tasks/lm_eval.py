"""Tasks of the lm-evaluation-harness, evaluated on a model in memory."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError, library_errors
from ..load_options import LoadOptions
from ..quiet import quiet_transformers
from ..text import nearest
from .loading import LoadedTask, load_tokenizer, tokenizer_of
from .models import load_model

#: Bootstrap samples for the standard errors of metrics that are not means.
BOOTSTRAP_SAMPLES = 1000
#: Tasks whose models the harness can evaluate.
MODEL_TASKS = ("causal-lm", "seq2seq")


class LMEval:
    """Tasks of the harness.

    Args:
        tasks: Names of tasks or groups, a list or `"arc_easy,hellaswag"`.
        folder: A folder of task files (YAML). They may name Python functions beside them, which are run.
    """

    def __init__(self, tasks: Sequence[str] | str, folder: str | Path | None = None) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise InputError("lm_eval: the lm-evaluation-harness is not installed: pip install 'gradmerge[lm-eval]'")
        texts = [tasks] if isinstance(tasks, str) else tasks
        self.names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
        if not self.names:
            raise InputError("lm_eval: names no task")
        if folder is not None and not Path(folder).is_dir():
            raise InputError(f"lm_eval_tasks={folder}: is not a folder")
        # Indexing the harness' own tasks takes half a minute, so look into the folder first.
        self._manager = None if folder is None else _load_task_manager(str(folder), defaults=False)
        if self._manager is None or not set(self.names) <= set(self._manager.all_tasks):
            self._manager = _load_task_manager(None if folder is None else str(folder), defaults=True)
        for name in self.names:
            if name not in self._manager.all_tasks:
                raise InputError(f"lm_eval={name}: there is no such task{nearest(name, self._manager.all_tasks)}")

    def evaluate(
        self, model: nn.Module, tokenizer: Any, limit: int | None = None, batch_size: int = 8
    ) -> dict[str, dict[str, Any]]:
        """Evaluate a model on every task, and on the tasks of every group.

        Returns:
            Task or group → its metrics by the harness' names (with the filter after a comma if there is one), the
            number of `examples`, and the harness' `standard_errors`.
        """
        import lm_eval  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

        logger = logging.getLogger("lm_eval")
        level = logger.level
        logger.setLevel(logging.ERROR)
        silent = io.StringIO()
        try:
            with (
                library_errors(f"lm_eval={','.join(self.names)}"),  # tasks read files, and run code of their own
                quiet_transformers(),
                contextlib.redirect_stdout(silent),
                contextlib.redirect_stderr(silent),
            ):
                pretrained: Any = model
                output: Any = lm_eval.simple_evaluate(
                    model=HFLM(pretrained=pretrained, tokenizer=tokenizer, batch_size=batch_size),
                    tasks=self.names,
                    task_manager=self._manager,
                    limit=limit,
                    bootstrap_iters=BOOTSTRAP_SAMPLES,
                    log_samples=False,
                )
        finally:
            logger.setLevel(level)
        return {name: _summary(output, name) for name in output["results"]}


def _load_task_manager(folder: str | None, *, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    return TaskManager(include_path=folder, include_defaults=defaults)


def _summary(output: Any, name: str) -> dict[str, Any]:
    """Return the metrics of a task or group in the form of other tasks."""
    metrics: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    values = output["results"][name]
    for key, value in values.items():
        metric, comma, filter_name = str(key).partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            label = metric if filter_name == "none" else f"{metric},{filter_name}"
            error = values.get(f"{metric}_stderr,{filter_name}")  # "N/A" for some, and 0 if all examples are right
            metrics[label] = float(value)
            errors[label] = error if isinstance(error, float) and math.isfinite(error) and error else None
    if any(map(math.isinf, metrics.values())):
        raise InputError(
            f"lm_eval={name}: the model's loss is not finite. Its weights are damaged, or the numbers too large "
            "for its type (try dtype=float32)"
        )
    return {**metrics, "examples": _num_examples(output, name), "standard_errors": errors}


def _num_examples(output: Any, name: str) -> int:
    """Return the number of examples of a task, or of all tasks of a group."""
    if name in output["n-samples"]:
        return int(output["n-samples"][name]["effective"])
    return sum(_num_examples(output, child) for child in output["group_subtasks"].get(name, ()))


def language_model(reference: str, loading: LoadOptions, loaded: LoadedTask | None) -> tuple[nn.Module, Any]:
    """Return a model for the harness and its tokenizer: those of ``loaded``, or from the model's folder."""
    if loaded is not None and loaded.task in MODEL_TASKS:
        data: Any = loaded.data
        return loaded.model, data.tokenizer
    task = loading["task"] if loaded is None else loaded.task
    if task in ("auto", *MODEL_TASKS):
        device, model_args = loading["device"], loading["model_args"]
        model, info = load_model(reference, task, device=device, dtype=loading["dtype"], model_args=model_args)
        task = info.task
        if task in MODEL_TASKS:
            return model, load_tokenizer(info, tokenizer_of(loading))
    raise InputError(
        f"lm_eval: {reference} is a model for {task}; the harness evaluates models for {' or '.join(MODEL_TASKS)}"
    )
