"""Calibrate a merge on unlabeled rows: in memory, or disk to disk."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..arguments import check_known, checked
from ..cards.metadata import name_of
from ..curvature.batches import moved
from ..display import Displayed, View
from ..engine.input_state import changed, model_paths, state_of
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..notes import Note
from ..progress import Progress, shown
from ..refinement.blocks import Batch, BlockModel, HiddenCache, Structure, block_lists, examine, is_linear
from ..refinement.calibrate import (
    ALPHA,
    CANDIDATES,
    MERGE,
    RIDGE,
    Calibration,
    Settings,
    TaskRows,
    calibrate_model,
    count_rows,
    hold_out,
    take_rows,
)
from ..refinement.distances import Distances
from ..refinement.inputs import MergeInputs, find_teachers, model_reference, opened_inputs, recorded_models
from ..refinement.output_factors import output_factors
from ..refinement.result_folder import write_card, write_record, write_weights
from ..refinement.streaming import ModelFiles, WeightMemory, load_model_whole, load_whole
from ..report.calibration_page import calibration_page, calibration_verdict
from ..report.page import write_report
from ..tasks import LoadOptions, complete
from ..tasks.data_sources import data_paths
from ..tasks.encoder import encoder_prefix, representation_modules
from ..tasks.models import device_of
from ..text import count, parse_size
from .dry_run import PROCESS, JobSize, free_disk, free_memory

#: Layers with more inputs or outputs have no output factor.
MAX_KRONECKER_DIM = 16384
#: Share of the free memory that hidden states may take, and that all G matrices together may take.
CACHE_SHARE, FACTOR_SHARE = 0.5, 0.5


@dataclass(repr=False)
class CalibrationResult(Displayed):
    """What a calibration did."""

    output: Path | None
    """The folder that was written."""
    model: nn.Module | None
    """The calibrated module, for a module in memory."""
    chosen: str
    """The candidate that was closest to the fine-tuned models; ``merge`` if calibration did not help."""
    layers: int
    """How many linear layers were solved."""
    distances: dict[str, Distances] = field(default_factory=dict)
    """Candidate → distances on held-out rows; ``merge`` is the model before. Empty if they were not measured."""
    rows: dict[str, int] = field(default_factory=dict)
    """Task → number of rows."""
    seconds: float = 0.0
    notes: list[Note | str] = field(default_factory=list)

    @property
    def verdict(self) -> list[str]:
        """What the report says first."""
        return calibration_verdict(self.chosen, self.distances)

    @property
    def improved(self) -> bool:
        """Whether the result differs from the merge."""
        return self.chosen != MERGE

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "output": None if self.output is None else str(self.output),
            "chosen": self.chosen,
            "improved": self.improved,
            "layers": self.layers,
            "distances": {name: asdict(one) | {"total": one.total} for name, one in self.distances.items()},
            "rows": self.rows,
            "seconds": self.seconds,
            "notes": self.notes,
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows: the distances of every task before and after."""
        columns = ["task", "rows", "distance before", "distance after", "KL before", "KL after"]
        before, after = self.distances.get(MERGE), self.distances.get(self.chosen)
        if before is None or after is None:
            return columns[:2], [[task, number] for task, number in self.rows.items()]
        return columns, [
            [
                task,
                self.rows[task],
                before.representations[task],
                after.representations[task],
                before.answers.get(task),
                after.answers.get(task),
            ]
            for task in before.representations
        ]

    def _line(self) -> list[str]:
        where = [] if self.output is None else [str(self.output)]
        return [*where, self.chosen, f"{self.layers} layers", f"{self.seconds:.1f} s"]

    def _view(self) -> View:
        columns, rows = self.table()
        return columns, rows, self.verdict


@checked()
def calibrate(
    merged: nn.Module | str | Path,
    data: Mapping[str, Any],
    *,
    teachers: Mapping[str, nn.Module | str | Path] | None = None,
    out: str | Path | None = None,
    curvature: str = "auto",
    alpha: float = ALPHA,
    ridge: float = RIDGE,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    cache_memory: int | str | None = None,
    check: bool = True,
    seed: int = 0,
    progress: bool | Progress = True,
    force: bool = False,
    command: str = "",
    **loading: Unpack[LoadOptions],
) -> CalibrationResult:
    """Bring a merge closer to its fine-tuned models: solve for each linear layer on a few unlabeled rows.

    Labels are not read, and nothing is trained. A tenth of the rows is held out. If no result is closer to the
    fine-tuned models on these rows than the merge, the merge is returned.

    Args:
        merged: A model folder, Hub id or LoRA adapter; or a module, of which a calibrated copy is returned.
        data: Task → unlabeled rows. For a folder: a data source. For a module: batches, which are keyword arguments or
            tuples of positional ones.
        teachers: Task → its fine-tuned model. For a folder the default is the model of that name in the merge's
            record. For a module: a module for every task.
        out: For a folder: the new folder to write.
        curvature: ``none``; ``merge``, which weights errors by output factors, the curvature of a layer's output; or
            ``auto``, which tries both.
        alpha: Share of the fine-tuned model's activations in the targets, from 0 to 1.
        ridge: How strongly the weights are held to the merge.
        max_kronecker_dim: Layers with more inputs or outputs have no output factor.
        cache_memory: Bytes of hidden states in memory, or a size such as "8GB"; more go to a temporary file. Default:
            half of the free memory.
        check: Hold out rows and compare with the merge. Without it, all rows are used once.
        seed: Of the labels that are sampled for output factors.
        progress: Show a bar; or an object that is told how far it is.
        force: Replace ``out`` if gradmerge wrote it.
        command: What the report says to repeat the run with.
        loading: For folders: how models and rows are loaded, as :class:`gradmerge.LoadOptions` says. ``limit`` is the
            number of rows per task, 256 by default.

    Returns:
        The chosen candidate and the distances to each fine-tuned model, before and after.

    >>> calibrate("merged/", {"yelp": "yelp.jsonl", "imdb": "imdb.jsonl"}, out="calibrated/")  # doctest: +SKIP
    >>> calibrate(module, {"yelp": batches}, teachers={"yelp": yelp_module}).model  # doctest: +SKIP
    """
    check_known(f"curvature {curvature!r}", curvature, CANDIDATES)
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha {alpha}: must be from 0 to 1")
    if not 0 <= ridge < float("inf"):
        raise InputError(f"ridge {ridge}: must be 0 or a positive number")
    if not check and curvature == "auto":
        raise InputError("check=False does not go with curvature='auto', which chooses by held-out rows")
    if not data:
        raise InputError("data: give rows for at least one task")
    memory = None if cache_memory is None else _bytes(cache_memory)
    request = _Request(curvature, Settings(alpha, ridge), max_kronecker_dim, memory, check, seed)
    if isinstance(merged, nn.Module):
        if out is not None or loading:
            raise InputError("out and options for loading are for a model folder, not for a module")
        return _calibrate_module(merged, data, dict(teachers or {}), request, progress)
    if out is None:
        raise InputError("out is missing: name the folder to write")
    sources, given = data_by_path("data", data), data_by_path("teachers", teachers or {})
    options = complete(loading, calibrate)
    if options["dtype"] not in ("auto", "float32"):
        raise InputError(f"dtype {options['dtype']}: calibration computes in float32")
    return _calibrate_folder(str(merged), sources, given, Path(out), request, options, progress, force, command)


def _bytes(size: int | str) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise InputError(f"cache_memory {size}: {error}") from None


def data_by_path(what: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Task → path or name; raise for anything else, such as a module."""
    for name, value in given.items():
        if not isinstance(value, str | Path):
            kind = type(value).__name__
            raise InputError(f"{what}[{name!r}]: must be a path or a name for a model folder, not {kind}")
    return {name: str(value) for name, value in given.items()}


@dataclass(frozen=True)
class _Request:
    curvature: str
    settings: Settings
    max_kronecker_dim: int
    cache_memory: int | None
    check: bool
    seed: int

    def cache(self, device: torch.device, folder: Path | None = None) -> HiddenCache:
        free = free_memory(device) or 4_000_000_000
        return HiddenCache(int(CACHE_SHARE * free) if self.cache_memory is None else self.cache_memory, folder)


# --- a module in memory


def _calibrate_module(
    merged: nn.Module,
    data: Mapping[str, Any],
    teachers: dict[str, Any],
    request: _Request,
    progress: bool | Progress,
) -> CalibrationResult:
    begun = time.perf_counter()
    check_modules(merged, data, teachers)
    device = next(merged.parameters()).device
    batches = {task: on_device(task, given, device) for task, given in data.items()}
    copies = {task: copy.deepcopy(model).eval().requires_grad_(False) for task, model in teachers.items()}
    model = copy.deepcopy(merged).eval().requires_grad_(False)
    shared = same_heads(model, copies)
    prefix = encoder_prefix(model)

    def keep(layer: str) -> bool:
        return not shared and not layer.startswith(prefix)

    def with_head(task: str) -> nn.Module:
        return model if shared else _with_head(model, copies[task], prefix)

    structure = examine(model, _two_rows(batches))
    rows = {task: hold_out(given) for task, given in batches.items()}
    cache = request.cache(device)
    try:
        with shown(progress, "blocks") as bar:
            done = calibrate_model(
                BlockModel(model, structure),
                {task: BlockModel(one, structure) for task, one in copies.items()},
                rows,
                cache,
                request.settings,
                curvature=request.curvature,
                find_factors=_factor_finder(model, structure, keep, with_head, request, device, len(rows)),
                keep=keep,
                shared_head=shared,
                check=request.check,
                progress=bar,
            )
    finally:
        cache.close()
    result = done.model.module.train(merged.training)
    for own, original in zip(result.parameters(), merged.parameters(), strict=True):
        own.requires_grad_(original.requires_grad)
    return _result(done, structure, rows, None, result, time.perf_counter() - begun, [])


def on_device(task: str, given: Any, device: torch.device) -> list[Batch]:
    batches = [moved(batch, device) for batch in given]
    if not batches or not sum(map(count_rows, batches)):
        raise InputError(f"data[{task!r}]: there are no rows")
    return batches


def _two_rows(batches: Mapping[str, Sequence[Batch]]) -> Batch:
    first = next(iter(batches.values()))[0]
    return take_rows(first, range(min(2, count_rows(first))))


def same_heads(merged: nn.Module, teachers: Mapping[str, nn.Module]) -> bool:
    """Whether all modules have the same head: the same parameters outside the encoder, and the same classes."""
    prefix = encoder_prefix(merged)
    if not prefix:
        return True

    def head(module: nn.Module) -> Any:
        shapes = {name: p.shape for name, p in module.named_parameters() if not name.startswith(prefix)}
        return shapes, getattr(getattr(module, "config", None), "id2label", None)

    return all(head(teacher) == head(merged) for teacher in teachers.values())


def check_modules(merged: nn.Module, data: Mapping[str, Any], teachers: Mapping[str, Any]) -> None:
    """Raise if a task has no teacher, or a teacher other parameters than the merge."""
    if set(teachers) != set(data):
        raise InputError(f"teachers: give a module for every task: {', '.join(data)}")
    for task, teacher in teachers.items():
        if not isinstance(teacher, nn.Module):
            raise InputError(f"teachers[{task!r}]: must be a module, as the merge is one")
    prefix = "" if same_heads(merged, teachers) else encoder_prefix(merged)
    ours = {name: p.shape for name, p in merged.named_parameters() if name.startswith(prefix)}
    for task, teacher in teachers.items():
        theirs = {name: p.shape for name, p in teacher.named_parameters() if name.startswith(prefix)}
        if wrong := next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None):
            raise InputError(f"teachers[{task!r}]: {wrong} is missing or has another shape than in the merge")


def _with_head(merged: nn.Module, teacher: nn.Module, prefix: str) -> nn.Module:
    """A copy of a fine-tuned model with the merge's encoder."""
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            if name.startswith(prefix):
                model.get_parameter(name).copy_(parameter)
    return model


def _factor_finder(
    merged: nn.Module,
    structure: Structure,
    keep: Callable[[str], bool],
    with_head: Callable[[str], nn.Module],
    request: _Request,
    device: torch.device,
    tasks: int,
    notes: list[str] | None = None,
) -> Callable[[str, Sequence[Batch], int], dict[str, Tensor]] | None:
    """What computes G for a task; None if G is not wanted, or does not fit into memory."""
    notes = [] if notes is None else notes
    if request.curvature == "none":
        return None
    head, _ = representation_modules(merged)
    layers: list[str] = []
    wide: list[str] = []
    for name in (name for groups in structure.groups.values() for group in groups for name in group):
        layer = merged.get_submodule(name)
        if keep(name) or layer is head:
            continue
        size = max(_sizes(layer))
        (wide if size > request.max_kronecker_dim else layers).append(name)
    if wide:
        notes.append(
            f"{count(len(wide))} layers wider than {request.max_kronecker_dim} have no output factor: {wide[0]}, …"
        )
    needed = 2 * tasks * sum(4 * _sizes(merged.get_submodule(name))[0] ** 2 for name in layers)
    needed += 2 * sum(4 * p.numel() for p in merged.parameters())
    free = free_memory(device)
    if not layers or (free is not None and needed > FACTOR_SHARE * free):
        notes.append("the output factors do not fit into memory: curvature none is used")
        return None

    def find(task: str, batches: Sequence[Batch], first_row: int) -> dict[str, Tensor]:
        return output_factors(with_head(task), batches, layers, request.seed, first_row)

    return find


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a layer, per group of a convolution."""
    assert is_linear(layer)
    weight: Any = layer.weight
    shape = weight.T.shape if type(layer).__name__ == "Conv1D" else weight.shape
    groups = getattr(layer, "groups", 1)
    return shape[0] // groups, weight.numel() // shape[0]


def _result(
    done: Calibration,
    structure: Structure,
    rows: Mapping[str, TaskRows],
    out: Path | None,
    model: nn.Module | None,
    seconds: float,
    notes: Sequence[str],
) -> CalibrationResult:
    counted = {task: sum(map(count_rows, [*one.fit, *one.held_out])) for task, one in rows.items()}
    found = [*notes, *structure.notes, *done.notes, *_notes_on_layers(done, structure)]
    layers = len(done.report.layers)
    return CalibrationResult(out, model, done.chosen, layers, done.distances, counted, seconds, found)


def _notes_on_layers(done: Calibration, structure: Structure) -> list[str]:
    notes = []
    kept = {
        "run more than once or share their weight": structure.reused,
        "did not run": structure.unused,
        "run between two blocks": structure.between,
    }
    for why, layers in kept.items():
        if layers:
            notes.append(f"{count(len(layers))} layers {why} and keep the merge's weights: {layers[0]}, …")
    if done.report.ridges:
        name, ridge = max(done.report.ridges.items(), key=lambda item: item[1])
        notes.append(f"{len(done.report.ridges)} layers needed a larger ridge, at most {ridge:.1g} in {name}")
    if done.report.residuals:
        name, residual = max(done.report.residuals.items(), key=lambda item: item[1])
        number = len(done.report.residuals)
        notes.append(
            f"conjugate gradients did not converge in {number} layers; worst residual {residual:.1g} in {name}"
        )
    return notes


# --- folders


def _calibrate_folder(
    merged: str,
    data: Mapping[str, str],
    given: Mapping[str, str],
    out: Path,
    request: _Request,
    options: LoadOptions,
    progress: bool | Progress,
    force: bool,
    command: str,
) -> CalibrationResult:
    begun = time.perf_counter()
    device = device_of(options["device"])
    teachers = find_teachers(merged, list(data), given)
    models = [path for one in (merged, *teachers.values()) for path in model_paths(one)]
    sources = [path for source in data.values() for path in data_paths(source)]
    with AtomicDir(out, "calibration", force=force, reads=[*models, *sources]) as staging:
        before = state_of(models) + state_of(sources, deep=True)
        with opened_inputs(merged, data, given, **reading_options(options)) as inputs:
            done, structure, rows, notes = _calibrate_inputs(inputs, request, device, staging.folder, progress)
            if changed_path := changed(before, state_of(models) + state_of(sources, deep=True)):
                raise MachineError(
                    f"{changed_path}: changed during the calibration. Nothing was written. Run it again."
                )
            seconds = time.perf_counter() - begun
            result = _result(done, structure, rows, out, None, seconds, [*staging.notes, *notes])
            sizes = write_weights(staging, inputs.merged.checkpoint, _changed_tensors(inputs.merged, done))
            done.model.close()
            _write_texts(staging, inputs, result, request, teachers, data, sizes, command)
    return result


def reading_options(options: LoadOptions) -> dict[str, Any]:
    names = ("task", "columns", "limit", "batch_size", "max_length", "model_args")
    return {name: value for name, value in options.items() if name in names}


def _calibrate_inputs(
    inputs: MergeInputs, request: _Request, device: torch.device, folder: Path, progress: bool | Progress
) -> tuple[Calibration, Structure, dict[str, TaskRows], list[str]]:
    notes = list(inputs.notes)
    batches = {task: [moved(b, device) for b in one.batches] for task, one in inputs.rows.items()}
    cache, store = request.cache(device, folder), HiddenCache(0, folder)
    source = inputs.merged.source(device)
    structure = examine(inputs.merged.module, _two_rows(batches), source)
    if structure.lists:
        merged = BlockModel(inputs.merged.module, structure, source, store)
        memory = WeightMemory(device)  # one fine-tuned model at a time has weights in memory
        teachers = {
            task: BlockModel(one.module, structure, one.source(device, memory)) for task, one in inputs.teachers.items()
        }
    else:
        notes.append("the model runs whole, and all models are in memory")
        load_whole(inputs.merged, device)
        structure = examine(inputs.merged.module, _two_rows(batches))
        merged = BlockModel(inputs.merged.module, structure)
        teachers = {task: BlockModel(load_whole(one, device), structure) for task, one in inputs.teachers.items()}
    layers = [name for groups in structure.groups.values() for group in groups for name in group]
    if all(map(inputs.keeps, layers)):
        raise InputError(f"{inputs.merged.reference}: has no linear layer that calibration can solve")
    rows = {task: hold_out(given) for task, given in batches.items()}
    finder = _disk_factor_finder(inputs, structure, request, device, notes)
    try:
        with shown(progress, "blocks") as bar:
            done = calibrate_model(
                merged,
                teachers,
                rows,
                cache,
                request.settings,
                curvature=request.curvature,
                find_factors=finder,
                keep=inputs.keeps,
                shared_head=inputs.shared_head,
                check=request.check,
                progress=bar,
            )
    finally:
        cache.close()
    if cache.spilled:
        notes.append(f"{cache.spilled / 1e9:.1f} GB of hidden states went to a temporary file (cache_memory)")
    return done, structure, rows, notes


def _disk_factor_finder(
    inputs: MergeInputs, structure: Structure, request: _Request, device: torch.device, notes: list[str]
) -> Callable[[str, Sequence[Batch], int], dict[str, Tensor]] | None:
    """The same for models on disk: the merge is read whole while G is computed."""
    task, prefix = inputs.merged.info.task, encoder_prefix(inputs.merged.module)
    if task == "embedding":
        if request.curvature != "none":
            notes.append("an embedding model has no answers to sample: curvature none is used")
        return None

    def with_head(name: str) -> nn.Module:
        merged = load_model_whole(inputs.merged.reference, task, device)
        if inputs.shared_head:
            return merged
        return _with_head(merged, load_model_whole(inputs.teachers[name].reference, task, device), prefix)

    return _factor_finder(
        inputs.merged.module, structure, inputs.keeps, with_head, request, device, len(inputs.teachers), notes
    )


def _changed_tensors(merged: ModelFiles, done: Calibration) -> dict[str, Any]:
    """Tensor of the checkpoint → calibrated value."""
    if done.model.source is not None:
        return {merged.names[name]: value for name, value in done.model.changed.items()}
    names = [f"{layer}.{part}" for layer in done.report.layers for part in ("weight", "bias")]
    values = dict(done.model.module.named_parameters())
    return {merged.names[name]: values[name] for name in names if name in values}


def _write_texts(
    staging: AtomicDir,
    inputs: MergeInputs,
    result: CalibrationResult,
    request: _Request,
    teachers: Mapping[str, str],
    data: Mapping[str, str],
    sizes: Mapping[str, int],
    command: str,
) -> None:
    """Write the card, the record and the report."""
    names = {task: name_of(source) for task, source in data.items()}
    rows = "\n".join(f"| {task} | {result.rows[task]} |" for task in names)
    what = (
        "The merge was calibrated" if result.improved else "Calibration did not improve the merge, which is unchanged"
    )
    text = f"{what} with gradmerge on unlabeled rows, layer by layer.\n\n| task | rows |\n|---|---:|\n{rows}\n"
    write_card(staging, inputs.merged, "calibration", text)
    models = {**recorded_models(inputs.merged.info.folder), **teachers}
    facts = {
        "chosen": result.chosen,
        "curvature": request.curvature,
        "alpha": request.settings.alpha,
        "ridge": request.settings.ridge,
        "layers": result.layers,
        "rows": result.rows,
        "data": names,
        "distances": result.to_dict()["distances"],
    }
    relative = {name: model_reference(reference, Path(), staging.out) for name, reference in models.items()}
    write_record(
        staging, inputs.merged, "calibration", facts, relative, sizes, result.seconds, list(map(str, result.notes))
    )
    provenance = {"merged model": inputs.merged.reference, **{f"rows of {task}": name for task, name in names.items()}}
    commands = [command] if command else []
    title = f"Calibration of {name_of(inputs.merged.reference)}"
    page = calibration_page(
        title, result.chosen, result.layers, result.distances, list(map(str, result.notes)), provenance, commands
    )
    write_report(staging.folder, page)


@checked()
def dry_run_calibrate(
    merged: str | Path,
    data: Mapping[str, Any],
    *,
    teachers: Mapping[str, str | Path] | None = None,
    out: str | Path | None = None,
    cache_memory: int | str | None = None,
    check: bool = True,
    **loading: Unpack[LoadOptions],
) -> JobSize:
    """Return how much a calibration with curvature none reads, writes and holds in memory."""
    options = complete(loading, dry_run_calibrate)
    device = device_of(options["device"])
    free = free_memory(device)
    sources = {name: str(source) for name, source in data.items()}
    given = {name: str(model) for name, model in (teachers or {}).items()}
    with opened_inputs(str(merged), sources, given, **reading_options(options)) as inputs:
        module, checkpoint = inputs.merged.module, inputs.merged.checkpoint
        sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
        blocks = [name for names in block_lists(module) for name in names]
        largest = max(
            [sum(n for k, n in sizes.items() if k.startswith(f"{b}.")) for b in blocks] or [sum(sizes.values())]
        )
        outside = sum(n for k, n in sizes.items() if not any(k.startswith(f"{b}.") for b in blocks))
        widest = max(_sizes(layer)[1] + 1 for layer in module.modules() if is_linear(layer))
        width = int(getattr(module.config.get_text_config(), "hidden_size", widest))  # type: ignore[operator, union-attr]
        positions = sum(_positions(batch) for one in inputs.rows.values() for batch in one.batches)
        # In two models the block's inputs, and in the fine-tuned model those of all its layers.
        captured = max(
            sum(
                _sizes(layer)[1]
                for name, layer in module.named_modules()
                if name.startswith(block) and is_linear(layer)
            )
            for block in ([f"{name}." for name in blocks] or [""])
        )
        hidden = 4 * (2 * width + captured) * positions
        limit = (int(CACHE_SHARE * free) if free else hidden) if cache_memory is None else _bytes(cache_memory)
        passes = 2 if check else 1
        parts = {
            "process": PROCESS,
            "two blocks": 2 * max(largest, outside),
            "sums of a group": (4 + 8) * 3 * widest**2,
            "hidden states": min(hidden, limit),
        }
        return JobSize(
            bytes_read=passes * (checkpoint.nbytes + sum(one.checkpoint.nbytes for one in inputs.teachers.values())),
            bytes_written=checkpoint.nbytes,
            memory=sum(parts.values()),
            free_memory=free,
            free_disk=free_disk(None if out is None else Path(out)),
            memory_parts=parts,
        )


def _positions(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch, or patches of its images, roughly."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return sum(value.shape[0] * value.shape[-1] * value.shape[-2] // 64 for value in batch.values() if value.dim() == 4)
