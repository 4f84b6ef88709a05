"""A merge, from its plan to the finished folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cards.card import merge_text, recipe_text, write_card
from ..cards.metadata import license_notes, read_all_metadata, read_metadata
from ..cards.provenance import base_reference, input_entry, model_references, write_record
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.layers import StackedCheckpoint
from ..display import Displayed
from ..errors import MachineError
from ..io.atomic_dir import AtomicDir
from ..notes import Note
from ..progress import NOWHERE, Progress
from ..recipe import NONE, Recipe, plain
from ..rules.kronecker_matching import LAYER_DAMPING
from ..text import size
from .checks import check_step_size, coefficient_notes
from .executor import Executor, LocalExecutor
from .input_state import State, changed, files_read, fingerprint_of, is_complete, recipe_paths, state_of
from .inputs import CurvatureInput, Inputs, Source
from .output import JOURNAL, Output
from .plan import Plan
from .statistics import compute_mean_curvature, compute_statistics

if TYPE_CHECKING:
    from .adapter import AdapterOutput, AdapterReport


@dataclass(repr=False)
class MergeResult(Displayed):
    """The result of a merge; sizes are in bytes."""

    output: Path
    merged: int
    """The number of tensors that went through the rule."""
    copied: int
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    notes: list[Note] = field(default_factory=list)
    already_done: bool = False
    lost: dict[str, float] = field(default_factory=dict)
    """For an adapter: tensor → the share of its change (squared Frobenius norm) that its rank cannot represent."""
    lost_share: float | None = None
    """For an adapter: the same over all tensors together."""

    def _line(self) -> list[str]:
        done = "complete already" if self.already_done else f"{size(self.bytes_written)} in {self.seconds:.1f} s"
        return [str(self.output), f"{self.merged} tensors merged", f"{self.copied} copied", done]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        lost = {} if self.lost_share is None else {"lost_share": self.lost_share, "lost": self.lost}
        return {
            "output": str(self.output),
            "merged_tensors": self.merged,
            "copied_tensors": self.copied,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "already_done": self.already_done,
            **lost,
            "notes": self.notes,
        }


def merge_to_folder(
    plan: Plan,
    out: Path,
    *,
    executor: Executor = LocalExecutor(),  # noqa: B008 (immutable)
    force: bool = False,
    resume: bool = False,
    accept_untrusted: bool = False,
    progress: Progress = NOWHERE,
) -> MergeResult:
    """Merge as planned, on this machine or on a cluster, and write the folder ``out``: a model or an adapter.

    The weights are written to a temporary folder, with a journal of finished blocks. ``resume`` continues an unfinished
    merge with the same fingerprint: the recipe, and the state of every input file. The folder is renamed when complete.
    """
    recipe = plan.recipe
    files = files_read(plan)
    state = state_of(files)
    fingerprint = fingerprint_of(plan, state)
    result = MergeResult(out, len(plan.merged_tensors), plan.copied_tensors, notes=plan.notes)
    if resume and is_complete(out, fingerprint):
        result.already_done = True
        return result

    with AtomicDir(out, "merge", force=force, resume=resume, reads=[*recipe_paths(recipe), *files]) as folder:
        folder.keep = resume
        output: Output | AdapterOutput
        if recipe.output.format == "adapter":
            from .adapter import AdapterOutput

            output = AdapterOutput(plan, folder, executor)
        else:
            output = Output(plan, folder, fingerprint, resume)
        executor.begin(plan, folder, fingerprint, state)
        check_merge(plan, executor, progress, accept_untrusted)

        start = time.perf_counter()
        with output:
            left = output.open()
            plan.statistics = compute_statistics(plan, executor, progress)
            blocks = sum(1 for _ in plan.blocks())
            done = plan.total_read * (blocks - len(left)) // max(1, blocks)
            progress.begin("merging", plan.total_read, done)
            executor.merge(plan, left, output, progress.advance)
            sizes = output.finish()
        check_unchanged(files, state, folder)

        result.output, result.bytes_written = folder.out, plan.total_written
        result.bytes_read = plan.statistics_read + plan.total_read - done
        result.seconds = time.perf_counter() - start
        if (report := output.report) is not None:
            result.bytes_written, result.lost, result.lost_share = sum(sizes.values()), report.lost, report.lost_share
            plan.note(report.notes())
        facts = {"fingerprint": fingerprint, "resumed_blocks": len(output.finished)}
        write_cards(plan, folder, facts, sizes, result.seconds, report)
        (folder.folder / JOURNAL).unlink(missing_ok=True)
    return result


def check_merge(plan: Plan, executor: Executor, progress: Progress, accept_untrusted: bool) -> None:
    """Compute the damping, and check step size, coefficients and licenses. Add their notes to the plan."""
    compute_mean_curvature(plan, executor, progress)
    plan.note(check_step_size(plan, executor, progress, refuse=not accept_untrusted))
    plan.note(coefficient_notes(plan, executor))
    plan.note(license_notes(read_all_metadata(plan.inputs.checkpoints), plan.recipe.output.license))


def check_unchanged(files: list[Path], state: State, folder: AtomicDir) -> None:
    """Raise if an input has changed since its state was taken. The unfinished result is then removed."""
    if path := changed(state, state_of(files)):
        folder.keep = False
        raise MachineError(
            f"{path}: changed during the merge, so that the result may be inconsistent. Nothing was written; merge "
            "again."
        )


def write_cards(
    plan: Plan,
    folder: AtomicDir,
    facts: dict[str, Any],
    sizes: Mapping[str, int],
    seconds: float,
    report: AdapterReport | None,
) -> None:
    """Write gradmerge.json, with ``facts`` among its keys, and README.md. ``report`` is that of an adapter."""
    recipe, inputs = plan.recipe, plan.inputs
    options = {} if recipe.slices else {"options": {name: plain(value) for name, value in inputs.options.items()}}
    facts = facts | {
        "recipe": recipe.to_dict() | options,
        "base": base_reference(recipe, folder.out),
        "models": model_references(recipe, folder.out),
        **damping_and_penalties(plan),
    }
    if recipe.rule.file:
        facts["rule"] = {"file": recipe.rule.file, "sha256": recipe.rule.digest}
    if recipe.merges:
        facts["merges"] = {name: named.to_dict() for name, named in recipe.merges.items()}
    counts = {"merged_tensors": len(plan.merged_tensors), "copied_tensors": plan.copied_tensors}
    write_record(
        folder.folder,
        facts,
        inputs=_input_entries(inputs),
        sizes=sizes,
        seconds=seconds,
        notes=plan.notes,
        output=counts | (report.record() if report else {}),
    )
    text, base = merge_text(recipe), report.base if report else None
    write_card(
        folder.folder,
        folder.out.name,
        f"{text}\n\n{report.text}" if report else text,
        read_all_metadata(inputs.checkpoints),
        relation="merge",
        tags=["merge"],
        base=None if base is None else read_metadata(base),
        base_folder=None if base is None else base.folder,
        license=recipe.output.license,
        recipe=recipe_text(recipe),
    )


def damping_and_penalties(plan: Plan) -> dict[str, Any]:
    """Return the damping of the merge and the penalty of every model, for the record."""
    inputs = plan.inputs
    facts: dict[str, Any] = {}
    if "damping" in plan.rule.inputs:
        facts["damping"] = inputs.damping_of(plan.rule)
        if plan.layer_jobs and inputs.damps_layers and plan.rule.auto_damping != "mean-curvature":
            facts["damping_of_layers"] = f"{LAYER_DAMPING:g} × the mean curvature of the layer"
    if "penalty" in plan.rule.inputs:
        penalties = inputs.penalty or [None] * len(inputs.tuned)
        facts["penalty"] = [
            {"model": model.label, **_penalty_entry(plan.recipe, penalty)}
            for model, penalty in zip(inputs.tuned, penalties, strict=True)
        ]
    return facts


def _penalty_entry(recipe: Recipe, penalty: CurvatureInput | None) -> dict[str, Any]:
    if penalty is None:
        return {"penalty": "H_0", "from": "default"}
    origin = "recipe" if recipe.base is not None and recipe.base.penalty is not None else "recorded"
    if penalty.constant is None:
        return {"penalty": penalty.label, "from": origin}
    return {"penalty": {"identity": penalty.constant} if penalty.constant else NONE, "from": origin}


def _input_entries(inputs: Inputs) -> list[dict[str, Any]]:
    """Return an entry for each model and curvature that was read; for stacked layers, for each source model."""
    sources: dict[Source, None] = {}
    for source in inputs.sources:
        sources |= dict.fromkeys(source.parts if isinstance(source, StackedCheckpoint) else [source])
    roles: dict[Source | None, str] = {inputs.base: "base", inputs.prior: "base curvature"}
    roles |= dict.fromkeys(inputs.penalty, "penalty")
    if isinstance(inputs.base, StackedCheckpoint):
        roles |= dict.fromkeys(inputs.base.parts, "base")
    entries = []
    for source in sources:
        role = roles.get(source, "tuned" if isinstance(source, Checkpoint) else "curvature")
        hub = (source.hub_id, source.folder) if isinstance(source, Checkpoint) else (None, None)
        entries.append(input_entry(role, source.label, source.files(), *hub))
    return entries
