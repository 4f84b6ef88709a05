"""Distill fine-tuned models into a merge: AdamW on unlabeled rows, with the fine-tuned models as teachers.

The loss of a step is a sum over tasks. Each task adds ‖h − h_t‖² / ‖h_t‖² over the representations of all tokens in a
batch of its rows, or the mean KL from its teacher's answers to the model's, or both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..curvature.losses import unwrapped
from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import Batch
from .distances import Outputs, answer_divergence
from .rows import TaskRows, count_rows, join_batches, positions_in

#: The default learning rate is this over the width of the model: 1e-4 at 640, 3e-4 at 200.
RATE_TIMES_WIDTH = 0.06
#: The default number of steps is one of these times the square root of the rows per task. A row of a language model has
#: many answers to match, so that fewer steps are enough.
STEPS_PER_ROOT, STEPS_PER_ROOT_OF_TOKENS = 18, 6
WARMUP_SHARE = 0.1
EVALUATIONS = 5
#: If no step is better by this evaluation, the default learning rate is too high: training starts again with less. The
#: evaluation before it comes soon after the warm-up, where the loss is often high for a while.
RESTART_AFTER, RESTART_FACTOR, MAX_RESTARTS = 2, 0.25, 2
MAX_NORM = 1.0
#: On a GPU, batches of several tasks share a pass that takes at most this share of the free memory.
PASS_SHARE = 0.4
#: On a GPU, so many batches share a pass of a fine-tuned model, whose outputs take little of the memory.
JOINED_TEACHER_BATCHES = 4


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

    @property
    def mean_losses(self) -> list[float]:
        """The mean over tasks of the loss on held-out rows, for every evaluation."""
        return [sum(losses.values()) / len(losses) for _, losses in self.losses]

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
        lr: Highest learning rate, after a warm-up and before a linear decay. By default it follows the width. If it is
            too high, so that the loss on held-out rows rises, training starts again with a quarter of it.
        seed: Of the order of batches.
        memory: Bytes for what the fine-tuned models return. One whose outputs fit is freed before the next is loaded.
        progress: Shows how many steps are done.
    """
    steps = default_steps(rows, match) if steps is None else steps
    done = Distillation(match, steps, default_rate(model) if lr is None else lr)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("the model has no parameters that require gradients")
    model.eval()
    lessons = Lessons(model, teachers, rows, match, memory)
    done.losses.append((0, lessons.held_out_losses()))
    for task, loss in done.losses_at(0).items():
        if not math.isfinite(loss):
            raise InputError(f"{task}: the loss of the merge is not finite. Check the weights for NaN and infinity.")
    for restarts_left in reversed(range(MAX_RESTARTS + 1 if lr is None else 1)):
        if _train(done, lessons, seed, restarts_left > 0, progress or NoProgress()):
            break
        done.lr *= RESTART_FACTOR
        done.losses = done.losses[:1]
    return done


def _train(done: Distillation, lessons: Lessons, seed: int, may_stop: bool, progress: Progress) -> bool:
    """Train, and keep the weights that are best on held-out rows.

    Returns False, with the weights as before, if ``may_stop`` is set and the loss is infinite, or not lower by the
    second evaluation.
    """
    steps, lowest = done.steps, done.mean_losses[0]
    trained = [p for p in lessons.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, done.lr, weight_decay=0.0, fused=all(p.is_cuda for p in trained))
    warmup = max(1, round(WARMUP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / warmup) * (1 - k / steps))
    orders = {task: _endless(one.fit, seed + number) for number, (task, one) in enumerate(lessons.tasks.items())}
    best = _copied(trained)
    every = max(1, steps // EVALUATIONS)
    progress.begin("distilling", steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        if tasks := _backward(lessons, [(task, next(order)) for task, order in orders.items()]):
            if not may_stop:
                raise InputError(f"{tasks}: the loss is not finite at step {step}. Try an lr below {done.lr:g}.")
            _restore(trained, best)
            return False
        nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        schedule.step()
        progress.advance(1)
        if step % every == 0 or step == steps:
            done.losses.append((step, lessons.held_out_losses()))
            if done.mean_losses[-1] < lowest:
                lowest, done.best_step = done.mean_losses[-1], step
                best = _copied(trained)
            elif may_stop and not done.best_step and step == RESTART_AFTER * every:
                _restore(trained, best)
                return False
    _restore(trained, best)
    return True


def _backward(lessons: Lessons, chosen: Sequence[tuple[str, int]]) -> str:
    """Add up the gradients of batches. Returns the tasks whose loss is not finite; empty if it is."""
    for losses in lessons.losses(chosen):
        loss = torch.stack([value for _, value in losses]).sum()
        if not bool(loss.isfinite()):
            return ", ".join(task for task, _ in losses)
        loss.backward()
    return ""


def _copied(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in parameters]


@torch.no_grad()
def _restore(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


class TaskBatches(NamedTuple):
    """The batches of a task, and what its fine-tuned model returns for them."""

    batches: Sequence[Batch]
    fit: int
    """The number of batches to train on; the others are held out."""
    target: Callable[[int], Outputs]


class Lessons:
    """The losses of a student on batches of all tasks.

    Small passes leave a GPU idle, so there batches of several tasks share a pass. The first pass with gradients shows
    how many positions fit.
    """

    def __init__(
        self,
        model: nn.Module,
        teachers: Mapping[str, Callable[[], nn.Module]],
        rows: Mapping[str, TaskRows],
        match: str,
        memory: int,
    ) -> None:
        self.model, self._match = model, match
        self._pad_token = getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None) or 0
        self._device = next(model.parameters()).device
        self._positions: int | None = None
        self.tasks = {}
        for task, (fit, held_out) in rows.items():
            batches = [*fit, *held_out]
            self.tasks[task] = TaskBatches(
                batches, len(fit), self._targets(teachers[task](), batches, memory // len(rows))
            )

    def _targets(self, teacher: nn.Module, batches: Sequence[Batch], memory: int) -> Callable[[int], Outputs]:
        """What a fine-tuned model returns: computed once, or in every step if it takes too much memory."""
        first = teacher_outputs(teacher, batches[0], self._match)
        if first.nbytes * count_rows(batches) > memory * count_rows(batches[:1]):
            return lambda number: teacher_outputs(teacher, batches[number], self._match)
        outputs: list[Outputs] = []
        positions = JOINED_TEACHER_BATCHES * positions_in(batches[0]) if self._device.type == "cuda" else 0
        for numbers, batch in join_batches(batches, positions, self._pad_token):
            sizes = [count_rows([batches[number]]) for number in numbers]
            outputs += teacher_outputs(teacher, batch, self._match).split(sizes)
        return outputs.__getitem__

    def losses(self, chosen: Sequence[tuple[str, int]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield task and loss of batches, given as task and number, pass by pass."""
        batches = [self.tasks[task].batches[number] for task, number in chosen]
        for indices, batch in join_batches(batches, self._positions or 0, self._pad_token):
            before = self._allocated()
            targets = [self.tasks[task].target(number) for task, number in (chosen[i] for i in indices)]
            losses = batch_losses(self.model, batch, [count_rows([batches[i]]) for i in indices], targets, self._match)
            if self._positions is None and torch.is_grad_enabled():
                used = self._allocated() - before  # what the positions of the batch keep for the backward pass
                free = torch.cuda.mem_get_info(self._device)[0] if used > 0 else 0
                self._positions = int(PASS_SHARE * free / max(used, 1) * positions_in(batch))
            yield [(chosen[i][0], loss) for i, loss in zip(indices, losses, strict=True)]

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Task → loss on held-out rows."""
        held_out = [(task, n) for task, one in self.tasks.items() for n in range(one.fit, len(one.batches))]
        losses = [loss for losses in self.losses(held_out) for _, loss in losses]
        sums, counts = dict.fromkeys(self.tasks, 0.0), dict.fromkeys(self.tasks, 0)
        for (task, number), loss in zip(held_out, losses, strict=True):
            rows = count_rows([self.tasks[task].batches[number]])
            sums[task] += rows * float(loss)
            counts[task] += rows
        return {task: value / counts[task] for task, value in sums.items()}


@torch.no_grad()
def teacher_outputs(teacher: nn.Module, batch: Batch, match: str) -> Outputs:
    """What a fine-tuned model returns, as far as it is matched."""
    with autocast(next(teacher.parameters()).device):
        found = Outputs.of(teacher, batch, with_head=match != "representations")
    if match == "answers" and found.logits is not None:
        empty = found.representation.new_empty(0)  # a slice would keep the whole
        return replace(found, representation=empty, positions=[0] * count_rows([batch]))
    return found


def batch_losses(
    model: nn.Module, batch: Batch, rows: Sequence[int], targets: Sequence[Outputs], match: str
) -> list[Tensor]:
    """The distillation losses of the parts of a batch.

    Args:
        model: The student.
        batch: The inputs of all parts.
        rows: The number of rows of each part.
        targets: What the fine-tuned models return for each part.
        match: What is compared.
    """
    with autocast(next(model.parameters()).device):
        found = Outputs.of(model, batch, with_head=match != "representations")
    losses = []
    for outputs, target in zip(found.split(rows), targets, strict=True):
        parts = []
        if match in ("representations", "both"):
            h, h_t = outputs.representation.float(), target.representation.float()
            parts.append((h - h_t).square().sum() / h_t.square().sum().clamp(min=1e-30))
        if match in ("answers", "both"):
            if outputs.logits is None or target.logits is None:
                raise InputError("the model has no head for a task, so only representations can be matched")
            parts.append(answer_divergence(model, outputs.logits, target.logits).mean())
        losses.append(torch.stack(parts).sum())
    return losses


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _endless(count: int, seed: int) -> Iterator[int]:
    """Numbers of batches in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
