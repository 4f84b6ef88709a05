"""Merges as models in memory, their metrics and their gradients on data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..curvature.batches import moved
from ..curvature.checkpoint_names import stored_tensors
from ..curvature.losses import labels_of, logits_of
from ..engine.jobs import torch_type
from ..engine.plan import Plan
from ..engine.rounding import rounded
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..tasks import Generation, LoadedTask, LoadOptions, load_task, measure
from ..tasks.evaluate import with_generation_metrics
from ..tasks.models import model_with
from ..tasks.text_metrics import generation_rows
from ..text import nearest
from .candidates import Block, Candidate, KnownStatistics, look_at
from .scores import headline, loss_name

State = dict[str, Tensor]
Rows = dict[str, Tensor]
"""Metric → one number per row of the data, whose mean is the metric."""
#: Bytes of batches that are kept from one model to the next.
KEPT = 1_000_000_000


def materialise(
    plan: Plan,
    candidates: Sequence[Candidate],
    threads: int = 1,
    measured: KnownStatistics | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[State]:
    """The weights of every candidate, by the names and in the types of a merge on disk.

    ``between`` is called after every block, from several threads; what it raises ends the work.
    """
    states: list[State] = [{} for _ in candidates]
    merged_tensors = plan.merged_tensors
    infos = {name: info for job in plan.jobs for name, info in job.tensors.items()}
    for name, info in infos.items():
        copied = None if name in merged_tensors else _whole(plan.inputs.template, name)
        for state in states:
            state[name] = torch.empty(info.shape, dtype=torch_type(info)) if copied is None else copied

    def visit(block: Block) -> None:
        for state, merged in zip(states, block.merged, strict=True):
            for name, values in block.tensors_of(merged).items():
                stored = rounded(values, torch_type(infos[name]))
                state[name].view(-1)[block.start : block.start + len(stored)] = stored
        between()

    look_at(plan, candidates, visit, threads=threads, measured=measured)
    return states


def state_of(checkpoint: Checkpoint) -> State:
    """All weights of a checkpoint."""
    return {name: _whole(checkpoint, name) for name in checkpoint.tensors}


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    values = checkpoint.read(name, 0, info.numel, Buffers(), "whole").clone()
    return values.to(torch_type(info)).reshape(info.shape)


@dataclass
class TaskData:
    """Data of one task, and a model that can take any weights."""

    name: str
    loaded: LoadedTask
    generation: Generation | None = None
    """Answers are generated and scored too."""
    between: Callable[[], None] = lambda: None
    """Called before every batch; what it raises ends the evaluation."""
    _kept: list[dict[str, Tensor]] | None = field(default=None, init=False, repr=False)

    def model_with(self, state: Mapping[str, Tensor]) -> nn.Module:
        """The task's model with weights by the names of its files."""
        module: nn.Module = model_with(self.loaded.model, state, self.name)
        return module

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The batches of the data, kept from one model to the next if they are not too large."""
        if self._kept is not None:
            for batch in self._kept:
                self.between()
                yield batch
            return
        kept: list[dict[str, Tensor]] = []
        nbytes = 0
        for batch in self.loaded.batches():
            self.between()
            nbytes += sum(value.nbytes for value in batch.values())
            if nbytes <= KEPT:
                kept.append(batch)
            else:
                kept.clear()
            yield batch
        if nbytes <= KEPT:
            self._kept = kept

    def forget(self) -> None:
        """Free the batches that were kept."""
        self._kept = None

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """The task's metrics for a model."""
        return self.evaluate_rows(model)[0]

    def evaluate_rows(self, model: nn.Module) -> tuple[dict[str, Any], Rows]:
        """The same, and what they are of every row: the metric that is shown first, and the loss."""
        found = measure(model, self.batches(), self.loaded.loss)
        metrics, rows = found.summary(), found.rows()
        if self.generation is not None:
            written = generation_rows(self.loaded, model, self.generation, lambda done: self.between())
            metrics, rows = with_generation_metrics(metrics, written), rows | written
        return metrics, {name: rows[name] for name in (headline(metrics), loss_name(metrics)) if name in rows}

    def gradient(self, model: nn.Module) -> State:
        """∇Σ_i ℓ_i over the data, by the names of files, in float32 (float64 where the model is)."""
        parameters = dict(model.named_parameters())
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in parameters.items()}
        totals = {name: torch.zeros_like(p, dtype=wide[name]) for name, p in parameters.items()}
        for batch in self.batches():
            batch = moved(batch, self.loaded.device)
            loss = self.loaded.loss.losses(logits_of(model, batch), labels_of(batch)).sum()
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    totals[name] += gradient
        return {name: value.cpu() for name, value in stored_tensors(model, totals).items()}


def check_vocabulary(recipe: Recipe) -> None:
    if recipe.tokenizer is not None:
        raise InputError(
            "tokenizer: a merge with a vocabulary of its own is not evaluated in memory, where the data are encoded as "
            "the models do. Merge it, and use `gradmerge evaluate` on the result"
        )


def load_data(name: str, recipe: Recipe, model: str, source: str, loading: LoadOptions) -> TaskData:
    """Data of a task, and a model as the recipe names it."""
    check_vocabulary(recipe)
    path = local_path(model, recipe.folder)
    return TaskData(name, load_task(str(path) if path.exists() else model, source, **loading))


def match_data(given: Mapping[str, str], tasks: Sequence[str]) -> dict[str, str]:
    """Check that every name of `--data NAME=SRC` is a task."""
    for name in given:
        if name not in tasks:
            hint = f"{nearest(name, tasks)}\n  Tasks are {', '.join(tasks)}."
            raise InputError(f"--data {name}=…: no task of the recipe has this name{hint}")
    return dict(given)
