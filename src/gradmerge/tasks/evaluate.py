"""Evaluate a model on data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.losses import ExampleLoss, labels_of, logits_of
from ..curvature.offload import input_device
from ..distributed import SINGLE, Processes
from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line
from .generation import Advance, Generation, generation_rows
from .loading import LoadedTask
from .metrics import METRICS, Metrics
from .standard_errors import standard_errors


def evaluate(
    loaded: LoadedTask,
    batch_size: int | None = None,
    advance: Advance | None = None,
    generation: Generation | None = None,
    processes: Processes = SINGLE,
) -> dict[str, Any]:
    """Return the metrics of a loaded model on its data, with standard errors.

    Args:
        loaded: The model and its data.
        batch_size: Examples per batch. The result does not depend on it, beyond rounding.
        advance: Called with the number of examples of every batch that is done. Generating counts every row again.
        generation: Also generate answers, and score them.
        processes: Each process evaluates its share of the rows. All get the metrics of all rows.
    """
    own_rows = processes.share(loaded.examples)
    batches = loaded.batches(batch_size, own_rows.start, own_rows.stop)
    metrics = measure(loaded.model, batches, loaded.loss, advance, processes, own_rows.start).summary()
    if generation is not None:
        rows = generation_rows(loaded, loaded.model, generation, advance, processes)
        metrics = with_generation_metrics(metrics, rows)
    return {"task": loaded.task, **metrics}


def with_generation_metrics(metrics: dict[str, Any], rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put the metrics of generated texts before other metrics."""
    errors = standard_errors(rows) | metrics["standard_errors"]
    return {name: values.mean().item() for name, values in rows.items()} | metrics | {"standard_errors": errors}


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    loss: ExampleLoss,
    advance: Advance | None = None,
    processes: Processes = SINGLE,
    first: int = 0,
) -> Metrics:
    """Measure a model on batches: keyword arguments with "labels", or sequences that end with the labels.

    The model is in eval mode during the evaluation. The result has ``numbers()``, ``rows()`` with one number per
    example, and ``summary()``, the metrics with their standard errors. All processes get the metrics of all examples.

    Args:
        model: The model.
        batches: The batches of this process.
        loss: The loss of an example, which says what the outputs and labels mean.
        advance: Called with the number of examples of every batch that is done.
        processes: The processes that measure.
        first: The index of this process' first example in the data, for messages.
    """
    metrics = METRICS[loss.name]()
    device = input_device(model)
    training = model.training
    model.eval()
    done = first
    try:
        with torch.no_grad():
            for batch in batches:
                batch = moved(batch, device)
                logits, labels = _logits(model, batch, done), labels_of(batch)
                loss.check(logits.shape, labels)
                # One example at a time: the logits of a batch over a large vocabulary may not fit in float32.
                losses = torch.cat([loss.losses(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
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
            raise MachineError(f"out of memory: {reason}. Try a smaller batch_size.") from error
        raise InputError(f"the model cannot be run on the batch that starts at example {done + 1}: {reason}") from error


def _check_finite(losses: Tensor, done: int) -> None:
    wrong = ~losses.isfinite()
    if bool(wrong.any()):
        raise InputError(
            f"example {done + int(wrong.nonzero()[0]) + 1}: the model's loss is not finite. "
            "Its weights are damaged, or the numbers too large for its type (try dtype=float32)"
        )
