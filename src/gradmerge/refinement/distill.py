"""Distill fine-tuned models into a merge: AdamW on unlabeled rows, with the fine-tuned models as teachers.

The loss of a step is a sum over tasks. Each task adds ‖h − h_t‖² / ‖h_t‖² over the representations of all tokens in a
batch of its rows, or the mean KL from its teacher's answers to the model's, or both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..curvature.losses import MASKED, unwrapped
from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import Batch
from .distances import Outputs, answer_divergence
from .rows import TaskRows, count_rows

MATCHES = ("representations", "answers", "both")
#: The default learning rate is this over the width of the model: 1e-4 at 640, 3e-4 at 200.
RATE_TIMES_WIDTH = 0.06
#: The default number of steps is one of these times the square root of the rows per task. A row of a language model has
#: many answers to match, so that fewer steps are enough.
STEPS_PER_ROOT, STEPS_PER_ROOT_OF_TOKENS = 18, 6
WARMUP_SHARE = 0.1
EVALUATIONS = 5
MAX_NORM = 1.0
#: Batches of several tasks share a forward pass of at most so many rows and tokens: small passes leave a GPU idle.
PASS_ROWS, PASS_TOKENS = 128, 8192


@dataclass
class Distillation:
    """What a distillation did."""

    match: str
    steps: int
    lr: float
    losses: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, task → loss on held-out rows); step 0 is the model before."""
    best_step: int = 0
    """The step whose weights were kept; 0 if no step was better than the model before."""

    @property
    def improved(self) -> bool:
        """Whether some step was better than the model before."""
        return self.best_step > 0

    def losses_at(self, step: int) -> dict[str, float]:
        """Task → loss on held-out rows at a step."""
        return dict(self.losses)[step]


def default_match(task: str, shared_head: bool) -> str:
    """What is matched by default: answers of language models, and of classifiers that share a head both."""
    if task in ("causal-lm", "seq2seq"):
        return "answers"
    return "both" if shared_head and task in ("classify", "image") else "representations"


def default_steps(rows: Mapping[str, TaskRows], match: str) -> int:
    """Return the default number of steps; for 256 rows per task 91 if only answers are matched, and else 273."""
    most = max(count_rows(one.fit) for one in rows.values())
    factor = STEPS_PER_ROOT_OF_TOKENS if match == "answers" else STEPS_PER_ROOT
    return max(10, round(factor * math.sqrt(most)))


def default_rate(model: nn.Module) -> float:
    """The learning rate for the width of a model."""
    config: Any = getattr(unwrapped(model), "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if width is None:
        sizes = getattr(config, "hidden_sizes", None)
        width = sizes[-1] if sizes else max(p.shape[-1] for p in model.parameters() if p.dim() > 1)
    return float(min(1e-3, RATE_TIMES_WIDTH / width))


def distill_model(
    model: nn.Module,
    teachers: Mapping[str, Callable[[], nn.Module]],
    rows: Mapping[str, TaskRows],
    *,
    match: str,
    steps: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    memory: int = 0,
    progress: Progress | None = None,
) -> Distillation:
    """Train the parameters of ``model`` that require gradients, in place, and keep the best of them.

    Every step uses one batch of each task. The model stays in eval mode, without dropout.

    Args:
        model: The merge.
        teachers: Task → what loads its fine-tuned model, on the same device.
        rows: Task → rows. The weights with the lowest loss on those held out are kept.
        match: ``representations``, ``answers`` or ``both``.
        steps: Number of steps; by default it grows with the square root of the rows.
        lr: Highest learning rate, after a warm-up and before a linear decay; by default it follows the width.
        seed: Of the order of batches.
        memory: Bytes for what the fine-tuned models return. One whose outputs fit is freed before the next is loaded.
        progress: Is told how many steps are done.
    """
    steps = default_steps(rows, match) if steps is None else steps
    lr = default_rate(model) if lr is None else lr
    progress = progress or NoProgress()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise InputError("the model has no parameters that require gradients")
    done = Distillation(match, steps, lr)
    model.eval()
    guides = {task: Guide(task, load, rows[task], match, memory // len(teachers)) for task, load in teachers.items()}
    fused = all(p.is_cuda for p in trained.values())
    optimizer = torch.optim.AdamW(trained.values(), lr, weight_decay=0.0, fused=fused)
    pad_token = getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None) or 0
    warmup = max(1, round(WARMUP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / warmup) * (1 - k / steps))
    orders = {task: _endless(len(one.fit), seed + number) for number, (task, one) in enumerate(rows.items())}
    best = _copied(trained)
    lowest = _evaluate(done, 0, model, guides)
    every = max(1, steps // EVALUATIONS)
    progress.begin("distilling", steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        numbers = {task: next(order) for task, order in orders.items()}
        batches = {task: guides[task].batches[number] for task, number in numbers.items()}
        for tasks, batch in join_batches(batches, pad_token):
            targets = [guides[task].target(numbers[task]) for task in tasks]
            loss = sum_losses(batch_losses(model, batch, targets, match))
            if not bool(loss.isfinite()):
                raise InputError(f"{', '.join(tasks)}: the loss is not finite at step {step}. Try an lr below {lr:g}.")
            loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        optimizer.step()
        schedule.step()
        progress.advance(1)
        if step % every == 0 or step == steps:
            value = _evaluate(done, step, model, guides)
            if value < lowest:
                lowest, done.best_step = value, step
                best = _copied(trained)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(best[name])
    return done


class Guide:
    """What a fine-tuned model returns for the rows of its task: computed once, or anew if it takes too much memory."""

    def __init__(self, task: str, load: Callable[[], nn.Module], rows: TaskRows, match: str, memory: int) -> None:
        self.task, self.match = task, match
        self.batches = [*rows.fit, *rows.held_out]
        self.held_out = range(len(rows.fit), len(self.batches))
        self._teacher: nn.Module | None = load()
        self._outputs: list[Outputs] = []
        first = self._run(self.batches[0])
        if first.nbytes * rows.number <= memory * count_rows(self.batches[:1]):
            self._outputs = [first, *map(self._run, self.batches[1:])]
            self._teacher = None

    def target(self, number: int) -> Outputs:
        """What the fine-tuned model returns for a batch."""
        return self._outputs[number] if self._teacher is None else self._run(self.batches[number])

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """The distillation loss of a batch."""
        return batch_losses(model, self.batches[number], [self.target(number)], self.match)[0]

    def _run(self, batch: Batch) -> Outputs:
        assert self._teacher is not None
        return teacher_outputs(self._teacher, batch, self.match)


@torch.no_grad()
def teacher_outputs(teacher: nn.Module, batch: Batch, match: str) -> Outputs:
    """What a fine-tuned model returns, as far as it is matched."""
    with autocast(next(teacher.parameters()).device):
        found = Outputs.of(teacher, batch, with_head=match != "representations")
    return Outputs(found.representation[:0], found.logits) if match == "answers" else found


def batch_losses(model: nn.Module, batch: Batch, targets: Sequence[Outputs], match: str) -> list[Tensor]:
    """The distillation loss of every task in a batch, whose rows are those of the tasks' targets, in order."""
    with autocast(next(model.parameters()).device):
        found = Outputs.of(model, batch, with_head=match != "representations")
    losses = []
    for outputs, target in zip(found.split(targets), targets, strict=True):
        parts = []
        if match in ("representations", "both"):
            h, h_t = outputs.representation.float(), target.representation.float()
            parts.append((h - h_t).square().sum() / h_t.square().sum().clamp(min=1e-30))
        if match in ("answers", "both"):
            if outputs.logits is None or target.logits is None:
                raise InputError("the model has no head for a task, so only representations can be matched")
            parts.append(answer_divergence(model, outputs.logits, target.logits).mean())
        losses.append(sum_losses(parts))
    return losses


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """The sum of at least one loss."""
    return sum(losses[1:], losses[0])


def join_batches(batches: Mapping[str, Batch], pad_token: int) -> Iterator[tuple[list[str], Batch]]:
    """Join the batches of tasks that fit into one pass. Yields the tasks and the joined batch."""
    tasks: list[str] = []
    joined: Batch = None
    for task, batch in batches.items():
        larger = _join(joined, batch, pad_token) if tasks else None
        if tasks and larger is None:
            yield tasks, joined
            tasks = []
        tasks, joined = [*tasks, task], batch if larger is None else larger
    yield tasks, joined


#: Inputs of texts that can be padded further, because a mask says what is padding.
_PADDED = ("input_ids", "attention_mask", "token_type_ids", "labels")


def _join(one: Batch, other: Batch, pad_token: int) -> Batch | None:
    """One batch with the rows of two; None if it would be too large, or if their inputs differ in kind."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or one.keys() != other.keys():
        return None
    if count_rows([one]) + count_rows([other]) > PASS_ROWS:
        return None
    joined = {}
    for name, first in one.items():
        second = other[name]
        if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dim() != second.dim():
            return None
        if first.shape[1:] != second.shape[1:]:
            if first.dim() != 2 or name not in _PADDED or "attention_mask" not in one:
                return None
            length = max(first.shape[1], second.shape[1])
            value = {"input_ids": pad_token, "labels": MASKED}.get(name, 0)
            first, second = (F.pad(part, (0, length - part.shape[1]), value=value) for part in (first, second))
        joined[name] = torch.cat([first, second])
    return None if "input_ids" in joined and joined["input_ids"].numel() > PASS_TOKENS else joined


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in parameters.items()}


def _endless(count: int, seed: int) -> Iterator[int]:
    """Numbers of batches in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@torch.no_grad()
def _evaluate(done: Distillation, step: int, model: nn.Module, guides: Mapping[str, Guide]) -> float:
    """The mean over tasks of the loss on held-out rows."""
    losses = {}
    for task, guide in guides.items():
        sizes = [count_rows([guide.batches[number]]) for number in guide.held_out]
        values = [float(guide.loss(model, number)) for number in guide.held_out]
        losses[task] = sum(n * v for n, v in zip(sizes, values, strict=True)) / sum(sizes)
    done.losses.append((step, losses))
    return sum(losses.values()) / len(losses)
