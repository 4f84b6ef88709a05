"""Distill the fine-tuned models into a merge on unlabeled rows: in memory, or disk to disk.

Heavy modules are imported in the functions: the command line reads the signature of :func:`distill` without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from ..arguments import checked
from ..errors import InputError
from ..progress import Progress, shown
from ..report.page import Page
from .refine import RefinementResult, paths_by_name, refine_folder, refine_module

if TYPE_CHECKING:
    from torch import nn

    from ..refinement.distill import Distillation
    from ..refinement.inputs import MergeInputs
    from ..refinement.model_io import AnyModel
    from ..tasks import LoadOptions

#: Rows of a task in a step, and their most tokens.
BATCH_SIZE, BATCH_TOKENS = 16, 2048
#: Share of the free memory for what the fine-tuned models return.
OUTPUT_SHARE = 0.5


@dataclass(repr=False, kw_only=True)
class DistillationResult(RefinementResult):
    """What a distillation did."""

    distillation: Distillation

    action: ClassVar[str] = "distillation"

    @property
    def improved(self) -> bool:
        """Whether the result differs from the merge."""
        return self.distillation.improved

    @property
    def verdict(self) -> list[str]:
        """What the report says first."""
        from ..report.refinement import distillation_verdict

        return distillation_verdict(self.distillation)

    def facts(self) -> dict[str, Any]:
        """Return what was done, for the record and ``--json``."""
        done = self.distillation
        return {
            "improved": self.improved,
            "match": done.match,
            "steps": done.steps,
            "lr": done.lr,
            "best_step": done.best_step,
            "losses": [{"step": step, "tasks": losses} for step, losses in done.losses],
            "rows": self.rows,
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows: the loss of every task on held-out rows, before and after."""
        before, after = (self.distillation.losses_at(step) for step in (0, self.distillation.best_step))
        return ["task", "rows", "loss before", "loss after"], [
            [task, self.rows[task], before[task], after[task]] for task in before
        ]

    def card_text(self) -> str:
        """Return the first section of the model card."""
        steps = self.distillation.steps
        what = f"This merge was trained for {steps} steps" if self.improved else "Training did not improve this merge"
        return f"{what} with gradmerge on unlabeled rows, with the fine-tuned models as teachers."

    def page(self, merged: str) -> Page:
        """Build the report."""
        from ..report.refinement import distillation_page

        return distillation_page(f"Distillation of {merged}", self.distillation)

    def _line(self) -> list[str]:
        where = [] if self.output is None else [str(self.output)]
        return [*where, self.distillation.match, f"{self.distillation.steps} steps", f"{self.seconds:.1f} s"]


@checked()
def distill(
    merged: nn.Module | str | Path,
    data: Mapping[str, Any],
    *,
    teachers: Mapping[str, nn.Module | str | Path] | None = None,
    out: str | Path | None = None,
    match: Literal["auto", "representations", "answers", "both"] = "auto",
    steps: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    force: bool = False,
    command: str = "",
    **loading: Unpack[LoadOptions],
) -> DistillationResult:
    """Train a merge for a few hundred steps on unlabeled rows, with the fine-tuned models as teachers.

    Labels are not read. It works best from a calibrated merge. A tenth of the rows is held out, and the weights with
    the lowest loss on them are kept; if no step is better than the merge, the merge is returned.

    Args:
        merged: A model folder, Hub id or LoRA adapter, of which only the adapter is trained; or a module, of which a
            trained copy is returned. Of a module, parameters with ``requires_grad=False`` keep their values.
        data: Task → unlabeled rows. For a folder: a data source. For a module: batches, which are keyword arguments or
            tuples of positional ones. Every step uses one batch of each task.
        teachers: Task → its fine-tuned model. For a folder the default is the model of that name in the merge's
            record. For a module: a module for every task.
        out: For a folder: the new folder to write.
        match: What is compared with the teachers: ``representations``, ``answers``, ``both`` or ``auto``. With auto,
            language models match answers, classifiers that share a head both, and all others representations.
        steps: Number of steps. Default: 18 times the square root of the training rows per task, or 6 times if answers
            are matched. 256 rows, of which 10 % are held out, give 273 or 91 steps.
        lr: Highest learning rate. Default: 0.06 over the width of the model, or a quarter of it if that is too high.
        seed: Seed of the order of batches.
        progress: Show a bar; or an object that receives the progress.
        force: Replace the output if gradmerge wrote it, or if it is empty.
        command: What the report says to repeat the run with.
        loading: For folders: how models and rows are loaded, as :class:`gradmerge.LoadOptions` says. ``limit`` is the
            number of rows per task, 256 by default. ``batch_size`` is the number of rows of a task in a step, 16 by
            default, or fewer rows of texts with more than 2,048 tokens in all.

    Returns:
        The loss of every task on held-out rows, before, during and after.

    >>> distill("calibrated/", {"yelp": "yelp.jsonl", "imdb": "imdb.jsonl"}, out="distilled/")  # doctest: +SKIP
    >>> distill(module, {"yelp": batches}, teachers={"yelp": yelp_module}).model  # doctest: +SKIP
    """
    from torch import nn

    from ..tasks import complete

    if steps is not None and steps < 1:
        raise InputError(f"steps {steps}: must be at least 1")
    if lr is not None and not 0 < lr < float("inf"):
        raise InputError(f"lr {lr}: must be a positive number")
    if not data:
        raise InputError("data: give rows for at least one task")
    train = partial(_train, match=match, steps=steps, lr=lr, seed=seed, progress=progress)
    if isinstance(merged, nn.Module):
        if out is not None or loading:
            raise InputError("out and options for loading are for a model folder, not for a module")
        return refine_module(merged, data, dict(teachers or {}), train)
    if out is None:
        raise InputError("out is missing: name the folder to write")
    return refine_folder(
        str(merged),
        paths_by_name("data", data),
        paths_by_name("teachers", teachers or {}),
        Path(out),
        train,
        complete({"batch_size": BATCH_SIZE, **loading}, distill),
        action="distillation",
        advice="a smaller batch_size or max_length, or a larger device",
        tokens=None if "batch_size" in loading else BATCH_TOKENS,
        force=force,
        command=command,
    )


def _train(
    inputs: MergeInputs,
    folder: Path | None,
    *,
    match: str,
    steps: int | None,
    lr: float | None,
    seed: int,
    progress: bool | Progress,
) -> tuple[DistillationResult, AnyModel, Mapping[str, Any]]:
    """Train a merge. Return what was done, the trained model, and parameter → new value."""
    from ..refinement.distill import distill_model
    from ..tasks.models import encoder_prefix
    from .dry_run import free_memory

    match, device = _matched(match, inputs.merged.task, inputs.shared_head), inputs.device
    student = inputs.merged.trainable(device)
    encoder = "" if inputs.shared_head else encoder_prefix(student.module)
    for name, parameter in student.module.named_parameters():  # frozen: heads that tasks do not share, and excluded
        frozen = encoder not in name or inputs.excludes(student.tensors_of(name))
        parameter.requires_grad_(parameter.requires_grad and not frozen)
    with shown(progress, "steps") as bar:
        done = distill_model(
            student.module,
            {name: partial(teacher.whole, device) for name, teacher in inputs.teachers.items()},
            inputs.rows,
            match=match,
            steps=steps,
            lr=lr,
            seed=seed,
            memory=int(OUTPUT_SHARE * (free_memory(device) or 0)),
            progress=bar,
        )
    trained = {n: p for n, p in student.module.named_parameters() if p.requires_grad and done.improved}
    return DistillationResult(distillation=done), student, trained


def _matched(match: str, task: str, shared_head: bool) -> str:
    """What is matched; raise if the tasks cannot be compared in it."""
    from ..refinement.distill import default_match

    match = default_match(task, shared_head) if match == "auto" else match
    if match != "representations" and not shared_head:
        raise InputError(f"match {match}: the tasks do not share a head. Use representations.")
    return match
