"""Distill the fine-tuned models into a merge on unlabeled rows: in memory, or disk to disk."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from ..arguments import check_known, checked
from ..cards.metadata import name_of
from ..checkpoints.adapter_config import is_adapter
from ..checkpoints.lora import AdapterCheckpoint
from ..curvature.batches import moved
from ..curvature.checkpoint_names import adapter_names
from ..display import Displayed, View
from ..engine.input_state import changed, model_paths, state_of
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..refinement.calibrate import TaskRows, count_rows, hold_out
from ..refinement.distill import (
    MATCHES,
    Distillation,
    default_match,
    distill_model,
    head_parameters,
)
from ..refinement.inputs import MergeInputs, find_teachers, model_reference, opened_inputs, recorded_models
from ..refinement.model_io import copy_adapter_config
from ..refinement.result_folder import write_card, write_record, write_weights
from ..refinement.streaming import load_model_whole, load_whole
from ..report.distillation_page import distillation_page, distillation_verdict
from ..report.page import write_report
from ..tasks import LoadOptions, complete
from ..tasks.data_sources import data_paths
from ..tasks.models import device_of, load_model
from .calibrate import check_modules, data_by_path, on_device, reading_options, same_heads


@dataclass(repr=False)
class DistillationResult(Displayed):
    """What a distillation did."""

    output: Path | None
    """The folder that was written."""
    model: nn.Module | None
    """The trained module, for a module in memory."""
    distillation: Distillation
    rows: dict[str, int] = field(default_factory=dict)
    """Task → number of rows."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def improved(self) -> bool:
        """Whether the result differs from the merge."""
        return self.distillation.improved

    @property
    def verdict(self) -> list[str]:
        """What the report says first."""
        return distillation_verdict(self.distillation)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        done = self.distillation
        return {
            "output": None if self.output is None else str(self.output),
            "improved": self.improved,
            "match": done.match,
            "steps": done.steps,
            "lr": done.lr,
            "best_step": done.best_step,
            "losses": [{"step": step, "tasks": losses} for step, losses in done.losses],
            "rows": self.rows,
            "seconds": self.seconds,
            "notes": self.notes,
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows: the loss of every task on held-out rows, before and after."""
        before, after = (self.distillation.losses_at(step) for step in (0, self.distillation.best_step))
        return ["task", "rows", "loss before", "loss after"], [
            [task, self.rows[task], before[task], after[task]] for task in before
        ]

    def _line(self) -> list[str]:
        where = [] if self.output is None else [str(self.output)]
        return [*where, self.distillation.match, f"{self.distillation.steps} steps", f"{self.seconds:.1f} s"]

    def _view(self) -> View:
        columns, rows = self.table()
        return columns, rows, self.verdict


@checked()
def distill(
    merged: nn.Module | str | Path,
    data: Mapping[str, Any],
    *,
    teachers: Mapping[str, nn.Module | str | Path] | None = None,
    out: str | Path | None = None,
    match: str = "auto",
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
        match: What is compared with the teachers: ``representations``, ``answers`` or ``both``. By default language
            models match answers, classifiers that share a head both, and all others representations.
        steps: Number of steps. Default: 50 times the square root of the rows per task, or 6 times if answers are
            matched.
        lr: Highest learning rate. Default: 0.06 over the width of the model.
        seed: Of the order of batches.
        progress: Show a bar; or an object that is told how far it is.
        force: Replace ``out`` if gradmerge wrote it.
        command: What the report says to repeat the run with.
        loading: For folders: how models and rows are loaded, as :class:`gradmerge.LoadOptions` says. ``limit`` is the
            number of rows per task, 256 by default, and ``batch_size`` the rows of a task in a step.

    Returns:
        The loss of every task on held-out rows, before, during and after.

    >>> distill("calibrated/", {"yelp": "yelp.jsonl", "imdb": "imdb.jsonl"}, out="distilled/")  # doctest: +SKIP
    >>> distill(module, {"yelp": batches}, teachers={"yelp": yelp_module}).model  # doctest: +SKIP
    """
    check_known(f"match {match!r}", match, ("auto", *MATCHES))
    if steps is not None and steps < 1:
        raise InputError(f"steps {steps}: must be at least 1")
    if lr is not None and not 0 < lr < float("inf"):
        raise InputError(f"lr {lr}: must be a positive number")
    if not data:
        raise InputError("data: give rows for at least one task")
    request = _Request(match, steps, lr, seed)
    if isinstance(merged, nn.Module):
        if out is not None or loading:
            raise InputError("out and options for loading are for a model folder, not for a module")
        return _distill_module(merged, data, dict(teachers or {}), request, progress)
    if out is None:
        raise InputError("out is missing: name the folder to write")
    options = complete(loading, distill)
    if options["dtype"] not in ("auto", "float32"):
        raise InputError(f"dtype {options['dtype']}: weights are trained in float32")
    sources, given = data_by_path("data", data), data_by_path("teachers", teachers or {})
    return _distill_folder(str(merged), sources, given, Path(out), request, options, progress, force, command)


@dataclass(frozen=True)
class _Request:
    match: str
    steps: int | None
    lr: float | None
    seed: int

    def matched(self, task: str, shared_head: bool) -> str:
        match = default_match(task, shared_head) if self.match == "auto" else self.match
        if match != "representations" and not shared_head:
            raise InputError(f"match {match}: the tasks do not share a head. Use representations.")
        return match

    def run(
        self,
        model: nn.Module,
        teachers: Mapping[str, nn.Module],
        rows: Mapping[str, TaskRows],
        task: str,
        shared_head: bool,
        progress: bool | Progress,
    ) -> Distillation:
        with shown(progress, "steps") as bar:
            return distill_model(
                model,
                teachers,
                rows,
                match=self.matched(task, shared_head),
                steps=self.steps,
                lr=self.lr,
                seed=self.seed,
                progress=bar,
            )


def _distill_module(
    merged: nn.Module,
    data: Mapping[str, Any],
    teachers: dict[str, Any],
    request: _Request,
    progress: bool | Progress,
) -> DistillationResult:
    begun = time.perf_counter()
    check_modules(merged, data, teachers)
    device = next(merged.parameters()).device
    batches = {task: on_device(task, given, device) for task, given in data.items()}
    copies = {task: copy.deepcopy(model).eval().requires_grad_(False) for task, model in teachers.items()}
    model = copy.deepcopy(merged).eval()
    shared = same_heads(model, copies)
    name = type(model).__name__
    task = "causal-lm" if name.endswith(("ForCausalLM", "LMHeadModel")) else "other"
    task = "seq2seq" if name.endswith("ForConditionalGeneration") else task
    task = "classify" if name.endswith("Classification") else task
    rows = {name: hold_out(given) for name, given in batches.items()}
    done = request.run(model, copies, rows, task, shared, progress)
    return _result(done, rows, None, model.train(merged.training), time.perf_counter() - begun, [])


def _result(
    done: Distillation,
    rows: Mapping[str, TaskRows],
    out: Path | None,
    model: nn.Module | None,
    seconds: float,
    notes: list[str],
) -> DistillationResult:
    counted = {task: sum(map(count_rows, [*one.fit, *one.held_out])) for task, one in rows.items()}
    return DistillationResult(out, model, done, counted, seconds, notes)


def _distill_folder(
    merged: str,
    data: Mapping[str, str],
    given: Mapping[str, str],
    out: Path,
    request: _Request,
    options: LoadOptions,
    progress: bool | Progress,
    force: bool,
    command: str,
) -> DistillationResult:
    begun = time.perf_counter()
    device = device_of(options["device"])
    teachers = find_teachers(merged, list(data), given)
    models = [path for one in (merged, *teachers.values()) for path in model_paths(one)]
    sources = [path for source in data.values() for path in data_paths(source)]
    with AtomicDir(out, "distillation", force=force, reads=[*models, *sources]) as staging:
        before = state_of(models) + state_of(sources, deep=True)
        with opened_inputs(merged, data, given, **reading_options(options)) as inputs:
            task = inputs.merged.info.task
            request.matched(task, inputs.shared_head)  # before anything is loaded
            batches = {name: [moved(b, device) for b in one.batches] for name, one in inputs.rows.items()}
            rows = {name: hold_out(one) for name, one in batches.items()}
            guides = {name: load_model_whole(one.reference, task, device) for name, one in inputs.teachers.items()}
            model = _student(inputs, options, device)
            done = request.run(model, guides, rows, task, inputs.shared_head, progress)
            if changed_path := changed(before, state_of(models) + state_of(sources, deep=True)):
                raise MachineError(f"{changed_path}: changed during the training. Nothing was written. Run it again.")
            notes = [*staging.notes, *inputs.notes]
            result = _result(done, rows, out, None, time.perf_counter() - begun, notes)
            sizes = _write_model(staging, inputs, model, done)
            _write_texts(staging, inputs, result, teachers, data, sizes, command)
    return result


def _student(inputs: MergeInputs, options: LoadOptions, device: torch.device) -> nn.Module:
    """The merge in memory. A head that tasks do not share is frozen; of an adapter only the adapter is trained."""
    merged = inputs.merged
    if is_adapter(merged.info.folder):
        model, _ = load_model(
            merged.reference, merged.info.task, device=str(device), dtype="float32", adapter_apart=True
        )
        return model
    model = load_whole(merged, device).requires_grad_(True)
    in_head = head_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(inputs.shared_head or not in_head(name))
    return model


def _write_model(staging: AtomicDir, inputs: MergeInputs, model: nn.Module, done: Distillation) -> dict[str, int]:
    """Write the weights: of an adapter its own tensors, else those of the model."""
    merged, checkpoint = inputs.merged, inputs.merged.checkpoint
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and done.improved}
    if not isinstance(checkpoint, AdapterCheckpoint):
        return write_weights(staging, checkpoint, {merged.names[name]: p for name, p in trained.items()})
    names = adapter_names(model)
    changed_tensors = {names[name]: p for name, p in trained.items()}
    sizes = write_weights(staging, checkpoint.adapter, changed_tensors, stem="adapter_model")
    copy_adapter_config(merged.info.folder, staging.folder)
    for path in merged.info.folder.glob("*token*"):
        if path.is_file():
            shutil.copyfile(path, staging.folder / path.name)
    return sizes


def _write_texts(
    staging: AtomicDir,
    inputs: MergeInputs,
    result: DistillationResult,
    teachers: Mapping[str, str],
    data: Mapping[str, str],
    sizes: Mapping[str, int],
    command: str,
) -> None:
    """Write the card, the record and the report."""
    names = {task: name_of(source) for task, source in data.items()}
    rows = "\n".join(f"| {task} | {result.rows[task]} |" for task in names)
    done = result.distillation
    what = f"The merge was trained for {done.steps} steps" if result.improved else "Training did not improve the merge"
    text = f"{what} with gradmerge on unlabeled rows, with the fine-tuned models as teachers.\n\n"
    text += f"| task | rows |\n|---|---:|\n{rows}\n"
    write_card(staging, inputs.merged, "distillation", text)
    models = {**recorded_models(inputs.merged.info.folder), **teachers}
    relative = {name: model_reference(reference, Path(), staging.out) for name, reference in models.items()}
    facts = {name: value for name, value in result.to_dict().items() if name not in ("output", "notes", "seconds")}
    facts |= {"data": names}
    write_record(staging, inputs.merged, "distillation", facts, relative, sizes, result.seconds, result.notes)
    provenance = {"model": inputs.merged.reference, **{f"rows of {task}": name for task, name in names.items()}}
    commands = [command] if command else []
    title = f"Distillation of {name_of(inputs.merged.reference)}"
    write_report(staging.folder, distillation_page(title, done, result.notes, provenance, commands))
