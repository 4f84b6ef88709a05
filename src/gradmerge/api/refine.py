"""What `calibrate` and `distill` share: checks, results, copies of modules, and the folder that they write."""

from __future__ import annotations

import contextlib
import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..display import Displayed, View
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..notes import Note
from ..report.page import Page, write_report

if TYPE_CHECKING:
    from torch import nn

    from ..refinement.inputs import MergeInputs
    from ..refinement.model_io import AnyModel
    from ..tasks import LoadOptions

#: By default, batches of texts with more tokens (with padding) are split: activations and answers take memory for each.
BATCH_TOKENS = 8192


@dataclass(repr=False, kw_only=True)
class RefinementResult(Displayed):
    """What a calibration or distillation did."""

    output: Path | None = None
    """The folder that was written."""
    model: nn.Module | None = None
    """The new module, for a module in memory."""
    rows: dict[str, int] = field(default_factory=dict)
    """Task → number of rows."""
    seconds: float = 0.0
    notes: list[Note | str] = field(default_factory=list)

    action: ClassVar[str]
    """The key of the facts in the record, and a tag of the card."""

    @property
    @abstractmethod
    def improved(self) -> bool:
        """Whether the result differs from the merge."""

    @property
    @abstractmethod
    def verdict(self) -> list[str]:
        """What the report says first."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what was done, for the record and ``--json``."""

    @abstractmethod
    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows: every task before and after."""

    @abstractmethod
    def card_text(self) -> str:
        """Return the first section of the model card."""

    @abstractmethod
    def page(self, merged: str) -> Page:
        """Build the report, without its notes and provenance."""

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        output = None if self.output is None else str(self.output)
        return {"output": output, **self.facts(), "seconds": self.seconds, "notes": self.notes}

    def _view(self) -> View:
        columns, rows = self.table()
        return columns, rows, self.verdict


Result = TypeVar("Result", bound=RefinementResult)
Refine = Callable[["MergeInputs", Path | None], tuple[Result, "AnyModel", Mapping[str, Any]]]
"""Computes with the inputs and a folder for temporary files (None for modules). Returns what was done, the model that
changes, and parameter → new value, or what returns it as ``get()``."""


def paths_by_name(parameter: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Task → path or name; raise for anything else, such as a module."""
    for name, value in values.items():
        if not isinstance(value, str | Path):
            kind = type(value).__name__
            raise InputError(f"{parameter}[{name!r}]: must be a path or a name for a model folder, not {kind}")
    return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Turn running out of memory into a MachineError that names parameters which need less."""
    from ..curvature.batches import is_out_of_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        raise MachineError(f"out of memory. Use {advice}") from error


def refine_module(
    merged: nn.Module,
    data: Mapping[str, Any],
    teachers: Mapping[str, Any],
    refine: Refine[Result],
    *,
    check: bool = True,
) -> Result:
    """Refine a copy of a module.

    Args:
        merged: The merge.
        data: Task → batches.
        teachers: Task → module.
        refine: Computes the new values of parameters.
        check: Hold out rows.
    """
    import torch
    from torch import nn

    from ..curvature.batches import moved
    from ..refinement.inputs import MergeInputs, check_teachers, shares_head
    from ..refinement.model_io import ModelInMemory
    from ..refinement.rows import TaskRows, as_batches, hold_out

    begun = time.perf_counter()
    if set(teachers) != set(data):
        raise InputError(f"teachers: give a module for every task: {', '.join(data)}")
    for task, teacher in teachers.items():
        if not isinstance(teacher, nn.Module):
            raise InputError(f"teachers[{task!r}]: must be a module, as the merge is one")
    device = next(merged.parameters()).device
    rows = {}
    for task, batches in data.items():
        ready = as_batches(f"data[{task!r}]", [moved(batch, device) for batch in batches])
        rows[task] = hold_out(task, ready) if check else TaskRows(ready, [])
    model = copy.deepcopy(merged).eval()
    merge = ModelInMemory("in memory", model)
    copies = {
        task: ModelInMemory("in memory", copy.deepcopy(teachers[task]).eval().requires_grad_(False)) for task in data
    }
    shared = shares_head(merge, copies, [])
    check_teachers(merge, copies, shared)
    with contextlib.ExitStack() as stack:
        result, _, values = refine(MergeInputs(merge, copies, rows, device, shared, [], [], stack), None)
        for name, value in values.items():
            model.get_parameter(name).data.copy_(value if isinstance(value, torch.Tensor) else value.get())
    model.train(merged.training)
    for parameter, original in zip(model.parameters(), merged.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    result.model = model
    result.rows = {task: task_rows.number for task, task_rows in rows.items()}
    result.seconds = time.perf_counter() - begun
    return result


@contextlib.contextmanager
def new_folder(
    out: Path, action: str, models: Sequence[str | None], data: Sequence[str], force: bool
) -> Iterator[AtomicDir]:
    """A folder to write, which must not overlap any input. Raises if an input changes meanwhile."""
    from ..engine.input_state import changed, model_paths, state_of
    from ..tasks.data import data_paths

    paths = [path for model in models for path in model_paths(model)]
    sources = [path for source in data for path in data_paths(source)]
    with AtomicDir(out, action, reads=[*paths, *sources], force=force) as staging:
        before = state_of(paths) + state_of(sources, deep=True)
        yield staging
        if path := changed(before, state_of(paths) + state_of(sources, deep=True)):
            raise MachineError(f"{path}: changed during the {action}. Nothing was written. Run it again.")


def refine_folder(
    merged: str,
    data: Mapping[str, str],
    teachers: Mapping[str, str],
    out: Path,
    refine: Refine[Result],
    options: LoadOptions,
    *,
    action: str,
    advice: str,
    settings: Mapping[str, Any] | None = None,
    check: bool = True,
    tokens: int | None = None,
    force: bool = False,
    command: str = "",
) -> Result:
    """Refine a model folder and write the result: weights, card, record and report.

    Args:
        merged: The merge.
        data: Task → data source.
        teachers: Task → fine-tuned model, where the record does not name it.
        out: The folder to write.
        refine: Computes the new values of tensors.
        options: How models and rows are loaded.
        action: What is done.
        advice: What needs less memory.
        settings: More facts for the record.
        check: Hold out rows.
        tokens: Split batches of texts with more tokens.
        force: Replace ``out`` if gradmerge wrote it.
        command: What repeats the run, for the report.
    """
    from ..cards.card import as_text, markdown_table
    from ..cards.metadata import name_of
    from ..refinement.inputs import find_teachers, model_reference, opened_inputs, recorded_models
    from ..refinement.model_io import ModelFiles, write_folder

    begun = time.perf_counter()
    if options["dtype"] not in ("auto", "float32"):
        raise InputError(f"dtype {options['dtype']}: must be float32, the type of the computation")
    references = find_teachers(merged, list(data), teachers)
    with (
        new_folder(out, action, [merged, *references.values()], list(data.values()), force) as staging,
        opened_inputs(merged, data, references, options, check=check, tokens=tokens) as inputs,
    ):
        with enough_memory(advice):
            result, files, changed = refine(inputs, staging.folder)
        assert isinstance(files, ModelFiles)
        result.output = out
        result.rows = {task: task_rows.number for task, task_rows in inputs.rows.items()}
        result.notes = [*inputs.notes, *result.notes]
        result.seconds = time.perf_counter() - begun
        names = {task: name_of(source) for task, source in data.items()}
        known = {**recorded_models(files.info.folder), **references}
        facts = {**result.facts(), **(settings or {}), "data": names}
        rows = markdown_table(
            ["task", "fine-tuned model", "rows"],
            [[as_text(task), as_text(name_of(references[task])), str(n)] for task, n in result.rows.items()],
        )
        write_folder(
            staging,
            files,
            changed,
            action=action,
            card=f"{result.card_text()} The input was {as_text(name_of(merged))}.\n\n{rows}",
            facts={
                "merged": model_reference(merged, Path(), out),
                "models": {name: model_reference(model, Path(), out) for name, model in known.items()},
                "exclude": list(inputs.excluded),
                action: facts,
            },
            inputs=[_entry("merged", inputs.merged), *(_entry("teacher", t) for t in inputs.teachers.values())],
            seconds=result.seconds,
            notes=list(map(str, result.notes)),
        )
        provenance = {"model": merged, **{f"rows of {task}": name for task, name in names.items()}}
        facts = {
            "provenance": provenance,
            "commands": [command] if command else [],
            "notes": list(map(str, result.notes)),
        }
        write_report(staging.folder, replace(result.page(name_of(merged)), **facts))
    return result


def _entry(role: str, model: AnyModel) -> dict[str, Any]:
    """Return the entry of a model in `inputs` of the record."""
    from ..cards.provenance import input_entry
    from ..refinement.model_io import ModelFiles

    assert isinstance(model, ModelFiles)
    checkpoint = model.checkpoint
    return input_entry(role, checkpoint.label, checkpoint.files(), checkpoint.hub_id, checkpoint.folder)
