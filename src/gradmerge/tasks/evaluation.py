"""Evaluating a model on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.losses import ExampleLoss, labels_of, logits_of
from ..curvature.offload import input_device
from ..distributed import SINGLE, Processes
from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line
from .loading import LoadedTask
from .metrics import METRICS, Metrics
from .standard_errors import standard_errors
from .text_metrics import Generation, written_rows

Advance = Callable[[int], None]
"""Called with the number of examples of every batch that is done."""


def evaluate(
    loaded: LoadedTask,
    batch_size: int | None = None,
    advance: Advance | None = None,
    generation: Generation | None = None,
    processes: Processes = SINGLE,
) -> dict[str, Any]:
    """The metrics of a loaded model on its data, with standard errors; ``batch_size`` changes nothing but rounding.

    With ``generation`` also those of what it writes; every row is then counted twice as done. Of several ``processes``
    each runs its share of the rows, and all get the metrics of all.
    """
    mine = processes.share(loaded.examples)
    batches = loaded.batches(batch_size, mine.start, mine.stop)
    found = measure(loaded.model, batches, loaded.output, advance, processes, mine.start)
    if generation is None:
        return {"task": loaded.task, **found.summary()}
    written = written_rows(loaded, loaded.model, generation, advance, processes)
    return {"task": loaded.task, **with_written(found.summary(), written)}


def with_written(metrics: dict[str, Any], written: Mapping[str, Tensor]) -> dict[str, Any]:
    """Metrics with those of generated text before them."""
    errors = standard_errors(written) | metrics["standard_errors"]
    return {name: rows.mean().item() for name, rows in written.items()} | metrics | {"standard_errors": errors}


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    output: ExampleLoss,
    advance: Advance | None = None,
    processes: Processes = SINGLE,
    first: int = 0,
) -> Metrics:
    """Measure a model on batches: keyword arguments with "labels", or sequences that end with the labels.

    The model is in eval mode during the evaluation. The result has ``numbers()``, ``rows()`` with one number per
    example, and ``summary()``, the metrics with their standard errors.

    ``first`` is the place in the data where the batches of this process begin; what it gets are the metrics of all.
    """
    metrics = METRICS[output.name]()
    device = input_device(model)
    training = model.training
    model.eval()
    done = first
    try:
        with torch.no_grad():
            for batch in batches:
                batch = moved(batch, device)
                logits, labels = _logits(model, batch, done), labels_of(batch)
                output.check(logits.shape, labels)
                # One example at a time: a whole batch of logits over a large vocabulary, widened, may not fit memory.
                losses = torch.cat([output.losses(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
                _check_finite(losses, done)
                metrics.add(logits, labels, losses)
                done += len(labels)
                if advance is not None:
                    advance(len(labels))
    finally:
        model.train(training)
    metrics.join(processes)
    if not metrics.examples:
        raise InputError("there are no batches to evaluate on")
    return metrics


def _logits(model: nn.Module, batch: Any, done: int) -> Tensor:
    try:
        return logits_of(model, batch)
    except (GradmergeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config may describe a model that can be built but not run
        reason = first_line(error)
        if "allocate memory" in reason:
            raise MachineError(f"out of memory: {reason}. Try a smaller --batch-size.") from error
        raise InputError(f"the model cannot be run on the batch from example {done + 1} on: {reason}") from error


def _check_finite(losses: Tensor, done: int) -> None:
    wrong = ~losses.isfinite()
    if bool(wrong.any()):
        raise InputError(
            f"example {done + int(wrong.nonzero()[0]) + 1}: the model's loss is not finite. "
            "Its weights are damaged, or the numbers too large for its type (try --dtype float32)"
        )
