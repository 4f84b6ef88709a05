"""What calibration and distillation read: a merge, the fine-tuned models as teachers, and unlabeled rows."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..cards.metadata import RECORD
from ..checkpoints.open import HUB_ID
from ..checkpoints.tokenizer import token_difference
from ..curvature.batches import moved
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import MAX_TOKENIZER, read_json
from ..tasks import LoadOptions
from ..tasks.loading import read_unlabeled
from ..tasks.model_args import BASIC_KEYS, ModelArgs
from ..tasks.model_files import folder_of
from ..tasks.models import device_of, encoder_prefix, with_encoder_of
from ..text import listed, nearest
from ..urls import is_url, url_of
from .layers import Layer
from .model_io import AnyModel, ModelFiles, open_model_files
from .rows import TaskRows, cut_batch, hold_out

#: Rows per task, unless the user gives another limit.
LIMIT = 256


@dataclass
class MergeInputs:
    """An opened merge with its teachers and rows."""

    merged: AnyModel
    teachers: Mapping[str, AnyModel]
    rows: dict[str, TaskRows]
    """Task → rows on the device."""
    device: torch.device
    shared_head: bool
    """Whether all tasks share the merge's head. Otherwise each keeps the head of its fine-tuned model."""
    excluded: Sequence[str]
    """Patterns over tensor names that the merge's recipe excludes."""
    notes: list[str]
    on_exit: contextlib.ExitStack
    """Closes what was opened."""

    def keeps(self, layer: Layer) -> bool:
        """Whether a layer keeps the merge's weights: a head that tasks do not share, or one the recipe excludes."""
        if not self.shared_head and not layer.path.startswith(encoder_prefix(self.merged.module)):
            return True
        return self.excludes(self.merged.tensors_of(layer.parameters[0]))

    def with_head(self, task: str) -> nn.Module:
        """A module with all weights of the merge, and with the head of a task."""
        whole = self.merged.whole(self.device)
        if self.shared_head:
            return whole
        teacher = self.teachers[task]
        head = copy.deepcopy(teacher.whole(self.device))
        return with_encoder_of(whole, head, self.merged.reference, teacher.reference)

    def excludes(self, tensors: Sequence[str]) -> bool:
        """Whether the merge's recipe excludes one of these tensors."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for tensor in tensors for pattern in self.excluded)


def read_record(folder: Path) -> dict[str, Any]:
    """The record that gradmerge wrote into a model's folder; empty if there is none."""
    path = folder / RECORD
    return read_json(path, MAX_TOKENIZER) if path.is_file() else {}


def recorded_models(folder: Path) -> dict[str, str]:
    """Name → path, Hub id or URL of the models that a merge was made of."""
    models = read_record(folder).get("models")
    if not isinstance(models, dict):
        return {}
    references = {str(name): recorded_model(folder, reference) for name, reference in models.items()}
    return {name: reference for name, reference in references.items() if reference is not None}


def recorded_model(folder: Path, reference: Any) -> str | None:
    """The path, Hub id or URL of a model in the record of a folder."""
    if not isinstance(reference, str):
        return None
    path = Path(os.path.normpath(folder / reference))
    is_path = not is_url(reference) and (path.exists() or not HUB_ID.fullmatch(reference))
    return str(path) if is_path else reference


def find_teachers(merged: str, tasks: Sequence[str], teachers: Mapping[str, str]) -> dict[str, str]:
    """Task → its fine-tuned model: the model in ``teachers``, or else the model of that name in the merge's record."""
    recorded = recorded_models(folder_of(merged))
    for name in teachers:
        if name not in tasks:
            raise InputError(f"teachers: there is no data for {name!r}{nearest(name, tasks)}")
    references = {}
    for task in tasks:
        reference = teachers.get(task, recorded.get(task))
        if reference is None:
            known = f"the record of {merged} names {', '.join(recorded)}" if recorded else f"{merged} has no record"
            raise InputError(
                f"{task}: no fine-tuned model has this name; {known}{nearest(task, recorded) or '.'} "
                f"Give the fine-tuned model of {task} as its teacher."
            )
        references[task] = reference
    return references


@contextlib.contextmanager
def opened_inputs(
    merged: str,
    data: Mapping[str, str],
    teachers: Mapping[str, str],
    options: LoadOptions,
    *,
    check: bool = True,
    tokens: int | None = None,
) -> Iterator[MergeInputs]:
    """Open the models without their weights, and read the rows. All incompatibilities are in one message.

    Args:
        merged: The merge.
        data: Task → data source.
        teachers: Task → fine-tuned model.
        options: How models and rows are loaded.
        check: Hold out rows.
        tokens: Split batches of texts with more tokens.
    """
    args, device = ModelArgs.parse(options["model_args"], BASIC_KEYS), device_of(options["device"])
    with contextlib.ExitStack() as stack:
        opened = open_model_files(merged, options["task"], args.attn_implementation)
        stack.callback(opened.checkpoint.close)
        files: dict[str, ModelFiles] = {}
        for task, reference in teachers.items():
            files[task] = open_model_files(reference, opened.info.task, args.attn_implementation)
            stack.callback(files[task].checkpoint.close)
        record = read_record(opened.info.folder)
        excluded = record.get("exclude") or record.get("recipe", {}).get("exclude", [])
        shared = shares_head(opened, files, excluded)
        check_teachers(opened, files, shared)
        rows, notes = {}, []
        for task, source in data.items():
            limited = options if options["limit"] is not None else LoadOptions(**{**options, "limit": LIMIT})
            batches, row_notes = read_unlabeled(source, opened.module, opened.info, limited)
            notes += [f"{task}: {note}" for note in row_notes]
            batches = [moved(batch, device) for batch in batches]
            if tokens is not None:
                batches = [part for batch in batches for part in cut_batch(batch, tokens)]
            rows[task] = hold_out(f"data[{task!r}]", batches) if check else TaskRows(batches, [])
        for model in files.values():  # decoders that classify look for the last token that is not padding
            _copy_pad_token(opened.module, model.module)
        if not shared:
            notes.append("the tasks do not share a head: each keeps the head of its fine-tuned model")
        yield MergeInputs(opened, files, rows, device, shared, excluded, notes, stack)


def shares_head(merged: AnyModel, teachers: Mapping[str, AnyModel], excluded: Sequence[str]) -> bool:
    """Whether the merge has one head for all tasks: same classes, same shapes, and not excluded from the merge."""
    if merged.task in ("causal-lm", "seq2seq", "embedding"):
        return True
    stored = [merged.tensors_of(name) for name in _head(merged.module)]
    if [] in stored or any(fnmatch.fnmatchcase(n, pattern) for names in stored for n in names for pattern in excluded):
        return False
    return same_head(merged.module, [teacher.module for teacher in teachers.values()])


def same_head(merged: nn.Module, teachers: Sequence[nn.Module]) -> bool:
    """Whether all models have the same classes, and the same parameters outside the encoder."""
    classes = [getattr(getattr(model, "config", None), "id2label", None) for model in (merged, *teachers)]
    heads = [_head(model) for model in (merged, *teachers)]
    return not encoder_prefix(merged) or (
        classes.count(classes[0]) == len(classes) and heads.count(heads[0]) == len(heads)
    )


def _head(module: nn.Module) -> dict[str, list[int]]:
    """Name → shape of the parameters outside the encoder; none if the model has no head for a task."""
    prefix = encoder_prefix(module)
    return {name: list(p.shape) for name, p in module.named_parameters() if prefix and not name.startswith(prefix)}


def check_teachers(merged: AnyModel, teachers: Mapping[str, AnyModel], shared_head: bool) -> None:
    """Raise with all differences in names, shapes and vocabulary between the merge and its teachers.

    Without a shared head, only the encoders are compared.
    """
    prefix = "" if shared_head else encoder_prefix(merged.module)

    def shapes(model: AnyModel) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in model.module.named_parameters() if name.startswith(prefix)}

    ours = shapes(merged)
    wrong = [f"{merged.reference}: {name} is not in its files" for name in merged.missing if name.startswith(prefix)]
    for task, teacher in teachers.items():
        theirs = shapes(teacher)
        lines = [
            f"{name} is {theirs.get(name, 'missing')} in the fine-tuned model, and {ours.get(name, 'missing')} in the "
            "merge"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        lines += [f"{name} is not in the files" for name in teacher.missing]
        if isinstance(merged, ModelFiles) and isinstance(teacher, ModelFiles):
            tokens = token_difference(merged.checkpoint, teacher.checkpoint)
            lines += [] if tokens is None else tokens.lines
        wrong += [f"{task}, {teacher.reference}: {line}" for line in lines]
    if wrong:
        raise InputError(f"the fine-tuned models do not fit the merge {merged.reference}:\n{listed(wrong)}")


def _copy_pad_token(source: nn.Module, target: nn.Module) -> None:
    ours, theirs = (module.config.get_text_config() for module in (source, target))  # type: ignore[operator, union-attr]
    if getattr(theirs, "pad_token_id", None) is None and getattr(ours, "pad_token_id", None) is not None:
        theirs.pad_token_id = ours.pad_token_id


def model_reference(reference: str, relative_to: Path, out: Path) -> str:
    """A model as a record in ``out`` names it: a Hub id or a URL as it is, a folder relative to ``out``."""
    path = local_path(reference, relative_to)
    return url_of(path) or (os.path.relpath(path, out) if path.exists() else reference)
