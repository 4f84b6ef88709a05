"""Calibrate a merge on unlabeled rows: in memory, or disk to disk.

Heavy modules are imported in the functions: the command line reads the signature of :func:`calibrate` without PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from ..arguments import checked
from ..errors import InputError
from ..progress import Progress, shown
from ..report.page import Page
from ..text import count, parse_size, some
from .refine import BATCH_TOKENS, RefinementResult, paths_by_name, refine_folder, refine_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..refinement.blocks import Batch, BlockModel, Stage
    from ..refinement.calibrate import Calibration, Settings
    from ..refinement.distances import Distances
    from ..refinement.inputs import MergeInputs
    from ..refinement.layers import Layer
    from ..refinement.rows import TaskRows
    from ..tasks import LoadOptions
    from .dry_run import JobSize

#: Rows of a batch.
BATCH_SIZE = 32
#: Share of the free memory that hidden states may take, that all G matrices together may take, and that the values
#: inside a block may take in one pass on a GPU.
CACHE_SHARE, FACTOR_SHARE, PASS_SHARE = 0.5, 0.5, 0.125


@dataclass(repr=False, kw_only=True)
class CalibrationResult(RefinementResult):
    """What a calibration did."""

    chosen: str
    """The candidate that was closest to the fine-tuned models; ``merge`` if calibration did not help."""
    layers: int
    """How many linear layers were solved."""
    distances: dict[str, Distances] = field(default_factory=dict)
    """Candidate → distances on held-out rows; ``merge`` is the model before. Empty if they were not measured."""

    action: ClassVar[str] = "calibration"

    @property
    def verdict(self) -> list[str]:
        """What the report says first."""
        from ..report.refinement import calibration_verdict

        return calibration_verdict(self.chosen, self.distances)

    @property
    def improved(self) -> bool:
        """Whether the result differs from the merge."""
        from ..refinement.calibrate import MERGE

        return self.chosen != MERGE

    def facts(self) -> dict[str, Any]:
        """Return what was done, for the record and ``--json``."""
        return {
            "chosen": self.chosen,
            "improved": self.improved,
            "layers": self.layers,
            "distances": {
                name: asdict(distances) | {"total": distances.total} for name, distances in self.distances.items()
            },
            "rows": self.rows,
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows: the distances of every task before and after."""
        from ..refinement.calibrate import MERGE

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

    def card_text(self) -> str:
        """What the model card says first."""
        what = "The merge was calibrated" if self.improved else "Calibration did not improve the merge"
        return f"{what} with gradmerge on unlabeled rows, layer by layer."

    def page(self, merged: str) -> Page:
        """Build the report."""
        from ..report.refinement import calibration_page

        return calibration_page(f"Calibration of {merged}", self.chosen, self.layers, self.distances)

    def _line(self) -> list[str]:
        where = [] if self.output is None else [str(self.output)]
        return [*where, self.chosen, f"{self.layers} layers", f"{self.seconds:.1f} s"]


@checked()
def calibrate(
    merged: nn.Module | str | Path,
    data: Mapping[str, Any],
    *,
    teachers: Mapping[str, nn.Module | str | Path] | None = None,
    out: str | Path | None = None,
    curvature: Literal["auto", "none", "merge"] = "auto",
    alpha: float = 0.25,
    ridge: float = 0.3,
    max_kronecker_dim: int = 16384,
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
        curvature: Output factors, which weight errors by the curvature of a layer's output: ``none``; ``merge``; or
            ``auto``, which compares both on held-out rows.
        alpha: Share of the fine-tuned model's activations in the targets, from 0 to 1.
        ridge: How strongly the weights are held to the merge.
        max_kronecker_dim: Layers with more inputs or outputs have no output factor.
        cache_memory: Bytes of hidden states in memory, or a size such as "8GB"; more go to a temporary file. Default:
            half of the free memory.
        check: Hold out rows and compare with the merge. Without it, all rows are used once.
        seed: Seed of the labels that are sampled for output factors.
        progress: Show a bar; or an object that receives the progress.
        force: Replace the output if gradmerge wrote it, or if it is empty.
        command: What the report says to repeat the run with.
        loading: For folders: how models and rows are loaded, as :class:`gradmerge.LoadOptions` says. ``limit`` is the
            number of rows per task, 256 by default. ``batch_size`` is 32 by default, or fewer rows of long texts.

    Returns:
        The chosen candidate and the distances to each fine-tuned model, before and after.

    >>> calibrate("merged/", {"yelp": "yelp.jsonl", "imdb": "imdb.jsonl"}, out="calibrated/")  # doctest: +SKIP
    >>> calibrate(module, {"yelp": batches}, teachers={"yelp": yelp_module}).model  # doctest: +SKIP
    """
    from torch import nn

    from ..refinement.calibrate import Settings
    from ..tasks import complete

    if not 0 <= alpha <= 1:
        raise InputError(f"alpha {alpha}: must be from 0 to 1")
    if not 0 <= ridge < float("inf"):
        raise InputError(f"ridge {ridge}: must be 0 or a positive number")
    if max_kronecker_dim < 1:
        raise InputError(f"max_kronecker_dim {max_kronecker_dim}: must be at least 1")
    if not check and curvature == "auto":
        raise InputError("check=False does not go with curvature='auto', which chooses by held-out rows")
    if not data:
        raise InputError("data: give rows for at least one task")
    memory = None if cache_memory is None else _bytes(cache_memory)
    run = partial(
        _calibrate,
        curvature=curvature,
        settings=Settings(alpha, ridge),
        max_kronecker_dim=max_kronecker_dim,
        cache_memory=memory,
        check=check,
        seed=seed,
        progress=progress,
    )
    if isinstance(merged, nn.Module):
        if out is not None or loading:
            raise InputError("out and options for loading are for a model folder, not for a module")
        calibrate_copy = partial(_calibrate_module, run)
        return refine_module(merged, data, dict(teachers or {}), calibrate_copy, check=check)
    if out is None:
        raise InputError("out is missing: name the folder to write")
    return refine_folder(
        str(merged),
        paths_by_name("data", data),
        paths_by_name("teachers", teachers or {}),
        Path(out),
        partial(_calibrate_files, run),
        complete({"batch_size": BATCH_SIZE, **loading}, calibrate),
        action="calibration",
        advice="a smaller batch_size, limit or cache_memory, or curvature none",
        settings={"curvature": curvature, "alpha": alpha, "ridge": ridge},
        check=check,
        tokens=None if "batch_size" in loading else BATCH_TOKENS,
        force=force,
        command=command,
    )


if TYPE_CHECKING:
    Run = Callable[..., tuple[CalibrationResult, Calibration]]
    """`_calibrate` with the options of `calibrate`."""


def _bytes(size: int | str) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise InputError(f"cache_memory {size}: {error}") from None


def _calibrate_module(
    run: Run, model: nn.Module, copies: dict[str, nn.Module], rows: dict[str, TaskRows], shared: bool
) -> CalibrationResult:
    from ..refinement.blocks import BlockModel
    from ..refinement.structure import find_structure
    from ..tasks.models import encoder_prefix, with_encoder_of

    model.requires_grad_(False)
    structure, prefix = find_structure(model, _two_rows(rows)), encoder_prefix(model)

    def with_head(task: str) -> nn.Module:
        return model if shared else with_encoder_of(model, copy.deepcopy(copies[task]), "the merge", task)

    result, calibration = run(
        BlockModel(model, structure),
        {task: BlockModel(teacher, structure) for task, teacher in copies.items()},
        rows,
        device=next(model.parameters()).device,
        keep=lambda layer: not shared and not layer.path.startswith(prefix),
        with_head=with_head,
        shared_head=shared,
    )
    result.model = calibration.model.module
    return result


def _calibrate_files(run: Run, inputs: MergeInputs, folder: Path) -> tuple[CalibrationResult, dict[str, Any]]:
    """Calibrate block by block, with weights that stay in their files. Return tensor → new value too."""
    from ..refinement.blocks import BlockModel
    from ..refinement.hidden_cache import HiddenCache
    from ..refinement.streaming import WeightMemory, load_model_whole, load_whole
    from ..refinement.structure import find_structure
    from ..tasks.models import with_encoder_of

    files, device, notes = inputs.merged, inputs.device, []
    batch, source = _two_rows(inputs.rows), files.source(device)
    structure = find_structure(files.module, batch, source)
    if structure.lists:
        store = HiddenCache(0, folder)
        inputs.on_exit.callback(store.close)
        merged = BlockModel(files.module, structure, source, store)
        memory = WeightMemory(device)  # one fine-tuned model at a time has weights in memory
        teachers = {
            task: BlockModel(teacher.module, structure, teacher.source(device, memory))
            for task, teacher in inputs.teachers.items()
        }
    else:
        notes.append("the model runs whole, and all models are in memory")
        structure = find_structure(load_whole(files, device), batch)
        merged = BlockModel(files.module, structure)
        teachers = {
            task: BlockModel(load_whole(teacher, device), structure) for task, teacher in inputs.teachers.items()
        }
    task = files.info.task

    def with_head(name: str) -> nn.Module:
        whole, teacher = load_model_whole(files.reference, task, device), inputs.teachers[name].reference
        if inputs.shared_head:
            return whole
        return with_encoder_of(whole, load_model_whole(teacher, task, device), files.reference, teacher)

    result, calibration = run(
        merged,
        teachers,
        inputs.rows,
        device=device,
        keep=inputs.keeps,
        with_head=None if task == "embedding" else with_head,
        shared_head=inputs.shared_head,
        folder=folder,
    )
    result.notes = [*notes, *result.notes]
    if calibration.model.source is not None:
        return result, files.stored_values(calibration.model.changed)
    names = {name for layer in calibration.report.layers for name in calibration.model.layers[layer].parameters}
    return result, files.stored_values({name: calibration.model.module.get_parameter(name) for name in names})


def _calibrate(
    merged: BlockModel,
    teachers: Mapping[str, BlockModel],
    rows: Mapping[str, TaskRows],
    *,
    device: torch.device,
    keep: Callable[[Layer], bool],
    with_head: Callable[[str], nn.Module] | None,
    shared_head: bool,
    folder: Path | None = None,
    curvature: str,
    settings: Settings,
    max_kronecker_dim: int,
    cache_memory: int | None,
    check: bool,
    seed: int,
    progress: bool | Progress,
) -> tuple[CalibrationResult, Calibration]:
    """Calibrate a merge.

    ``with_head`` returns the whole merge with the head of a task; None if the model has no answers.
    """
    from ..refinement.blocks import float32_precision
    from ..refinement.calibrate import calibrate_model
    from ..refinement.hidden_cache import HiddenCache
    from ..refinement.output_factors import layers_with_factors, output_factors
    from .dry_run import free_memory

    structure, notes, find_factors = merged.structure, list(merged.structure.notes), None
    if all(keep(merged.layers[name]) for groups in structure.groups.values() for group in groups for name in group):
        raise InputError("the merge has no linear layer that calibration can solve")
    free = free_memory(device)
    if curvature != "none" and with_head is None:
        notes.append("an embedding model has no answers to sample: curvature none is used")
    elif curvature != "none":
        limit = None if free is None else int(FACTOR_SHARE * free)
        layers, more = layers_with_factors(merged, keep, max_kronecker_dim, len(rows), limit)
        notes += more
        if layers:

            def find_factors(task: str, batches: Any, first_row: int) -> dict[str, Tensor]:
                assert with_head is not None
                return output_factors(with_head(task), batches, layers, seed, first_row)

    memory = int(CACHE_SHARE * (free or 8_000_000_000)) if cache_memory is None else cache_memory
    cache = HiddenCache(memory, folder)
    try:
        with shown(progress, "blocks") as bar, float32_precision(device, "high"):
            calibration = calibrate_model(
                merged,
                teachers,
                rows,
                cache,
                settings,
                curvature=curvature,
                find_factors=find_factors,
                keep=keep,
                shared_head=shared_head,
                check=check,
                max_positions=_max_positions(merged, device, free),
                progress=bar,
            )
    finally:
        cache.close()
    if cache.spilled:
        notes.append(f"{cache.spilled / 1e9:.1f} GB of hidden states went to a temporary file (cache_memory)")
    notes += [*calibration.notes, *_notes_on_layers(calibration)]
    number = len(calibration.report.layers)
    return CalibrationResult(
        chosen=calibration.chosen, layers=number, distances=calibration.distances, notes=notes
    ), calibration


def _two_rows(rows: Mapping[str, TaskRows]) -> Batch:
    from ..curvature.batches import batch_rows, examples_in

    first = next(iter(rows.values())).fit[0]
    two: Batch = batch_rows(first, slice(0, min(2, examples_in(first))))
    return two


def _notes_on_layers(calibration: Calibration) -> list[str]:
    structure, report, notes = calibration.model.structure, calibration.report, []
    for why, layers in structure.skipped.items():
        if layers:
            notes.append(f"layers that {why} keep the merge's weights: {some(layers)}")
    if report.idle_experts:
        number = sum(map(len, report.idle_experts.values()))
        notes.append(f"{count(number)} experts got no token of the rows and keep the merge's weights")
    if report.ridges:
        name, ridge = max(report.ridges.items(), key=lambda item: item[1])
        notes.append(f"{len(report.ridges)} layers needed a larger ridge, at most {ridge:.1g} in {name}")
    if report.residuals:
        name, residual = max(report.residuals.items(), key=lambda item: item[1])
        number = len(report.residuals)
        notes.append(
            f"conjugate gradients did not converge in {number} layers; worst residual {residual:.1g} in {name}"
        )
    return notes


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
    from ..refinement.blocks import weights_by_block
    from ..refinement.inputs import find_teachers, opened_inputs
    from ..refinement.layers import find_layers
    from ..refinement.rows import positions_in
    from ..refinement.structure import block_lists
    from ..tasks import complete
    from ..tasks.models import device_of
    from .dry_run import PROCESS, JobSize, free_disk, free_memory

    options = complete({"batch_size": BATCH_SIZE, **loading}, dry_run_calibrate)
    free = free_memory(device_of(options["device"]))
    sources = paths_by_name("data", data)
    references = find_teachers(str(merged), list(sources), paths_by_name("teachers", teachers or {}))
    with opened_inputs(str(merged), sources, references, options, check=check) as inputs:
        module, checkpoint = inputs.merged.module, inputs.merged.checkpoint
        sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
        blocks = [name for names in block_lists(module) for name in names]
        weights = [sum(sizes.get(n, 0) for n in names) for names in weights_by_block(module, blocks).values()]
        shapes = [(layer.path, *layer.weights().shape) for layer in find_layers(module).values()]
        layers = {path: inputs + 1 for path, _, _, inputs in shapes}
        widest, products = max(layers.values()), max(groups * (inputs + 1) ** 2 for _, groups, _, inputs in shapes)
        width = int(getattr(module.config.get_text_config(), "hidden_size", widest))  # type: ignore[arg-type, operator, union-attr]
        positions = sum(
            positions_in(batch) for task_rows in inputs.rows.values() for batch in (*task_rows.fit, *task_rows.held_out)
        )
        # In two models the block's inputs, and in the fine-tuned model those of all its layers.
        starts = [f"{name}." for name in blocks] or [""]
        captured = max(sum(n for path, n in layers.items() if path.startswith(start)) for start in starts)
        hidden = 4 * (2 * width + captured) * positions
        limit = (int(CACHE_SHARE * free) if free else hidden) if cache_memory is None else _bytes(cache_memory)
        passes = 2 if check else 1
        parts = {
            "process": PROCESS,
            "two blocks": 2 * max(weights),
            "sums of a group": (4 + 8) * 3 * products,
            "hidden states": min(hidden, limit),
        }
        return JobSize(
            bytes_read=passes
            * (checkpoint.nbytes + sum(teacher.checkpoint.nbytes for teacher in inputs.teachers.values())),
            bytes_written=checkpoint.nbytes,
            memory=sum(parts.values()),
            free_memory=free,
            free_disk=free_disk(None if out is None else Path(out)),
            memory_parts=parts,
        )


def _max_positions(merged: BlockModel, device: torch.device, free: int | None) -> int:
    """How many tokens or patches fit into a pass through a block of a GPU; 0 on a CPU, where small passes are as fast.

    A block holds about eight values for every output of its widest layer.
    """
    if device.type != "cuda" or not free:
        return 0
    inside = [name for stage in merged.structure.stages if stage.is_block for name in _layers_in(merged, stage)]
    widest = max((max(merged.layers[name].weights().shape[1:]) for name in inside), default=0)
    return int(PASS_SHARE * free / (8 * 4 * widest)) if widest else 0


def _layers_in(merged: BlockModel, stage: Stage) -> list[str]:
    return [name for group in merged.structure.groups.get(stage.name, []) for name in group]
