"""Distill fine-tuned models into a merge: AdamW on unlabeled rows, with the fine-tuned models as teachers.

The loss of a step is a sum over tasks. Each task adds ‖h − h_t‖² / ‖h_t‖² over the representations of all tokens in a
batch of its rows, or the mean KL from its teacher's answers to the model's, or both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.losses import unwrapped
from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import Batch
from .distances import Outputs, answer_divergence
from .rows import TaskRows, count_rows, join_batches, positions_in

MATCHES = ("representations", "answers", "both")
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
    progress = progress or NoProgress()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise InputError("the model has no parameters that require gradients")
    done = Distillation(match, steps, default_rate(model) if lr is None else lr)
    model.eval()
    pad_token = getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None) or 0
    guides = {
        task: Guide(load, rows[task], match, memory // len(teachers), pad_token) for task, load in teachers.items()
    }
    passes = Passes(model, guides, match, pad_token)
    _evaluate(done, 0, passes)
    for task, loss in done.losses_at(0).items():
        if not math.isfinite(loss):
            raise InputError(f"{task}: the loss of the merge is not finite. Check the weights for NaN and infinity.")
    for attempt in range(1 if lr is not None else MAX_RESTARTS + 1):
        may_stop = lr is None and attempt < MAX_RESTARTS
        if _train(done, trained, passes, {task: len(one.fit) for task, one in rows.items()}, seed, may_stop, progress):
            break
        done.lr *= RESTART_FACTOR
        done.losses = done.losses[:1]
    return done


def _train(
    done: Distillation,
    trained: Mapping[str, nn.Parameter],
    passes: Passes,
    batches: Mapping[str, int],
    seed: int,
    may_stop: bool,
    progress: Progress,
) -> bool:
    """Train, and keep the weights that are best on held-out rows.

    Returns False, with the weights as before, if ``may_stop`` is set and the loss is infinite, or not lower by the
    second evaluation.
    """
    steps, lowest = done.steps, done.mean_losses[0]
    optimizer = torch.optim.AdamW(
        trained.values(), done.lr, weight_decay=0.0, fused=all(p.is_cuda for p in trained.values())
    )
    warmup = max(1, round(WARMUP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / warmup) * (1 - k / steps))
    orders = {task: _endless(count, seed + number) for number, (task, count) in enumerate(batches.items())}
    best = _copied(trained)
    every = max(1, steps // EVALUATIONS)
    progress.begin("distilling", steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        for losses in passes.losses([(task, next(order)) for task, order in orders.items()]):
            loss = torch.stack([value for _, value in losses]).sum()
            if not bool(loss.isfinite()):
                if may_stop:
                    _restore(trained, best)
                    return False
                tasks = ", ".join(task for task, _ in losses)
                raise InputError(f"{tasks}: the loss is not finite at step {step}. Try an lr below {done.lr:g}.")
            loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        optimizer.step()
        schedule.step()
        progress.advance(1)
        if step % every == 0 or step == steps:
            value = _evaluate(done, step, passes)
            if value < lowest:
                lowest, done.best_step = value, step
                best = _copied(trained)
            elif may_stop and not done.best_step and step == RESTART_AFTER * every:
                _restore(trained, best)
                return False
    _restore(trained, best)
    return True


class Guide:
    """What a fine-tuned model returns for the rows of its task.

    The outputs are computed once, or in every step if they take too much memory.
    """

    def __init__(self, load: Callable[[], nn.Module], rows: TaskRows, match: str, memory: int, pad_token: int) -> None:
        self.batches, self.match = [*rows.fit, *rows.held_out], match
        self.held_out = range(len(rows.fit), len(self.batches))
        self._teacher: nn.Module | None = load()
        self._outputs: list[Outputs] = []
        first = teacher_outputs(self._teacher, self.batches[0], match)
        if first.nbytes * rows.number > memory * count_rows(self.batches[:1]):
            return
        positions = JOINED_TEACHER_BATCHES * positions_in(self.batches[0]) if first.representation.is_cuda else 0
        for numbers, batch in join_batches(self.batches, positions, pad_token):
            sizes = [count_rows([self.batches[number]]) for number in numbers]
            self._outputs += teacher_outputs(self._teacher, batch, match).split(sizes)
        self._teacher = None

    def target(self, number: int) -> Outputs:
        """What the fine-tuned model returns for a batch."""
        if self._teacher is None:
            return self._outputs[number]
        return teacher_outputs(self._teacher, self.batches[number], self.match)


@torch.no_grad()
def teacher_outputs(teacher: nn.Module, batch: Batch, match: str) -> Outputs:
    """What a fine-tuned model returns, as far as it is matched."""
    with autocast(next(teacher.parameters()).device):
        found = Outputs.of(teacher, batch, with_head=match != "representations")
    if match == "answers" and found.logits is not None:
        empty = found.representation.new_empty(0)  # a slice would keep the whole
        return replace(found, representation=empty, positions=[0] * count_rows([batch]))
    return found


class Passes:
    """The student's passes over batches of all tasks.

    Small passes leave a GPU idle, so there batches of several tasks share a pass. The first pass with gradients shows
    how many positions fit.
    """

    def __init__(self, model: nn.Module, guides: Mapping[str, Guide], match: str, pad_token: int) -> None:
        self.model, self.guides, self.match, self.pad_token = model, guides, match, pad_token
        self._positions: int | None = None

    def losses(self, chosen: Sequence[tuple[str, int]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield task and loss of batches, given as task and number, pass by pass."""
        batches = [self.guides[task].batches[number] for task, number in chosen]
        for indices, batch in join_batches(batches, self._positions or 0, self.pad_token):
            before = self._allocated()
            targets = [self.guides[task].target(number) for task, number in (chosen[i] for i in indices)]
            rows = [count_rows([batches[i]]) for i in indices]
            losses = batch_losses(self.model, batch, rows, targets, self.match)
            if self._positions is None and torch.is_grad_enabled():
                self._positions = self._positions_that_fit(batch, self._allocated() - before)
            yield [(chosen[i][0], loss) for i, loss in zip(indices, losses, strict=True)]

    def _allocated(self) -> int:
        device = next(self.model.parameters()).device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def _positions_that_fit(self, batch: Batch, used: int) -> int:
        """How many positions fit into a pass, if those of a batch keep so many bytes for the backward pass."""
        if used <= 0:
            return 0
        free, _ = torch.cuda.mem_get_info(next(self.model.parameters()).device)
        return int(PASS_SHARE * free / used * positions_in(batch))


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


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in parameters.items()}


@torch.no_grad()
def _restore(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _endless(count: int, seed: int) -> Iterator[int]:
    """Numbers of batches in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@torch.no_grad()
def _evaluate(done: Distillation, step: int, passes: Passes) -> float:
    """The mean over tasks of the loss on held-out rows."""
    held_out = [(task, number) for task, guide in passes.guides.items() for number in guide.held_out]
    sizes = [count_rows([passes.guides[task].batches[number]]) for task, number in held_out]
    found = [one for losses in passes.losses(held_out) for one in losses]
    sums, counts = dict.fromkeys(passes.guides, 0.0), dict.fromkeys(passes.guides, 0)
    for (task, loss), rows in zip(found, sizes, strict=True):
        sums[task] += rows * float(loss)
        counts[task] += rows
    losses = {task: value / counts[task] for task, value in sums.items()}
    done.losses.append((step, losses))
    return done.mean_losses[-1]
