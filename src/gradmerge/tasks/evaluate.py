"""Evaluate a model on data, and predict single rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.losses import ExampleLoss, labels_of, logits_of
from ..curvature.offload import input_device
from ..distributed import SINGLE, Processes
from ..errors import InputError, library_errors
from .generation import Advance, Generation, generate, generation_rows, prompts
from .lm_eval import MODEL_TASKS
from .loading import LoadedTask
from .metrics import Metrics, standard_errors


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

    The model is in eval mode during the evaluation. All processes get the metrics of all examples.

    Args:
        model: The model.
        batches: The batches of this process.
        loss: The loss of an example, which says what the outputs and labels mean.
        advance: Called with the number of examples of every batch that is done.
        processes: The processes that measure.
        first: The index of this process' first example in the data, for messages.
    """
    metrics = Metrics(loss.name)
    device = input_device(model)
    training = model.training
    model.eval()
    done = first
    try:
        with torch.no_grad():
            for batch in batches:
                batch = moved(batch, device)
                # A config may describe a model that can be built but not run.
                with library_errors(f"the model cannot be run on the batch that starts at example {done + 1}"):
                    logits, labels = logits_of(model, batch), labels_of(batch)
                loss.check(logits.shape, labels)
                # One example at a time: the logits of a batch over a large vocabulary may not fit in float32.
                losses = torch.cat([loss.losses(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
                if not bool(losses.isfinite().all()):
                    raise InputError(
                        f"example {done + int((~losses.isfinite()).nonzero()[0]) + 1}: the model's loss is not finite. "
                        "Its weights are damaged, or the numbers too large for its type (try dtype=float32)"
                    )
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


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one row."""

    text: str
    """The name of a class, a number, or a generated text."""
    probability: float | None = None
    """The probability of the class."""
    right: bool | None = None
    """Whether the prediction is right; None for numbers, and for texts without a reference."""


@dataclass(frozen=True)
class DisplayRow:
    """A row and its label, as people read them."""

    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    label: str


def display_rows(loaded: LoadedTask, rows: Sequence[int]) -> list[DisplayRow]:
    """Return rows of the data: their text or image, and the label, target or completion."""
    data, columns = loaded.data, loaded.columns
    if loaded.task in MODEL_TASKS:
        return [DisplayRow(prompt.text, None, prompt.reference or "") for prompt in prompts(loaded, rows)]
    labels = [_text_of(loaded, data.batch([row])["labels"][0]) for row in rows]
    if loaded.task == "image":
        return [DisplayRow(None, data.image(row), label) for row, label in zip(rows, labels, strict=True)]
    names = [n for role in ("text", "text2", "anchor", "positive", "negative") for n in columns.get(role, ())]
    texts = ["\n— ".join(data.rows.text(row, [name]) for name in names) for row in rows]
    return [DisplayRow(text, None, label) for text, label in zip(texts, labels, strict=True)]


def _text_of(loaded: LoadedTask, label: Tensor) -> str:
    """Return a label, or a prediction in the form of one, as people read it."""
    if loaded.loss.name == "classes":
        return class_label(loaded.model, int(label))
    if loaded.loss.name == "ranking":
        return f"candidate {int(label) + 1} is nearest"
    if loaded.loss.name == "labels":
        return ", ".join(class_label(loaded.model, int(n)) for n in (label > 0.5).nonzero().flatten()) or "none"
    return ", ".join(f"{float(value):.3g}" for value in label.reshape(-1))


def class_label(model: Any, number: int) -> str:
    """Return the name of a class in the config, or the number of a class called LABEL_3."""
    return str(model.config.id2label.get(number, number)).removeprefix("LABEL_")


@torch.no_grad()
def predict(loaded: LoadedTask, model: nn.Module, rows: Sequence[int]) -> list[Prediction]:
    """Predict some rows of the data. A language model generates text, which must equal the reference."""
    if loaded.task in MODEL_TASKS:
        references = [prompt.reference for prompt in prompts(loaded, rows)]
        return [
            Prediction(text, None, None if reference is None else text.strip() == reference.strip())
            for text, reference in zip(generate(loaded, model, rows), references, strict=True)
        ]
    result: list[Prediction] = []
    for first in range(0, len(rows), loaded.batch_size):
        batch = moved(loaded.data.batch(rows[first : first + loaded.batch_size]), loaded.device)
        logits, labels = logits_of(model, batch).double().cpu(), labels_of(batch).cpu()
        result += [_prediction(loaded, *pair) for pair in zip(logits, labels, strict=True)]
    return result


def _prediction(loaded: LoadedTask, logits: Tensor, label: Tensor) -> Prediction:
    if loaded.loss.name in ("classes", "ranking"):
        best = logits.argmax()
        return Prediction(_text_of(loaded, best), float(logits.softmax(-1)[best]), bool(best == label))
    if loaded.loss.name == "labels":
        chosen = (logits > 0).double()
        probability = float((chosen * logits.sigmoid() + (1 - chosen) * (1 - logits.sigmoid())).prod())
        return Prediction(_text_of(loaded, chosen), probability, bool((chosen == label).all()))
    return Prediction(_text_of(loaded, logits))
