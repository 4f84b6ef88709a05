"""Calibrate a merge on unlabeled rows: in memory, or disk to disk.

Heavy modules are imported in the functions: the command line reads the signature of :func:`calibrate` without PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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

    from ..refinement.blocks import BlockModel, Structure
    from ..refinement.calibrate import Calibration, Settings
    from ..refinement.distances import Distances
    from ..refinement.inputs import MergeInputs
    from ..refinement.model_io import AnyModel
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
        """Return the first section of the model card."""
        what = "This merge was calibrated" if self.improved else "Calibration did not improve this merge"
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
    run = partial(
        _calibrate,
        curvature=curvature,
        settings=Settings(alpha, ridge),
        max_kronecker_dim=max_kronecker_dim,
        cache_memory=_bytes(cache_memory),
        check=check,
        seed=seed,
        progress=progress,
    )
    if isinstance(merged, nn.Module):
        if out is not None or loading:
            raise InputError("out and options for loading are for a model folder, not for a module")
        return refine_module(merged, data, dict(teachers or {}), run, check=check)
    if out is None:
        raise InputError("out is missing: name the folder to write")
    return refine_folder(
        str(merged),
        paths_by_name("data", data),
        paths_by_name("teachers", teachers or {}),
        Path(out),
        run,
        complete({"batch_size": BATCH_SIZE, **loading}, calibrate),
        action="calibration",
        advice="a smaller batch_size, limit or cache_memory, or curvature none",
        settings={"curvature": curvature, "alpha": alpha, "ridge": ridge},
        check=check,
        tokens=None if "batch_size" in loading else BATCH_TOKENS,
        force=force,
        command=command,
    )


def _bytes(size: int | str | None) -> int | None:
    try:
        return None if size is None else parse_size(size)
    except ValueError as error:
        raise InputError(f"cache_memory {size}: {error}") from None


def _calibrate(
    inputs: MergeInputs,
    folder: Path | None,
    *,
    curvature: str,
    settings: Settings,
    max_kronecker_dim: int,
    cache_memory: int | None,
    check: bool,
    seed: int,
    progress: bool | Progress,
) -> tuple[CalibrationResult, AnyModel, Mapping[str, Any]]:
    """Calibrate a merge: of a folder block by block, with weights that stay in their files.

    Args:
        inputs: The merge with its teachers and rows.
        folder: For temporary files; None for a module in memory.
        curvature: As of :func:`calibrate`, as are the others.

    Returns:
        What was done, the merge, and parameter → new value.
    """
    from ..refinement.blocks import HiddenCache, float32_precision
    from ..refinement.calibrate import CalibrationInputs, calibrate_model
    from ..refinement.output_factors import layers_with_factors, output_factors
    from .dry_run import free_memory

    device, free = inputs.device, free_memory(inputs.device)
    merged, teachers = _block_models(inputs)
    structure, notes, find_factors = merged.structure, list(merged.structure.notes), None
    if all(inputs.keeps(merged.layers[n]) for groups in structure.groups.values() for group in groups for n in group):
        raise InputError("the merge has no linear layer that calibration can solve")
    if curvature != "none" and inputs.merged.task == "embedding":
        notes.append("an embedding model has no answers to sample: curvature none is used")
    elif curvature != "none":
        limit = None if free is None else int(FACTOR_SHARE * free)
        layers, more = layers_with_factors(merged, inputs.keeps, max_kronecker_dim, len(inputs.rows), limit)
        notes += more
        if layers:

            def find_factors(task: str, batches: Any, first_row: int) -> dict[str, Tensor]:
                return output_factors(inputs.with_head(task), batches, layers, seed, first_row)

    store = HiddenCache(2**62) if folder is None else HiddenCache(0, folder)
    inputs.on_exit.callback(store.close)
    limit = int(CACHE_SHARE * (free or 8_000_000_000)) if cache_memory is None else cache_memory
    with contextlib.closing(HiddenCache(limit, folder)) as cache:
        with shown(progress, "blocks") as bar, float32_precision(device, "high"):
            done = calibrate_model(
                CalibrationInputs(
                    merged, teachers, inputs.rows, cache, store, settings, inputs.keeps, inputs.shared_head
                ),
                curvature,
                find_factors,
                check=check,
                max_positions=_max_positions(merged, device, free),
                progress=bar,
            )
    if cache.spilled:
        notes.append(f"{cache.spilled / 1e9:.1f} GB of hidden states went to a temporary file (cache_memory)")
    result = CalibrationResult(
        chosen=done.chosen,
        layers=len(done.report.layers),
        distances=done.distances,
        notes=[*notes, *_notes_on_layers(done, structure)],
    )
    return result, inputs.merged, done.weights


def _block_models(inputs: MergeInputs) -> tuple[BlockModel, dict[str, BlockModel]]:
    """The merge, and task → fine-tuned model, as sequences of blocks."""
    from ..curvature.batches import batch_rows, examples_in
    from ..refinement.blocks import BlockModel
    from ..refinement.model_io import WeightMemory
    from ..refinement.structure import find_structure

    model, device = inputs.merged, inputs.device
    first = next(iter(inputs.rows.values())).fit[0]
    batch, source = batch_rows(first, slice(0, min(2, examples_in(first)))), model.source(device)
    structure = find_structure(model.module, batch, source)
    if source is not None and not structure.lists:
        structure, source = find_structure(model.load(device), batch), None
        structure.notes.append("the model runs whole, and all models are in memory")
    memory = WeightMemory(device)  # one fine-tuned model at a time has weights in memory
    return BlockModel(model.module, structure, source), {
        task: BlockModel(teacher.module, structure, teacher.source(device, memory))
        if structure.lists
        else BlockModel(teacher.load(device), structure)
        for task, teacher in inputs.teachers.items()
    }


def _notes_on_layers(calibration: Calibration, structure: Structure) -> list[str]:
    from ..refinement.calibrate import MERGE

    report, notes = calibration.report, []
    if calibration.chosen == MERGE:
        notes.append("no candidate is closer to the fine-tuned models than the merge on held-out rows")
    for why, layers in structure.skipped.items():
        if layers:
            notes.append(f"layers that {why} keep the merge's weights: {some(layers)}")
    if report.idle_experts:
        number = sum(map(len, report.idle_experts.values()))
        notes.append(f"{count(number)} experts got no token of the rows and keep the merge's weights")
    for worst, what in (
        (report.ridges, "layers needed a larger ridge, at most"),
        (report.residuals, "layers where conjugate gradients did not converge; worst residual"),
    ):
        if worst:
            name, value = max(worst.items(), key=lambda item: item[1])
            notes.append(f"{len(worst)} {what} {value:.1g} in {name}")
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
    from ..refinement.model_io import ModelFiles
    from ..refinement.rows import positions_in
    from ..refinement.structure import block_lists
    from ..tasks import complete
    from .dry_run import PROCESS, JobSize, free_disk, free_memory

    options = complete({"batch_size": BATCH_SIZE, **loading}, dry_run_calibrate)
    sources = paths_by_name("data", data)
    references = find_teachers(str(merged), list(sources), paths_by_name("teachers", teachers or {}))
    with opened_inputs(str(merged), sources, references, options, check=check) as inputs:
        module, free = inputs.merged.module, free_memory(inputs.device)
        sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
        blocks = [name for names in block_lists(module) for name in names]
        weights = [sum(sizes.get(n, 0) for n in names) for names in weights_by_block(module, blocks).values()]
        shapes = {layer.path: layer.weights().shape for layer in find_layers(module).values()}
        width = min(max(inputs, outputs) for _, outputs, inputs in shapes.values())
        positions = {
            part: sum(positions_in(batch) for rows in inputs.rows.values() for batch in getattr(rows, part))
            for part in ("fit", "held_out")
        }
        every = sum(positions.values())
        # The block's inputs in the fine-tuned model, in the result, and for the comparison with the merge. What the
        # layers of a block read in the fine-tuned model, and what they return in the result.
        starts = [f"{name}." for name in blocks] or [""]
        inside = max(
            sum(groups * (n_in + n_out) for path, (groups, n_out, n_in) in shapes.items() if path.startswith(start))
            for start in starts
        )
        hidden = 4 * (every * (2 * width + inside) + (width * (every + positions["held_out"]) if check else 0))
        cached = hidden + len(sources) * max(weights)  # a block of every fine-tuned model
        limit = (int(CACHE_SHARE * free) if free else cached) if cache_memory is None else _bytes(cache_memory)
        parts = {
            "process": PROCESS,
            "two blocks": 2 * max(weights),
            "sums of a group": (4 + 8) * 3 * max(groups * (n_in + 1) ** 2 for groups, _, n_in in shapes.values()),
            "cache": min(cached, limit or 0),
        }
        models = (inputs.merged, *inputs.teachers.values())
        nbytes = [model.checkpoint.nbytes for model in models if isinstance(model, ModelFiles)]
        return JobSize(
            bytes_read=sum(nbytes),
            bytes_written=nbytes[0],
            memory=sum(parts.values()),
            free_memory=free,
            free_disk=free_disk(None if out is None else Path(out)),
            memory_parts=parts,
        )


def _max_positions(merged: BlockModel, device: torch.device, free: int | None) -> int:
    """How many tokens or patches fit into a pass through a block of a GPU; 0 on a CPU, where small passes are as fast.

    A block holds about eight values for every output of its widest layer.
    """
    blocks = [name for names in merged.structure.lists for name in names]
    inside = [name for block in blocks for group in merged.structure.groups.get(block, []) for name in group]
    if device.type != "cuda" or not free or not inside:
        return 0
    return int(PASS_SHARE * free / (8 * 4 * max(max(merged.layers[name].weights().shape[1:]) for name in inside)))
